"""Tensor parallelism: several ranks, each a process, that run one engine's model together."""
