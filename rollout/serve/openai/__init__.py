"""The routes of the openai protocol: completions, chat, tokens in and out, models, tokenizer.

Used by `rollout.serve.app`. `rollout.cli` and `rollout.serve.server` use the chat template.
"""
