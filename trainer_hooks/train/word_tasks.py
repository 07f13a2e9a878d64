"""Two tasks that SmolLM2 learns in minutes: reverse a list of words, write number words as digits.

`trainer_hooks.train.task` imports the functions, which conf/data/revlist.yaml and
conf/data/digits.yaml name. It calls them as `function(part, seed, **options)` with part "train",
"warmup" or "held_out". Rows have the column `answer`. Held-out rows are equal for all seeds, and no
run trains on them. `benchmarks.kv_age` uses `reversed_lists`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from rollout.errors import ConfigError
from trainer_hooks import PromptItem

NUM_PROMPTS = 2_000  # rows of the parts "train" and "warmup" of one seed
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Common nouns of three to seven letters.
WORDS = tuple(
    """
    apple arm autumn bag ball bank basket bee bell bench bird boat bone book bottle bowl box
    branch bread brick bridge brush bucket bus butter button cake camera candle car carpet cat
    cave chair cheese cherry circle city clock cloud coat coffee coin corn cup desk dog door
    dress drum duck ear egg engine eye farm father field finger fire fish flag floor flower
    fly foot forest fork fox frog fruit garden gate glass glove goat gold grape grass guitar
    hair hammer hand hat head heart hill honey horse house ice iron island jacket juice key
    kite knee knife lake lamp leaf leg lemon letter lion lip market milk mirror moon mother
    mouse mouth needle nest night nose nut ocean onion orange oven owl page paint paper park
    pen pencil piano pig pillow plane plant plate pocket potato queen rabbit rain ring river
    road rock roof room root rope rose salt sand school sea seat seed sheep ship shirt shoe
    silver sister sky snow soap sock song soup spoon spring square star stone store storm
    street sugar summer sun table tail tea ticket tiger tooth tower town train tree truck
    valley village wall watch water wave wheel wind window wine wing winter wolf wood yard
    """.split()  # noqa: SIM905
)
Row = tuple[str, str]


def reversed_lists(
    part: str, seed: int, *, num_held_out: int = 200, num_words: int = 4
) -> Sequence[PromptItem]:
    """Return rows such as "lamp, river, fox, bread" with the answer "bread, fox, river, lamp"."""
    if not 1 <= num_words <= len(WORDS):
        raise ConfigError(f"num_words={num_words} must be from 1 to {len(WORDS)}")

    def draw(source: random.Random) -> Row:
        words = source.sample(WORDS, num_words)
        return ", ".join(words), ", ".join(reversed(words))

    num_rows = math.perm(len(WORDS), num_words)
    return _rows(part, seed, num_held_out, draw, f"num_words={num_words}", num_rows)


def number_words(
    part: str, seed: int, *, num_held_out: int = 200, num_digits: int = 4
) -> Sequence[PromptItem]:
    """Return rows such as "four one nine two" with the answer "4192". Digits are from 1 to 9."""
    if num_digits < 1:
        raise ConfigError(f"num_digits={num_digits} must be at least 1")

    def draw(source: random.Random) -> Row:
        digits = [source.randrange(1, 10) for _ in range(num_digits)]
        return " ".join(DIGITS[digit] for digit in digits), "".join(map(str, digits))

    return _rows(part, seed, num_held_out, draw, f"num_digits={num_digits}", 9**num_digits)


def _rows(
    part: str,
    seed: int,
    num_held_out: int,
    draw: Callable[[random.Random], Row],
    size: str,
    num_rows: int,
) -> Sequence[PromptItem]:
    """Return the held-out rows, or NUM_PROMPTS other rows of the part, made by `draw`.

    `num_rows` counts the different rows that `draw` can make. Raises ConfigError, which names
    `size`, if more than half of them are held out.
    """
    if num_rows < 2 * num_held_out:
        raise ConfigError(
            f"{size} gives {num_rows} rows, fewer than twice num_held_out={num_held_out}; "
            "lower num_held_out, or make the rows longer"
        )
    held_out: dict[str, str] = {}
    source = random.Random("held out")
    while len(held_out) < num_held_out:
        held_out.update([draw(source)])
    if part == "held_out":
        return [_item(row) for row in held_out.items()]
    source = random.Random(f"{part} {seed}")
    rows: list[PromptItem] = []
    while len(rows) < NUM_PROMPTS:
        row = draw(source)
        if row[0] not in held_out:
            rows.append(_item(row))
    return rows


def _item(row: Row) -> PromptItem:
    return PromptItem(prompt=row[0], columns={"answer": row[1]})
