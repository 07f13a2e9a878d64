"""The demo's prompts, which ask for a palindrome of given letters, and its tokenizer.

The prompts come from reasoning-gym, whose verifier scores the answers. Used by
`trainer_hooks.train.task` through configs: conf/data/palindrome.yaml names `prompts`,
conf/model/tiny.yaml names `letter_tokenizer`. Nothing is written.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer_hooks import PromptItem
from trainer_hooks.prompts.sources import ReasoningGymPrompts

# Number of items of a seed. It is far more than a run reads, so runs of two seeds share no item.
ITEMS_PER_SEED = 1_000_000
MAX_SEEDS = 1_000
NUM_PROMPTS = 50_000  # for training, and as many for the warm-up
END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN = "<end>", "<pad>", "<unknown>"
SEPARATOR = ", "


def prompts(
    part: str, seed: int, *, num_held_out: int, dataset_seed: int, min_length: int, max_length: int
) -> Sequence[PromptItem] | TrainingPrompts:
    """Return the prompts of a part of the run with `seed`.

    `part`: "held_out", "train" or "warmup".
    reasoning-gym draws item i of a dataset with seed s from seed s + i, so datasets with nearby
    seeds share items. Therefore all runs share one dataset, and each part of each run gets its own
    range of indices. The first items are held out for evaluation; training and warm-up never get
    the letters of a held-out item, in any order.
    """
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
    """A sequence of NUM_PROMPTS prompts, each created when it is read.

    An item with the letters of a held-out item is replaced by the item NUM_PROMPTS further on.
    """

    def __init__(self, items: ReasoningGymPrompts, start: int, held_out: set[str]) -> None:
        self._items, self._start, self._held_out = items, start, held_out

    def __len__(self) -> int:
        """Number of prompts."""
        return NUM_PROMPTS

    def __getitem__(self, index: int) -> PromptItem:
        if not 0 <= index < NUM_PROMPTS:
            raise IndexError(f"prompt {index} of {NUM_PROMPTS}")
        place = self._start + index
        while sorted_letters(item := self._items[place]) in self._held_out:
            place += NUM_PROMPTS
        return item


def letters_of(item: PromptItem) -> list[str]:
    """Return the letters that the item's prompt gives."""
    return list(item.columns["entry"]["metadata"]["letters"])


def sorted_letters(item: PromptItem) -> str:
    """Return the item's letters in alphabetical order, to compare the letters of items."""
    return "".join(sorted(letters_of(item)))


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each lowercase letter, for the line break, for the
    instruction that begins every prompt, and for the separator of its letters.

    Any other character is UNKNOWN_TOKEN.
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
