"""GraphShape: the sizes of one captured step. GraphShapes: all shapes of an engine.

`rollout.backends.cuda.backend` creates them from the config. `rollout.backends.cuda.graph` chooses
a step's shape, and `rollout.backends.cuda.static_inputs` lays out inputs by it. Immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.backends.step_tensors import HostArray, StepInputs

# A mixed step with more prefill tokens is bound by arithmetic, so a graph would not speed it up.
PREFILL_TOKENS = (64, 128, 256, 512)
PREFILL_ROWS = 16
# Largest memory for the logits of a captured step. It stays reserved as long as the graph exists.
MAX_LOGIT_BYTES = 1 << 30
_SAMPLES_PER_PREFILL_ROW = 8  # a prompt's prefill also draws the first token of all its samples


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """The largest step that a graph can run: rows that decode one token each, then rows that
    prefill. `scores_prompts` says whether the graph can score prompt tokens."""

    num_decode_rows: int
    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    scores_prompts: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_rows(self) -> int:
        """Number of rows, and of logit rows to draw from. Several samples can draw from one row."""
        return self.num_decode_rows + self.num_prefill_rows

    @property
    def num_scores(self) -> int:
        return self.num_prefill_tokens if self.scores_prompts else 0

    @property
    def num_samples(self) -> int:
        return self.num_decode_rows + _SAMPLES_PER_PREFILL_ROW * self.num_prefill_rows

    def logit_bytes(self, vocab_size: int) -> int:
        """Return the bytes of a step's logits: 16-bit products, their float32 form, and copies for
        samples that share a row."""
        num_copied = self.num_samples if self.num_prefill_rows else 0
        return vocab_size * (6 * self.num_rows + 4 * num_copied)

    def fits(self, inputs: StepInputs[HostArray]) -> bool:
        layout = inputs.layout
        num_decode_rows = layout.num_decode_rows
        return (
            num_decode_rows <= self.num_decode_rows
            and len(layout.token_ids_T) - num_decode_rows <= self.num_prefill_tokens
            and len(inputs.context_lens_R) - num_decode_rows <= self.num_prefill_rows
            and len(layout.draws_S) <= self.num_samples
            and len(layout.score_targets_P) <= self.num_scores
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShapes:
    """All shapes of an engine, by kind of step, each in ascending order of size. `decode` has
    shapes of steps without prefill. `mixed` has shapes of steps with decode and prefill."""

    decode: tuple[GraphShape, ...] = ()
    mixed: tuple[GraphShape, ...] = ()

    def smallest_for(self, inputs: StepInputs[HostArray]) -> GraphShape | None:
        """Return the smallest shape that the step fits; None if it fits no shape or draws no
        token."""
        layout = inputs.layout
        if not len(layout.draws_S):
            return None
        shapes = self.decode if layout.only_decodes else self.mixed
        if len(layout.score_targets_P):
            shapes = self.scoring
        return next((shape for shape in shapes if shape.fits(inputs)), None)

    @property
    def scoring(self) -> tuple[GraphShape, ...]:
        """Shapes of steps that score prompts: one for each number of prefill tokens. Each has the
        most decode rows of all mixed shapes with that number of prefill tokens."""
        widest = {shape.num_prefill_tokens: shape for shape in self.mixed}
        return tuple(replace(shape, scores_prompts=True) for shape in widest.values())

    def within(self, max_logit_bytes: int, vocab_size: int) -> GraphShapes:
        """Return the shapes whose logits take at most `max_logit_bytes`."""

        def kept(shapes: tuple[GraphShape, ...]) -> tuple[GraphShape, ...]:
            return tuple(s for s in shapes if s.logit_bytes(vocab_size) <= max_logit_bytes)

        return GraphShapes(decode=kept(self.decode), mixed=kept(self.mixed))


def make_graph_shapes(num_graphs: int | None, max_rows: int, max_mixed: int) -> GraphShapes:
    """Return at most `num_graphs` shapes. At most half of them, and at most `max_mixed`, are mixed
    shapes. If `num_graphs` is None, return shapes of all decode sizes up to `max_rows` rows, and at
    most `max_mixed` mixed shapes."""
    sizes = _sizes(max_rows)
    num_mixed = max_mixed if num_graphs is None else min(max_mixed, num_graphs // 2)
    num_decode = len(sizes) if num_graphs is None else num_graphs - num_mixed
    mixed = (
        GraphShape(
            num_decode_rows=rows, num_prefill_rows=PREFILL_ROWS, num_prefill_tokens=num_tokens
        )
        for num_tokens in _spread(PREFILL_TOKENS, num_mixed)
        for rows in _spread(sizes, max(1, num_mixed // len(PREFILL_TOKENS)))
    )
    return GraphShapes(
        decode=tuple(GraphShape(num_decode_rows=rows) for rows in _spread(sizes, num_decode)),
        mixed=tuple(sorted(mixed, key=lambda shape: (shape.num_tokens, shape.num_rows))),
    )


def _sizes(largest: int) -> list[int]:
    """Return the row counts of decode shapes. A step is padded by fewer than 16 rows, and by fewer
    rows than it has."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, largest, 16))
    return sorted({size for size in steps if size < largest} | {largest})


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the sorted values, evenly spread. The last is always included, and
    the first if `count` is 2 or more."""
    if count <= 1:
        return [*values[-1:]] * count
    last = len(values) - 1
    return sorted({values[round(step * last / (count - 1))] for step in range(count)})
