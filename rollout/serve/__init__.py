"""An HTTP server over an AsyncLLM or ThreadedLLM, with the APIs of OpenAI, vLLM and SGLang.

`rollout.apis.serving` starts the server. `rollout.cli` imports ServeConfig and the chat template.
"""
