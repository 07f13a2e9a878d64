"""The openai protocol's routes: completions, chat, tokens in and out, models, the tokenizer.

Used by `rollout.serve.app`. `rollout.cli` and `rollout.serve.server` use the chat template.
"""
