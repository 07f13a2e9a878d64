"""Everything that differs between devices, behind the protocols of `rollout.backends.base`.

cpu/ and cuda/ implement the protocols. ops/ and executors/ have code that both use. Used by
`rollout.worker`, `rollout.layers`, `rollout.models`, `rollout.weights` and the code that starts
engines.
"""
