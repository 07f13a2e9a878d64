"""Runs models by vLLM under the control of rollout's Engine: `InferenceConfig(engine="vllm")`.

vLLM schedules, keeps the KV cache and computes steps. The Engine keeps what it promises for its own
steps: records of every token with the versions of policy and KV, bounds on the age of KV, verified
updates, states. See docs/how-to/vllm.md. `rollout.apis.engines` finds `make_engine` in
`rollout_vllm.engine` by the entry point `rollout.engines`; nothing else imports this package.
"""
