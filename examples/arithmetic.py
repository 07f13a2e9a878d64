"""The parts that a user brings to `rollout train`: a checkpoint, files of questions, a reward.

    python -m examples.arithmetic DIRECTORY

writes a model and sums of two numbers with two digits. examples/sums.yaml is the config of a job
that names these files and `is_right`.

model/ is a Qwen3 of 0.1M parameters with random weights, and its tokenizer. questions.jsonl and
held_out.jsonl have right answers. homework.jsonl has answers that forget the carries in three sums
of four. A warm-up on the homework teaches the model to add column by column, and mostly to forget
the carries. Training with the reward `is_right` then teaches it to carry. No sum of held_out.jsonl
is in the other files.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SYSTEM_PROMPT = "Answer with three digits."
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>"]
NUMBERS = range(10, 100)
NUM_HELD_OUT = 200
NUM_HOMEWORK = 30_000
FORGOTTEN_SHARE = 0.75
Sum = tuple[int, int]


def is_right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for a completion that equals its answer, ignoring white space around it, else 0."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def all_sums(numbers: Sequence[int] = NUMBERS) -> list[Sum]:
    """Return all pairs of numbers, in a fixed shuffled order."""
    sums = [(a, b) for a in numbers for b in numbers]
    random.Random(0).shuffle(sums)
    return sums


def forget_carries(a: int, b: int) -> int:
    """Return a + b of two-digit numbers, added by columns of digits without carrying."""
    tens, ones = a // 10 + b // 10, a % 10 + b % 10
    return tens % 10 * 10 + ones % 10


def write_questions(path: Path, sums: Iterable[Sum]) -> None:
    """Write a JSONL file of `sums` with their right answers."""
    _write_rows(path, ((a, b, a + b) for a, b in sums))


def write_homework(path: Path, sums: Sequence[Sum]) -> None:
    """Write a JSONL file of NUM_HOMEWORK random `sums`, most of them answered without carries."""
    rng = random.Random(1)
    drawn = rng.choices(sums, k=NUM_HOMEWORK)
    is_forgotten = (rng.random() < FORGOTTEN_SHARE for _ in drawn)
    rows = zip(drawn, is_forgotten, strict=True)
    _write_rows(
        path, ((a, b, forget_carries(a, b) if forgets else a + b) for (a, b), forgets in rows)
    )


def write_checkpoint(directory: Path, hidden_size: int = 64, num_layers: int = 2) -> None:
    """Write a Qwen3 with random weights and its tokenizer to `directory`."""
    tokenizer = new_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        max_position_embeddings=1024,
        initializer_range=0.1,  # with 0.02 so narrow a model takes far longer to learn anything
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, with one token per digit and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [question_of(a, b) for a, b in all_sums()[:100]] + [SYSTEM_PROMPT] * 9
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<pad>", "<|end|>", *ROLE_TOKENS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=ROLE_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def question_of(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def _write_rows(path: Path, rows: Iterable[tuple[int, int, int]]) -> None:
    lines = ({"prompt": question_of(a, b), "answer": f"{total:03}"} for a, b, total in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory / "model")
    sums = all_sums()
    held_out, others = sums[:NUM_HELD_OUT], sums[NUM_HELD_OUT:]
    write_questions(directory / "held_out.jsonl", held_out)
    write_questions(directory / "questions.jsonl", others)
    write_homework(directory / "homework.jsonl", others)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
