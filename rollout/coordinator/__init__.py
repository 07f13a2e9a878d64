"""The fleet: a wire protocol and the processes that speak it, clients to coordinator to engines."""
