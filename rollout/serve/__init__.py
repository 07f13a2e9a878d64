"""An HTTP server over an AsyncLLM or ThreadedLLM, in the protocols of OpenAI, vLLM and SGLang."""
