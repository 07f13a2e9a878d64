"""InferenceClient: connects trainers and users to a fleet."""
