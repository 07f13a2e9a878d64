"""Building blocks of a decoder: torch modules whose arithmetic a bound backend does.

Used by rollout/models, which composes them into model families.
"""
