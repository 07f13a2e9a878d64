"""The fleet: a wire protocol, and its three sides: clients, the coordinator, engines (agents)."""
