"""Checkpoints: reading, writing and loading Hugging Face model directories."""
