"""PromptLedger: issues the prompts of each epoch in order, also across crashes and resumes.

Used by `trainer_hooks.producer`, `trainer_hooks.evaluation`, `trainer_hooks.train.warm_up` and
users' training loops. PromptItem is the type of a prompt in all of `trainer_hooks`. The ledger is
the only writer of the position in the prompts and of their histories. The ledger writes no file.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.errors import ConfigError
from rollout.step.seeds import mix_seed, uniforms
from trainer_hooks.prompts.curriculum import Curriculum, CurriculumDraws
from trainer_hooks.prompts.history import (
    FAILED,
    FILTERED,
    GIVEN_BACK,
    TRAINED,
    PromptHistories,
    PromptHistory,
    PromptOutcome,
)

# Number of evenly spread prompts in a fingerprint. Reading a whole dataset may be slow.
_NUM_FINGERPRINTED = 64
# Limit on the rows of a source without a length, which are all kept in memory.
MAX_ITERATED_ROWS = 1_000_000
# Reason for giving back a prompt whose group grew too old to train on.
STALE = "stale"
_SAME_SOURCE = ("num_prompts", "fingerprint", "seed", "shuffle")


@dataclass(frozen=True, slots=True)
class PromptItem:
    """A prompt, as text or token ids, and the other columns of its row.

    `columns`: passed to the reward function by name, for example `answer`.
    """

    prompt: str | Sequence[int]
    columns: Mapping[str, Any] = field(default_factory=dict)


def as_prompt_item(source: PromptItem | str | Sequence[int] | Mapping[str, Any]) -> PromptItem:
    """Return a PromptItem from a bare prompt, or from a row with the key "prompt".

    The other keys of a row become its columns. Raises ValueError for a row without a prompt.
    """
    if isinstance(source, PromptItem):
        return source
    if isinstance(source, Mapping):
        if "prompt" not in source:
            raise ValueError(f"a row needs the key 'prompt'; this one has {sorted(source)}")
        columns = {name: value for name, value in source.items() if name != "prompt"}
        return PromptItem(source["prompt"], columns)
    return PromptItem(source)


class PromptRows(Protocol):
    """A list, or a dataset with a length whose rows are read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, order=True)
class PromptTicket:
    """One prompt of one epoch, at `position` in the epoch's order and `index` in the source."""

    epoch: int
    position: int
    index: int


class PromptLedger:
    """Issues prompts in a seeded order per epoch and records the outcome of each.

    Each prompt is consumed once per epoch, unless a curriculum draws with replacement. A ticket is
    out from `issue` until it is consumed or given back. Tickets that were given back are issued
    again before new ones.
    `source`: rows as `as_prompt_item` accepts them. The source is a list, a dataset with `len` and
    `[index]`, or an iterable that can be iterated again. A dataset's rows are read when they are
    issued. An iterable is read at once, at most MAX_ITERATED_ROWS rows.
    `shuffle`: False issues the rows in the order of the source.
    `num_epochs`: number of epochs. None means no end.
    `curriculum`: draws the next prompts by their histories instead of the shuffled order.
    `max_histories`: number of prompts whose history is kept. The histories with the oldest last
    outcome are dropped.
    `consumed`, `given_back`: counts of prompts by reason, over all epochs.
    Raises ConfigError for a source that `as_rows` refuses, for a bad row among up to 64 evenly
    spread rows, for `num_epochs` below 1, for a curriculum with shuffle=False, and for a negative
    or infinite weight.
    """

    def __init__(
        self,
        source: PromptRows | Iterable[Any],
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = None,
        curriculum: Curriculum | None = None,
        max_histories: int = 20_000,
    ) -> None:
        self._rows = as_rows(source)
        if num_epochs is not None and num_epochs < 1:
            raise ConfigError(f"num_epochs={num_epochs} must be at least 1, or None for no end")
        if curriculum is not None and not shuffle:
            raise ConfigError(
                "shuffle=False with a curriculum, which draws the order; leave one of them out"
            )
        self._seed, self._shuffle, self._num_epochs = seed, shuffle, num_epochs
        self._epoch, self._position = 0, 0
        self._out: set[PromptTicket] = set()
        self._returned: list[PromptTicket] = []  # a heap
        self._reissues: Counter[PromptTicket] = Counter()  # of unfinished prompts
        self._orders: dict[int, NDArray[np.intp]] = {}
        self._fingerprint = _fingerprint(self._rows)
        self._histories, self._has_trained = PromptHistories(max_histories), False
        self._draws: CurriculumDraws | None = None
        if curriculum is not None:
            self._draws = CurriculumDraws(curriculum, len(self), seed)
            self._draws.weigh(range(len(self)), self._histories.published)
        self.consumed: Counter[str] = Counter()
        self.given_back: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of prompts of one epoch."""
        return len(self._rows)

    @property
    def num_out(self) -> int:
        """Number of prompts that were issued, but neither consumed nor given back."""
        return len(self._out)

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt can be issued now. Prompts that are out may still be given back."""
        is_over = self._num_epochs is not None and self._epoch >= self._num_epochs
        return is_over and not self._returned

    def item(self, ticket: PromptTicket) -> PromptItem:
        """Return the ticket's prompt, as text or a list of token ids, and its columns.

        Raises ConfigError for a row whose prompt is missing, empty or neither text nor token ids.
        """
        return item_of(self._rows, ticket.index)

    def issue(self) -> PromptTicket | None:
        """Return the earliest ticket given back, or else a new one, or None if no prompt is left.

        A curriculum uses the histories as of the last prompt consumed as "trained".
        """
        if self._has_trained:
            self._publish_histories()
        if self._returned:
            ticket = heapq.heappop(self._returned)
        elif self.is_exhausted:
            return None
        else:
            ticket = self._next_ticket()
            self._position += 1
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
        self._out.add(ticket)
        return ticket

    def consume(
        self,
        ticket: PromptTicket,
        reason: str = TRAINED,
        reward: float | None = None,
        version: int | None = None,
    ) -> None:
        """Finish the prompt for this epoch. Raises ConfigError if the ticket is not out.

        `reason`: "trained", "failed", "filtered" or another text. The history counts another text
        as filtered.
        `reward`, `version`: the group's mean reward and newest version, for the history.
        """
        self._remove_issued(ticket)
        self._reissues.pop(ticket, None)
        self.consumed[reason] += 1
        self._has_trained |= reason == TRAINED
        self._record(ticket, reason if reason in (TRAINED, FAILED) else FILTERED, reward, version)

    def give_back(self, ticket: PromptTicket, reason: str) -> None:
        """Put the prompt back, to be issued again. Raises ConfigError if the ticket is not out."""
        self._remove_issued(ticket)
        self.given_back[reason] += 1
        if reason == STALE:
            self._reissues[ticket] += 1
        heapq.heappush(self._returned, ticket)
        self._record(ticket, GIVEN_BACK)

    def history(self, index: int) -> PromptHistory:
        """Return the history of the prompt in row `index`, with all outcomes so far."""
        return self._histories.latest(index)

    def num_reissues(self, ticket: PromptTicket) -> int:
        """Return how often an unfinished prompt was given back as STALE."""
        return self._reissues[ticket]

    def _remove_issued(self, ticket: PromptTicket) -> None:
        if ticket not in self._out:
            raise ConfigError(f"{ticket} is not out: it was consumed or given back already")
        self._out.remove(ticket)

    def _record(
        self,
        ticket: PromptTicket,
        fate: str,
        reward: float | None = None,
        version: int | None = None,
    ) -> None:
        key = (ticket.epoch, ticket.position)
        self._histories.add(
            PromptOutcome(key=key, index=ticket.index, fate=fate, reward=reward, version=version)
        )

    def _publish_histories(self) -> None:
        changed = self._histories.publish()
        self._has_trained = False
        if self._draws is not None:
            self._draws.weigh(sorted(changed), self._histories.published)

    # ---- state

    def state_dict(self, untrained: Iterable[PromptTicket] = ()) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON. Prompts that are out count as not consumed.

        `untrained`: tickets consumed as "trained" that also count as not consumed.
        """
        pending = {*self._out, *self._returned}
        again = set(untrained) - pending
        consumed = self.consumed - Counter({"trained": len(again)})
        unfinished = sorted(pending | again)
        state = {
            "num_prompts": len(self),
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "unfinished": [[t.epoch, t.position] for t in unfinished],
            "reissues": [[t.epoch, t.position, n] for t, n in sorted(self._reissues.items())],
            "consumed": dict(consumed),
            "given_back": dict(self.given_back),
            "histories": self._histories.state({(t.epoch, t.position) for t in again}),
        }
        if self._draws is not None:
            rows = [ticket.index for ticket in unfinished]
            state["curriculum"] = {"unfinished_rows": rows, **self._draws.state()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Unfinished prompts are issued first, in their old order.

        Raises ConfigError if prompts are out, and for a state with other prompts, another seed,
        order or curriculum.
        """
        if self._out:
            raise ConfigError(f"{len(self._out)} prompts are out; load a state before any is")
        mine = self.state_dict()
        different = [name for name in _SAME_SOURCE if state.get(name) != mine[name]]
        if different:
            raise ConfigError(
                "the state is that of other prompts: "
                + ", ".join(f"{n}={state.get(n)!r} instead of {mine[n]!r}" for n in different)
            )
        if (self._draws is not None) != ("curriculum" in state):
            saved, own = ("without", "with") if self._draws is not None else ("with", "without")
            raise ConfigError(
                f"the state is that of a run {saved} a curriculum, and this run is {own} one: the "
                "rest of the epoch would not be the same prompts"
            )
        if self._draws is not None:
            self._draws.load(state["curriculum"])
        self._returned = self._unfinished(state)
        self._epoch, self._position = state["epoch"], state["position"]
        heapq.heapify(self._returned)
        known = {(ticket.epoch, ticket.position): ticket for ticket in self._returned}
        self._reissues = Counter({known[e, p]: n for e, p, n in state["reissues"]})
        self.consumed = Counter(state["consumed"])
        self.given_back = Counter(state["given_back"])
        self._histories.load(state["histories"])
        if self._draws is not None:
            self._draws.weigh(range(len(self)), self._histories.published)

    def _unfinished(self, state: Mapping[str, Any]) -> list[PromptTicket]:
        places = state["unfinished"]
        if self._draws is None:
            return [PromptTicket(e, p, self._index(e, p)) for e, p in places]
        rows = state["curriculum"]["unfinished_rows"]
        return [PromptTicket(e, p, row) for (e, p), row in zip(places, rows, strict=True)]

    # ---- order

    def _next_ticket(self) -> PromptTicket:
        epoch, position = self._epoch, self._position
        draw = self._index if self._draws is None else self._draws.draw
        return PromptTicket(epoch, position, draw(epoch, position))

    def _index(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if epoch not in self._orders:
            # Two epochs are in use around a change of epoch. Older epochs are rare: recompute them.
            while len(self._orders) > 1:
                del self._orders[min(self._orders)]
            self._orders[epoch] = _shuffled(len(self), mix_seed(self._seed, epoch))
        return int(self._orders[epoch][position])


def _shuffled(num_prompts: int, seed: int) -> NDArray[np.intp]:
    """Return a permutation that depends only on the arguments, in all releases of numpy."""
    seeds = np.full(num_prompts, seed, dtype=np.uint64)
    return np.argsort(uniforms(seeds, np.arange(num_prompts)), kind="stable")


def as_rows(source: PromptRows | Iterable[Any]) -> PromptRows:
    """Return `source`, or the list of its rows if it has no length or index.

    Raises ConfigError for a single prompt, an iterator, a source without rows, and for more than
    MAX_ITERATED_ROWS rows of a source without a length.
    """
    if isinstance(source, (str, bytes, Mapping, PromptItem)):
        raise ConfigError(f"prompts is one {type(source).__name__}; give a sequence of prompts")
    if isinstance(source, Iterator):
        raise ConfigError(
            "prompts is an iterator, which a resumed run could not read again; pass a list, a "
            "dataset, or an object whose __iter__ starts from the beginning"
        )
    has_rows = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    rows: PromptRows = source if has_rows else _iterated(source)  # type: ignore[arg-type,assignment]
    if not len(rows):
        raise ConfigError("there are no prompts")
    return rows


def _iterated(source: Iterable[Any]) -> list[Any]:
    rows = list(islice(source, MAX_ITERATED_ROWS + 1))
    if len(rows) > MAX_ITERATED_ROWS:
        raise ConfigError(
            f"prompts is a {type(source).__name__} without a length and with more than "
            f"{MAX_ITERATED_ROWS:,} rows, which may never end; bound it, for example with take(n), "
            "or give rows by number: a list, a datasets.Dataset, a JSONL or parquet file"
        )
    return rows


def item_of(rows: PromptRows, index: int) -> PromptItem:
    """Return row `index` as a PromptItem, with a prompt that is text or a list of token ids.

    Raises ConfigError for a row whose prompt is missing, empty or neither text nor token ids.
    """
    try:
        item = as_prompt_item(rows[index])
    except ValueError as error:
        raise ConfigError(f"row {index} of the prompts: {error}") from error
    prompt: Any = item.prompt
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or not len(prompt):
        raise ConfigError(f"row {index} of the prompts, {prompt!r}, is neither text nor token ids")
    return PromptItem(prompt if isinstance(prompt, str) else list(prompt), item.columns)


def _fingerprint(rows: PromptRows) -> str:
    count = min(len(rows), _NUM_FINGERPRINTED)
    digest = hashlib.sha256()
    for i in range(count):
        index = i * (len(rows) - 1) // max(count - 1, 1)
        digest.update(repr(item_of(rows, index).prompt).encode())
    return digest.hexdigest()[:16]
