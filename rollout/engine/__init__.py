"""The engine of one process: it accepts requests, plans steps and runs them on the model."""
