"""One line for users: LLM."""
