"""The fleet's coordinator, its clients, the agents of its engines, and their messages."""
