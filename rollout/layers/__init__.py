"""Layers of a decoder: torch modules that own weights and let a backend compute.

Used by `rollout.models`, which composes them into model families, and by `rollout.weights`, which
reads and writes their weights.
"""
