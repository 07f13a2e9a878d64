"""Tensor parallelism: several processes run one engine's model together, each a part of it.

Used by `rollout.engine.build` and `rollout.apis.spmd`.
"""
