"""Forward passes whose backward passes need less memory: checkpointed layers, in-place embeddings.

Used by `trainer_hooks.update.micro_batches` and `trainer_hooks.update.tree_pass`. Both contexts
replace the `forward` of modules of transformers within the block.

Shape letters: V vocabulary, E hidden size, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollout.errors import ConfigError
from trainer_hooks.losses.head_logprobs import gradient_in_place


@contextmanager
def checkpointed_layers(policy: Any) -> Iterator[None]:
    """Let forward passes in the block keep only the inputs of each layer for the backward pass.

    The backward pass computes each layer again, also after the block. Log-probs and gradients do
    not change. Passes without a gradient are not affected. Unlike transformers' own checkpointing,
    this works in eval mode, too.
    Raises ConfigError for a policy without layers that transformers can checkpoint.
    """
    layers = _layers(policy)
    if not torch.is_grad_enabled():
        layers = []
    # The forward alone: the layer's hooks, such as those of FSDP2, do not run twice.
    with _replaced(
        {each: partial(checkpoint, each.forward, use_reentrant=False) for each in layers}
    ):
        yield


@contextmanager
def embeddings_in_place(embedding: Any) -> Iterator[None]:
    """Let backward passes add the gradient of `embedding` to its weight's `grad` in place.

    Torch's own backward pass makes a gradient of the whole table, which is almost all zeros. Has no
    effect on modules other than a plain nn.Embedding.
    """
    is_plain = type(embedding) is nn.Embedding and not (
        embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse
    )
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    if is_plain and embedding.weight.requires_grad:
        forwards[embedding] = partial(_looked_up, embedding)
    with _replaced(forwards):
        yield


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            del module.forward
            if own is not None:  # it had been replaced before
                module.forward = own


def _layers(policy: Any) -> list[nn.Module]:
    found: list[nn.Module] = []
    if isinstance(policy, nn.Module):
        from transformers.modeling_layers import GradientCheckpointingLayer

        found = [part for part in policy.modules() if isinstance(part, GradientCheckpointingLayer)]
    # A layer within another is left out: the outer layer computes it again.
    inner = {part for layer in found for part in layer.modules() if part is not layer}
    found = [layer for layer in found if layer not in inner]
    if not found:
        raise ConfigError(
            f"gradient_checkpointing=True with {type(policy).__name__}, which has no layers that "
            "transformers can checkpoint; set gradient_checkpointing=False"
        )
    return found


def _looked_up(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    rows: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        embedding.weight, embedding.padding_idx, tokens
    )
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VE: Tensor, padding_id: int | None, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VE, tokens)
        ctx.padding_id = padding_id
        return nn.functional.embedding(tokens, weight_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        weight_VE, tokens = ctx.saved_tensors
        tokens_N, grad_NE = tokens.flatten(), grads[0].reshape(-1, weight_VE.shape[1])
        if ctx.padding_id is not None:
            grad_NE = grad_NE.masked_fill((tokens_N == ctx.padding_id)[:, None], 0.0)
        total_VE, returned_VE = gradient_in_place(weight_VE)
        total_VE.index_add_(0, tokens_N, grad_NE.to(total_VE.dtype))
        return returned_VE, None, None
