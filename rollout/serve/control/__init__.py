"""Control: pauses, memory and weights of the engines, in the protocols of vLLM and SGLang."""
