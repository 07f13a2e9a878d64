"""GraphShape: what a captured step has room for; GraphShapes: all of them, and the best fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.backends.step_tensors import HostArray, StepInputs

# A mixed step with more than this is bound by arithmetic: launching its kernels one by one is
# hidden behind them.
PREFILL_TOKENS = (64, 128, 256, 512)
PREFILL_ROWS = 16
# Of the logits that a captured step makes: they stay reserved as long as graphs do.
MAX_LOGIT_BYTES = 1 << 30
_SAMPLES_PER_PREFILL_ROW = 8  # a prompt's forks are sampled with it


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """Rows that decode a token each, then rows that prefill some, whose tokens may be scored."""

    num_decode_rows: int
    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    scores_prompts: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_rows(self) -> int:
        """Also the logits that are drawn from: one of each row at most, though by several
        samples."""
        return self.num_decode_rows + self.num_prefill_rows

    @property
    def num_scores(self) -> int:
        return self.num_prefill_tokens if self.scores_prompts else 0

    @property
    def num_samples(self) -> int:
        return self.num_decode_rows + _SAMPLES_PER_PREFILL_ROW * self.num_prefill_rows

    def logit_bytes(self, vocab_size: int) -> int:
        """Bytes of a step's logits: products in 16 bits, float32, and a copy of those that several
        samples share."""
        num_copied = self.num_samples if self.num_prefill_rows else 0
        return vocab_size * (6 * self.num_rows + 4 * num_copied)

    def fits(self, inputs: StepInputs[HostArray]) -> bool:
        """Whether all of the step finds room."""
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
    """Shapes in the order of their sizes.

    A step that scores prompts keeps the hidden states of its tokens, which others do not compute to
    the end: it has shapes of its own, beside these.
    """

    decode: tuple[GraphShape, ...] = ()
    mixed: tuple[GraphShape, ...] = ()

    def smallest_for(self, inputs: StepInputs[HostArray]) -> GraphShape | None:
        """None for a step that no graph can run: it is too large, or draws nothing."""
        layout = inputs.layout
        if not len(layout.draws_S):
            return None
        shapes = self.decode if layout.only_decodes else self.mixed
        if len(layout.score_targets_P):
            shapes = self.scoring
        return next((shape for shape in shapes if shape.fits(inputs)), None)

    @property
    def scoring(self) -> tuple[GraphShape, ...]:
        """Those of steps that score prompts: one for each number of prompt tokens, with as many
        decode rows as there may be."""
        widest = {shape.num_prefill_tokens: shape for shape in self.mixed}
        return tuple(replace(shape, scores_prompts=True) for shape in widest.values())

    def within(self, max_logit_bytes: int, vocab_size: int) -> GraphShapes:
        """Those shapes whose logits take no more than that."""

        def kept(shapes: tuple[GraphShape, ...]) -> tuple[GraphShape, ...]:
            return tuple(s for s in shapes if s.logit_bytes(vocab_size) <= max_logit_bytes)

        return GraphShapes(decode=kept(self.decode), mixed=kept(self.mixed))


def make_graph_shapes(num_graphs: int | None, max_rows: int, max_mixed: int) -> GraphShapes:
    """At most `num_graphs` shapes, up to half of them, and up to `max_mixed`, for mixed steps.

    None: every size of decode steps, and `max_mixed` mixed shapes beside them.
    """
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
    """Rows of decode steps: a step computes at most 16 rows of padding, or as many as it has."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, largest, 16))
    return sorted({size for size in steps if size < largest} | {largest})


def _spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the sorted values, evenly: with the last, and of several the first."""
    if count <= 1:
        return [*values[-1:]] * count
    last = len(values) - 1
    return sorted({values[round(step * last / (count - 1))] for step in range(count)})
