"""An HTTP server over an AsyncLLM or ThreadedLLM, in the protocols of OpenAI, vLLM and SGLang.

`rollout.apis.serving` starts it; `rollout.cli` uses its config and chat template.
"""
