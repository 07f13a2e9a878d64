"""Control of the engines' pauses, memory and weights, for the routes of vLLM and SGLang.

Used by `rollout.serve.app`, `rollout.serve.vllm`, `rollout.serve.sglang`, `rollout.serve.health`
and `rollout.serve.metrics`.
"""
