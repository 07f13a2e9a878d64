"""The OpenAI door: completions, chat, tokens in and out, models and the tokenizer."""
