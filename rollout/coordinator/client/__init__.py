"""InferenceClient: the connection of trainers and users to a fleet."""
