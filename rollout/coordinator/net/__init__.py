"""Connections of a fleet: ZeroMQ sockets, sessions over them, and CURVE keys."""
