"""What a user brings to examples/train_grpo.py: a checkpoint, a file of questions, a reward.

python -m tests.examples.arithmetic DIRECTORY     # writes model/ and questions.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SYSTEM_PROMPT = "Answer with a number."
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def questions(largest: int) -> Iterator[dict[str, str]]:
    """Sums and differences of numbers from 0 to `largest`."""
    for a in range(largest + 1):
        for b in range(largest + 1):
            yield {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}
            yield {"prompt": f"What is {a} - {b}?", "answer": str(a - b)}


def write_questions(path: Path, largest: int = 19) -> None:
    """A JSONL file of them, shuffled."""
    rows = list(questions(largest))
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_checkpoint(directory: Path, hidden_size: int = 128, num_layers: int = 3) -> None:
    """A Qwen3 with random weights, and a tokenizer trained on such questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    texts = [row["prompt"] for row in questions(19)] + [SYSTEM_PROMPT, "system user assistant"] * 9
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden_size // 8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)


def is_right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """The user's reward: 1 for the very number."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object
) -> float:
    """verl's convention: 1 for an answer of the right length."""
    return float(len(solution_str) == len(ground_truth))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_checkpoint(target / "model")
    write_questions(target / "questions.jsonl")
