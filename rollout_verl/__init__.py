"""verl's rollout backend over this engine: `actor_rollout_ref.rollout.name=rollout`.

`import verl` imports rollout_verl.plugin by the entry point group verl.plugins. It logs errors of
that at DEBUG only: `python -m rollout_verl` shows them.
"""
