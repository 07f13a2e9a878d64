"""GraphShape: what a captured step has room for; Ladder: the shapes there are, and the best fit."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.backends.step_tensors import HostArray, StepInputs

# A mixed step with more than this is bound by arithmetic: launching its kernels one by one is
# hidden behind them.
PREFILL_TOKENS = 512
PREFILL_ROWS = 16
_SAMPLES_PER_PREFILL_ROW = 8  # a prompt's forks are sampled with it


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """Rows that decode a token each, then rows that prefill some."""

    num_decode_rows: int
    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_rows(self) -> int:
        """Also the logit rows: each row is drawn from once at most, though by several samples."""
        return self.num_decode_rows + self.num_prefill_rows

    @property
    def num_samples(self) -> int:
        return self.num_decode_rows + _SAMPLES_PER_PREFILL_ROW * self.num_prefill_rows

    def fits(self, inputs: StepInputs[HostArray]) -> bool:
        """Whether all of the step finds room."""
        layout = inputs.layout
        num_decode_rows = layout.num_decode_rows
        return (
            num_decode_rows <= self.num_decode_rows
            and len(layout.token_ids_T) - num_decode_rows <= self.num_prefill_tokens
            and len(inputs.context_lens_R) - num_decode_rows <= self.num_prefill_rows
            and len(layout.draws_S) <= self.num_samples
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Shapes in the order of their sizes."""

    decode: tuple[GraphShape, ...] = ()
    mixed: tuple[GraphShape, ...] = ()

    def smallest_for(self, inputs: StepInputs[HostArray]) -> GraphShape | None:
        """None for a step that no graph can run: it is too large, scores, wants top-n or ranks, or
        processes logits."""
        layout, flags = inputs.layout, inputs.layout.flags
        if len(layout.score_targets_P) or not len(layout.draws_S):
            return None
        if flags.top_n or flags.any_ranks or inputs.processing is not None:
            return None
        shapes = self.decode if layout.only_decodes else self.mixed
        return next((shape for shape in shapes if shape.fits(inputs)), None)


def make_ladder(num_graphs: int, max_rows: int, max_mixed: int) -> Ladder:
    """At most `num_graphs` shapes, up to half of them, and up to `max_mixed`, for mixed steps."""
    num_mixed = min(max_mixed, num_graphs // 2)
    mixed = (
        GraphShape(
            num_decode_rows=size, num_prefill_rows=PREFILL_ROWS, num_prefill_tokens=PREFILL_TOKENS
        )
        for size in _sizes(num_mixed, max_rows)
    )
    decode = (GraphShape(num_decode_rows=n) for n in _sizes(num_graphs - num_mixed, max_rows))
    return Ladder(decode=tuple(decode), mixed=tuple(mixed))


def _sizes(count: int, largest: int) -> list[int]:
    """At most `count` sizes up to `largest`, in equal ratios; those above 8 are multiples of 8."""
    if count <= 1:
        return [largest] * count
    ratios = (largest ** (step / (count - 1)) for step in range(count))
    rounded = (round(size) if size <= 8 else -(-round(size) // 8) * 8 for size in ratios)
    return sorted({min(size, largest) for size in rounded})
