"""The end that an engine process holds: its line, its lease, and what it does with messages."""
