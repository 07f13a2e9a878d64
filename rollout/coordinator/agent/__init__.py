"""The engine's side: its main loop, its lease, and what it does for each message."""
