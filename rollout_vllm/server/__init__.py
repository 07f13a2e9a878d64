"""Runs an Engine's steps in a `vllm serve` process of others.

`InferenceConfig(engine="vllm-server", engine_options={"url": ...})` chooses it. No code of this
project runs in that process, and vLLM need not be installed here. Requests and weight updates go to
the server's HTTP routes. See docs/how-to/vllm.md. `rollout.apis.engines` finds `make_engine` in
`rollout_vllm.server.engine` by the entry point `rollout.engines`.
"""
