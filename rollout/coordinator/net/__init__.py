"""The fleet's connections: ZeroMQ sockets, sessions over them, and the keys that peers need."""
