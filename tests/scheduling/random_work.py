"""Hypothesis strategies and seeded generators of small engines and of operations on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tests.fakes import VOCAB_SIZE
from tests.scheduling.oracle import Prefixes, Sample, Sizes
from tests.scheduling.rig import Rig

# Half of the prompts start with some of this, so that they find each other's blocks.
SHARED_TEXT = tuple(range(1, 13))

# An operation on a rig.
Op = Callable[[Rig], None]


@dataclass(frozen=True, slots=True)
class Add:
    """Add a group, or requests of another engine. The prompt is cut to the engine's limit."""

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]
    priority: int
    num_known: int = 0

    def __call__(self, rig: Rig) -> None:
        sizes = rig.sizes
        longest = sizes.num_blocks * sizes.block_size
        if not sizes.chunked:
            longest = min(longest, sizes.max_tokens)
        prompt = list(self.prompt[:longest])
        rig.add(prompt, *self.samples, priority=self.priority, num_known=self.num_known)


@dataclass(frozen=True, slots=True)
class Advance:
    """Schedule, run or commit: the first that is possible, counted from `first`."""

    first: int

    def __call__(self, rig: Rig) -> None:
        for index in range(self.first, self.first + 3):
            if index % 3 == 0 and rig.num_in_flight < rig.sizes.depth:
                if rig.schedule() is not None:
                    return
            elif index % 3 == 1 and rig.planned:
                return rig.run()
            elif index % 3 == 2 and rig.ran:
                rig.commit()
                return


@dataclass(frozen=True, slots=True)
class Steps:
    """Run whole steps."""

    count: int

    def __call__(self, rig: Rig) -> None:
        for _ in range(self.count):
            Advance(0)(rig)
            Advance(1)(rig)
            Advance(2)(rig)


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort one of the unfinished requests."""

    choice: int

    def __call__(self, rig: Rig) -> None:
        if unfinished := rig.unfinished():
            rig.abort(unfinished[self.choice % len(unfinished)])


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Set a new version and drop KV older than `num_kept` versions, or all if `recomputes`."""

    num_kept: int | None
    recomputes: bool

    def __call__(self, rig: Rig) -> None:
        rig.set_version(rig.version + 1)
        if self.recomputes:
            rig.requeue_running()
            rig.drop_unused_blocks()
        if self.num_kept is not None:
            rig.requeue_older_than(rig.version - self.num_kept)


@dataclass(frozen=True, slots=True)
class Failure:
    """Let a forward pass raise."""

    after_writes: bool

    def __call__(self, rig: Rig) -> None:
        rig.fail_step(after_writes=self.after_writes)


def samples() -> st.SearchStrategy[Sample]:
    token = st.integers(0, VOCAB_SIZE - 1)
    return st.builds(
        Sample,
        num_new=st.integers(1, 14),
        seed=st.integers(0, 3),
        wants_scores=st.integers(0, 5).map(lambda n: n == 0),
        end_ids=st.lists(token, max_size=1).map(tuple),
        stop_words=st.lists(st.lists(token, min_size=1, max_size=2).map(tuple), max_size=2).map(
            tuple
        ),
    )


def adds() -> st.SearchStrategy[Add]:
    token = st.integers(0, VOCAB_SIZE - 1)
    return st.builds(
        Add,
        st.builds(
            lambda length, tail: SHARED_TEXT[:length] + tail,
            st.just(0) | st.integers(0, len(SHARED_TEXT)),
            st.lists(token, min_size=1, max_size=8).map(tuple),
        ),
        st.lists(samples(), min_size=1, max_size=4).map(tuple),
        st.sampled_from((0, 0, 0, 1, -1)),
        st.sampled_from((0, 0, 0, 1, 6)),
    )


def ops() -> st.SearchStrategy[Op]:
    return st.one_of(
        adds(),
        adds(),
        st.builds(Advance, st.integers(0, 2)),
        st.builds(Advance, st.integers(0, 2)),
        st.builds(Steps, st.integers(1, 6)),
        st.builds(Abort, st.integers(0, 7)),
        st.builds(
            NewVersion, st.none() | st.integers(0, 2), st.integers(0, 3).map(lambda n: n == 0)
        ),
        st.builds(Failure, st.booleans()),
    )


def prefixes() -> st.SearchStrategy[Prefixes]:
    return st.builds(
        Prefixes,
        lru=st.booleans(),
        reuse_across_versions=st.booleans(),
        max_age=st.none() | st.integers(0, 2),
    )


@st.composite
def sizes(draw: st.DrawFn, depths: st.SearchStrategy[int]) -> Sizes:
    num_blocks = draw(st.integers(3, 12))
    max_tokens = draw(st.integers(1, 16))
    drawn = Sizes(
        num_blocks=num_blocks,
        block_size=draw(st.integers(2, 4)),
        num_rows=min(draw(st.integers(1, 5)), max_tokens),
        max_tokens=max_tokens,
        max_paused_blocks=draw(st.just(0) | st.integers(1, num_blocks)),
        conservativeness=draw(st.sampled_from((0.0, 0.0, 0.5, 1.0))),
        chunked=draw(st.booleans()),
        depth=draw(depths),
        prefixes=draw(st.none() | prefixes()),
    )
    return replace(drawn, poison=frozenset({7}) if draw(st.integers(0, 4)) == 0 else frozenset())


def seeded_work(seed: int, *, depth: int, num_ops: int = 60) -> tuple[Sizes, list[Op]]:
    """Return the sizes of a crowded engine and `num_ops` operations on it."""
    rng = random.Random(seed)
    max_tokens = rng.randint(1, 16)
    num_blocks = rng.randint(3, 12)
    small = Sizes(
        num_blocks=num_blocks,
        block_size=rng.randint(2, 4),
        num_rows=rng.randint(1, min(5, max_tokens)),
        max_tokens=max_tokens,
        max_paused_blocks=rng.choice((0, rng.randint(1, num_blocks))),
        conservativeness=rng.choice((0.0, 0.0, 0.5, 1.0)),
        chunked=rng.random() < 0.5,
        depth=depth,
        poison=frozenset({7}) if rng.random() < 0.2 else frozenset(),
        prefixes=_random_prefixes(rng),
    )
    makers: list[Callable[[], Op]] = [
        lambda: _random_add(rng),
        lambda: Steps(rng.randint(1, 6)),
        lambda: Advance(rng.randrange(3)),
        lambda: Abort(rng.randrange(8)),
        lambda: NewVersion(rng.choice((None, 0, 1, 2)), rng.random() < 0.25),
        lambda: Failure(rng.random() < 0.5),
    ]
    return small, [make() for make in rng.choices(makers, (8, 8, 12, 2, 1, 1), k=num_ops)]


def _random_prefixes(rng: random.Random) -> Prefixes | None:
    if rng.random() < 0.4:
        return None
    return Prefixes(
        lru=rng.random() < 0.7,
        reuse_across_versions=rng.random() < 0.5,
        max_age=rng.choice((None, None, 0, 1, 2)),
    )


def _random_add(rng: random.Random) -> Add:
    shared = SHARED_TEXT[: rng.choice((0, rng.randint(1, len(SHARED_TEXT))))]
    return Add(
        shared + tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 8 if shared else 16))),
        tuple(
            Sample(
                num_new=rng.randint(1, 20),
                seed=rng.randrange(4),
                wants_scores=rng.random() < 0.15,
                end_ids=(3,) if rng.random() < 0.5 else (),
                stop_words=((5, 6), (9,)) if rng.random() < 0.3 else (),
            )
            for _ in range(rng.choice((1, 1, 2, 4)))
        ),
        rng.choice((0, 0, 0, 1, -1)),
        rng.choice((0, 0, 0, 0, 1, 6)),
    )
