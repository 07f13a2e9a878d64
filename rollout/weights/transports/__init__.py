"""Weight transports: how the tensors of a push travel from a trainer to the engines of a fleet."""
