"""The OpenAI protocol: completions, chat, tokens in and out, models and the tokenizer."""
