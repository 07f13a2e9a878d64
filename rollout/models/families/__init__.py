"""The model families, one file of values each."""
