"""The openai protocol's routes: completions, chat, tokens in and out, models, the tokenizer."""
