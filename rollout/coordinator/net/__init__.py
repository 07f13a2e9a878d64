"""ZeroMQ sockets of a fleet: links, addresses, and who may connect."""
