"""Forward passes of a trainer's model over single rows, as plain as they can be: no cache, no
padding, float32. Shape letters: T positions of a row, V vocabulary, C columns that are wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def evaluation_copy(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of `model` with weights in `dtype`, without dropout; `model` stays as it is.

    Buffers, such as the frequencies of a rotary embedding, keep their precision.
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
    """The logits of one row in one pass, [T, V], in the model's dtype."""
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
    """The logits of a row whose KV was written by several versions of the weights, [T, V].

    Position t is computed by `models[kv_versions_T[t]]` over the KV of the positions before it, as
    an engine does that keeps its KV through updates.
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
    """Meanwhile the language-model head of `model` takes its inputs and weights in `dtype`.

    `rounds_logits`: the logits are in `dtype` as well; otherwise products are summed in float32.
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
    """Meanwhile the head of `model` uses the matrix of the input embeddings, as tied ones do."""
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
