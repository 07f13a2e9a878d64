"""A store to buy in: an environment with two tools, state and a reward, and a tokenizer for it.

    rollout train --config-dir examples --config-name store    # store.yaml; a minute on a CPU

A small random model is told "Buy a fig." It has to ask for the price with one tool and to pay it
with the other. The warm-up learns from demonstrations. Four in five of them ask for the price of
the next item in ITEMS and pay that price. With GRPO the model then learns from the reward alone to
ask for the right item. See docs/how-to/environments.md.

Used by examples/store.yaml, the config of the job, which names `prompts`, `Store` and
`store_tokenizer`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.text import RenderedText
from trainer_hooks import PromptItem
from trainer_hooks.environments import ToolCallError, ToolEnvironment, tool

ITEMS = ("fig", "pear", "plum", "lemon", "melon", "apple")
LARGEST_PRICE = 9
CARELESS_SHARE = 0.8  # fraction of demonstrations that ask for the next item's price
CALL, CALL_END = "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}
{{- tool.function.name + ': ' + tool.function.description + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Store(ToolEnvironment):
    """An episode of one purchase. The model gets prices only from the tool `price`."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.prices: dict[str, int] = dict(zip(ITEMS, row["prices"], strict=True))
        self.item, self.has_asked, self.paid = row["item"], False, 0

    @tool
    def price(self, item: str) -> int:
        """the price of an item"""
        if item not in self.prices:
            raise ToolCallError(f"there is no {item}")
        self.has_asked = self.has_asked or item == self.item
        return self.prices[item]

    @tool
    def pay(self, amount: int) -> str:
        """pay the price, once"""
        if self.paid:
            raise ToolCallError("you have paid")
        self.paid = amount
        return "thanks"

    def reward(self) -> Mapping[str, float]:
        is_paid = self.paid == self.prices[self.item]
        return {"asked": 0.2 * self.has_asked, "paid": 0.8 * is_paid}

    def state(self) -> Mapping[str, Any]:
        return {"price": self.prices[self.item], "paid": self.paid}


def tasks(seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` random rows with the prompt, the wanted item and the prices of all items."""
    numbers, rows = random.Random(seed), []
    for _ in range(count):
        prices = [numbers.randint(1, LARGEST_PRICE) for _ in ITEMS]
        item = numbers.choice(ITEMS)
        rows.append({"prompt": f"Buy a {item}.", "item": item, "prices": prices})
    return rows


def call(name: str, **arguments: Any) -> str:
    """Return a tool call in the model's format."""
    return f"{CALL}{json.dumps({'name': name, 'arguments': arguments})}{CALL_END}"


def purchase(row: Mapping[str, Any], asked: str) -> Iterator[tuple[str, str]]:
    """Yield the model's text and the tool's reply for each turn that pays the price of `asked`."""
    price = row["prices"][ITEMS.index(asked)]
    yield call("price", item=asked), str(price)
    yield call("pay", amount=price), "thanks"
    yield "Done.", ""


def next_on_shelf(item: str) -> str:
    return ITEMS[(ITEMS.index(item) + 1) % len(ITEMS)]


def demonstrations(tokenizer: Any, seed: int, count: int) -> Iterator[PromptItem]:
    """Yield a prompt with its column `answer` for each turn of `count` demonstrated purchases."""
    numbers = random.Random(seed)
    for row in tasks(seed, count):
        messages = [{"role": "user", "content": row["prompt"]}]
        is_careless = numbers.random() < CARELESS_SHARE
        asked = next_on_shelf(row["item"]) if is_careless else row["item"]
        for said, told in purchase(row, asked):
            text = tokenizer.apply_chat_template(
                messages, tools=list(Store().tools), tokenize=False, add_generation_prompt=True
            )
            yield PromptItem(RenderedText(text), {"answer": said})
            messages += [
                {"role": "assistant", "content": said},
                {"role": "tool", "content": told},
            ]


def prompts(part: str, seed: int, *, num_held_out: int = 64) -> list[Any]:
    """Return the rows of `part`.

    "train" and "held_out" are purchases. "warmup" has the turns of demonstrated purchases.
    """
    if part == "warmup":
        return list(demonstrations(store_tokenizer(), seed, 2_000))
    return tasks(1_000_000, num_held_out) if part == "held_out" else tasks(seed, 10_000)


def store_tokenizer() -> Any:
    """Train a tokenizer on purchases, so that a call has few tokens. It has a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    lines = [f"{t['function']['name']}: {t['function']['description']}" for t in Store().tools]
    texts = [f"{each}\n" for each in ("system", "user", "assistant", "tool", *lines)] * 500
    for row in tasks(0, 500):
        texts.append(row["prompt"])
        for said, told in purchase(row, row["item"]):
            texts += [said.removeprefix(CALL).removesuffix(CALL_END), told]
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    marks = [AddedToken(mark, special=False, normalized=False) for mark in (CALL, CALL_END)]
    tokenizer.add_tokens(marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
