"""InferenceClient: the end that trainers and users hold."""
