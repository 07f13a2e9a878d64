"""Weight transports: ways to send the tensors of a push from a trainer to a fleet's engines."""
