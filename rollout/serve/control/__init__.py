"""Control of the engines' pauses, memory and weights, for the routes of vLLM and SGLang."""
