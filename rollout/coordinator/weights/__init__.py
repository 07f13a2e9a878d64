"""Weight transports: how the tensors of a push come from a trainer to the engines of a fleet."""
