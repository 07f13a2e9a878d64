"""Forward passes of a trainer's model over single rows without padding, and copies of the model.

Used by the modules `diagnosis`, `reference`, `alignment_causes`, `sampling_causes` and
`weight_causes` of `trainer_hooks.doctor`. Weights are not changed. `head_in` and
`head_of_embeddings` replace the output of a model's head within a block.

Shape letters: T positions of a row, V vocabulary, C examined columns of a row, N tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer_hooks.doctor.tokens import ExaminedTokens


def evaluation_copy(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a copy of `model` in eval mode, with weights in `dtype`.

    Buffers, such as the frequencies of a rotary embedding, keep their dtype.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


@torch.no_grad()
def row_logits(
    model: nn.Module,
    tokens_T: Tensor,
    *,
    position_ids_T: Tensor | None = None,
    attention_mask_T: Tensor | None = None,
) -> Tensor:
    """Return the logits [T, V] of one row, from one pass without a cache, in the model's dtype."""
    given = {"position_ids": position_ids_T, "attention_mask": attention_mask_T}
    options = {name: _batched(model, value) for name, value in given.items() if value is not None}
    logits: Tensor = model(input_ids=_batched(model, tokens_T), use_cache=False, **options).logits[
        0
    ]
    return logits


@torch.no_grad()
def replayed_logits(
    models: Mapping[int, nn.Module], tokens_T: Tensor, kv_versions_T: Sequence[int]
) -> Tensor:
    """Return the logits [T, V] of a row whose KV was written by several versions of the weights.

    `models[kv_versions_T[t]]` computes position t over the KV of earlier positions, as an engine
    does that keeps its KV through weight updates.
    """
    from transformers import DynamicCache

    parts, cache, start = [], DynamicCache(), 0
    for end in range(1, len(tokens_T) + 1):
        if end == len(tokens_T) or kv_versions_T[end] != kv_versions_T[start]:
            model = models[kv_versions_T[start]]
            result = model(
                input_ids=_batched(model, tokens_T[start:end]),
                past_key_values=cache,
                use_cache=True,
            )
            parts.append(result.logits[0])
            start = end
    return torch.cat(parts)


@contextmanager
def head_in(model: nn.Module, dtype: torch.dtype, *, rounds_logits: bool) -> Iterator[None]:
    """Make the language-model head of `model` round its inputs and weights to `dtype` in the block.

    Products are summed in the model's own dtype.
    `rounds_logits`: True if the logits are rounded to `dtype`, too.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype).to(value.dtype)

    def run(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        logits = nn.functional.linear(rounded(inputs[0]), rounded(head.weight), head.bias)
        return rounded(logits) if rounds_logits else logits

    hook = head.register_forward_hook(run)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def head_of_embeddings(model: nn.Module) -> Iterator[None]:
    """Make the head of `model` use the input embeddings in the block, as if tied to them."""
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    hook = model.get_output_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda module, inputs, output: nn.functional.linear(inputs[0], weight)
    )
    try:
        yield
    finally:
        hook.remove()


def _batched(model: nn.Module, values_T: Tensor) -> Tensor:
    return values_T[None].to(next(model.parameters()).device)


def chosen_logprobs(logits_NV: Tensor, id_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log_softmax(logits / temperature) of each token as float64 [N]."""
    scaled_NV = logits_NV if temperature == 1.0 else logits_NV / temperature
    chosen_N = scaled_NV.gather(1, id_N[:, None]).squeeze(1)
    return (chosen_N - scaled_NV.logsumexp(dim=1)).double()


def model_logits(model: nn.Module, tokens: ExaminedTokens) -> Tensor:
    """Return the logits of `model` that predict each token, float32 [N, V]."""
    return tokens.pick(lambda row: row_logits(model, tokens.rows[row]))


def model_logprobs(model: nn.Module, tokens: ExaminedTokens, temperature: float) -> Tensor:
    """Return the model's log-probs of the tokens as float64 [N]. The pass has the model's dtype."""
    # Row by row: the logits of all tokens at once would take much memory.
    parts = []
    for row, tokens_T in enumerate(tokens.rows):
        is_own_N = tokens.row_N == row
        logits_CV = row_logits(model, tokens_T)[tokens.column_N[is_own_N] - 1].cpu()
        if logits_CV.dtype.itemsize < 4:
            logits_CV = logits_CV.float()
        parts.append(chosen_logprobs(logits_CV, tokens.id_N[is_own_N], temperature))
    return torch.cat(parts)
