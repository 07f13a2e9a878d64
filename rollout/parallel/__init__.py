"""Communication of the ranks of one engine: sums, shared memory, and commands of rank 0."""
