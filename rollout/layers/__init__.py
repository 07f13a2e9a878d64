"""Building blocks of a decoder: torch modules that let a backend compute.

Used by `rollout.models`, which composes them into model families; `rollout.weights` reads and
writes their weights.
"""
