"""The demo's prompts, which ask for a palindrome of given letters, and its tokenizer.

The configs conf/data/palindrome.yaml and conf/model/tiny.yaml name `prompts` and
`letter_tokenizer`, which `trainer_hooks.train.task` imports. reasoning-gym makes the prompts and
scores the answers.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer_hooks import PromptItem
from trainer_hooks.prompts.sources import ReasoningGymPrompts

# Number of items of a seed. A run reads far fewer items, so runs of two seeds share no item.
ITEMS_PER_SEED = 1_000_000
MAX_SEEDS = 1_000
NUM_PROMPTS = 50_000  # training and warm-up have so many prompts each
END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN = "<end>", "<pad>", "<unknown>"
SEPARATOR = ", "


def prompts(
    part: str, seed: int, *, num_held_out: int, dataset_seed: int, min_length: int, max_length: int
) -> Sequence[PromptItem] | TrainingPrompts:
    """Return the prompts of a part of the run with `seed`.

    `part` is "held_out", "train" or "warmup". Training and warm-up never get the letters of a
    held-out item, in any order. Parts and runs share no items.
    """
    # reasoning-gym draws item i of a dataset with seed s from seed s + i, so that datasets with
    # nearby seeds share items. All runs share one dataset and use different ranges of it.
    items = ReasoningGymPrompts(
        "palindrome_generation",
        size=num_held_out + MAX_SEEDS * ITEMS_PER_SEED,
        seed=dataset_seed,
        min_length=min_length,
        max_length=max_length,
    )
    held_out = items[:num_held_out]
    if part == "held_out":
        return held_out
    start = num_held_out + seed * ITEMS_PER_SEED + (part == "warmup") * ITEMS_PER_SEED // 2
    return TrainingPrompts(items, start, {sorted_letters(item) for item in held_out})


class TrainingPrompts:
    """A sequence of NUM_PROMPTS prompts, each created when it is read. An item with the letters of
    a held-out item is replaced by the item NUM_PROMPTS places later."""

    def __init__(self, items: ReasoningGymPrompts, start: int, held_out: set[str]) -> None:
        self._items, self._start, self._held_out = items, start, held_out

    def __len__(self) -> int:
        return NUM_PROMPTS

    def __getitem__(self, index: int) -> PromptItem:
        if not 0 <= index < NUM_PROMPTS:
            raise IndexError(f"prompt {index} of {NUM_PROMPTS}")
        place = self._start + index
        while sorted_letters(item := self._items[place]) in self._held_out:
            place += NUM_PROMPTS
        return item


def letters_of(item: PromptItem) -> list[str]:
    return list(item.columns["entry"]["metadata"]["letters"])


def sorted_letters(item: PromptItem) -> str:
    """Return the item's letters in alphabetical order."""
    return "".join(sorted(letters_of(item)))


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the demo. A character without a token is UNKNOWN_TOKEN.

    The tokens are each lowercase letter, the line break, the instruction that begins every prompt,
    and the separator of its letters.
    """
    item = ReasoningGymPrompts("palindrome_generation", size=1)[0]
    instruction, _, _ = str(item.prompt).partition(SEPARATOR.join(letters_of(item)))
    tokens = [PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, "\n", *string.ascii_lowercase]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in (instruction, SEPARATOR)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
    )
