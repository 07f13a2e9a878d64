"""An HTTP server over an AsyncLLM, in the protocols of OpenAI, vLLM and SGLang."""
