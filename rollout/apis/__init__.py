"""The high-level API: LLM and AsyncLLM."""
