"""A rollout backend for verl with this engine: `actor_rollout_ref.rollout.name=rollout`.

verl imports `rollout_verl.plugin` through the entry point group verl.plugins and logs errors of
that import only at DEBUG. `python -m rollout_verl` prints these errors.
"""
