"""Communication among the ranks of an engine: collectives, shared memory and commands."""
