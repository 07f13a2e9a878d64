"""The fleet: its messages, its clients, its coordinator, and the agents of its engines."""
