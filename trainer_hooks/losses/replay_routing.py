"""Routing replay: a trainer's forward pass computes each token with the experts of the rollout.

Used by `trainer_hooks.update.micro_batches` and by users' training loops around a pass.
replay_routing replaces the `forward` of the model's routers within a block.

Source: R3 (Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and
inference routers"), arXiv 2510.11370.

Shape letters: B rows, T positions, N = B T tokens, L layers with experts, K experts of a token, E
all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rollout.errors import ConfigError

_TOP_K = (torch.topk, torch.Tensor.topk)


@contextmanager
def replay_routing(
    model: nn.Module, routing_BTLK: torch.Tensor, routers: Sequence[nn.Module] | None = None
) -> Iterator[None]:
    """Make the routers of `model` choose the recorded experts in the block.

    `routing_BTLK`: integers as in `RolloutBatch.routing_BTLK`. Row [b, t] is for token [b, t] of
    the forward pass. A packed batch is one row, [1, N, L, K]. Where all K ids of a layer are -1,
    its router chooses the experts itself. Expert weights, and so the gradient, come from the
    router's own scores at the recorded ids.
    `routers`: modules that choose experts, in the order of layers. None finds the routers of a
    transformers model. Each router must choose by one `torch.topk` of `top_k` among `num_experts`
    scores.
    With gradient checkpointing, run the backward pass inside the block too, because it repeats the
    layers. Outside the block torch raises CheckpointError unless use_reentrant is True.
    Raises ConfigError for routing of another shape, an id that no expert has or that a row has
    twice, a model whose routers are not recognised, and a forward pass that did not call all
    routers.
    """
    found = find_routers(model) if routers is None else list(routers)
    replayed = _replays(found, routing_BTLK)
    for replay in replayed:
        replay.install()
    try:
        yield
    finally:
        for replay in replayed:
            replay.remove()
    idle = [type(replay.router).__name__ for replay in replayed if not replay.num_calls]
    if idle:
        raise ConfigError(
            f"{len(idle)} of {len(replayed)} routers ({idle[0]}) were not called within "
            "replay_routing: the forward pass was outside, or a fused kernel has its own router; "
            "run the pass inside the block, with the model's eager experts"
        )


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a transformers model, in the order of its layers.

    Raises ConfigError, naming the class, for a layer with experts whose router is not recognised.
    """
    routers = [m for m in model.modules() if _is_router(m)]
    for block in model.modules():
        children = list(block.children())
        experts = [m for m in children if type(m).__name__.endswith("Experts")]
        if experts and not any(_is_router(module) for module in children):
            names = ", ".join(sorted(type(m).__name__ for m in children if m not in experts))
            raise ConfigError(
                f"{type(block).__name__} has no router that replay_routing knows, a ...TopKRouter "
                f"with top_k and num_experts (it has: {names or 'nothing else'}); pass its routers "
                "as routers=[...]"
            )
    if not routers:
        raise ConfigError(
            f"{type(model).__name__} has no ...TopKRouter, so there is no routing to replay; leave "
            "replay_routing out for a dense model, or pass its routers as routers=[...]"
        )
    return routers


def _is_router(module: nn.Module) -> bool:
    is_named_so = type(module).__name__.lower().endswith("topkrouter")
    return is_named_so and hasattr(module, "top_k") and hasattr(module, "num_experts")


class _Replay:
    def __init__(self, router: nn.Module, ids_NK: torch.Tensor, shape: str) -> None:
        self.router, self.num_calls = router, 0
        self._ids_NK, self._shape = ids_NK, shape
        self._forward: Callable[..., Any] = router.forward
        self._was_replaced = "forward" in vars(router)  # by other code, before this replay

    def install(self) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            with _Choice(self.router, self._ids_NK, self._shape) as choice:
                result = self._forward(*args, **kwargs)
            choice.check()
            return result

        self.router.forward = forward

    def remove(self) -> None:
        if self._was_replaced:
            self.router.forward = self._forward
        else:
            del self.router.forward


class _Choice(TorchFunctionMode):
    """A torch function mode in which the top k of the experts' scores are the recorded ids."""

    def __init__(self, router: nn.Module, ids_NK: torch.Tensor, shape: str) -> None:
        super().__init__()
        self._router, self._ids_NK, self._shape = router, ids_NK, shape
        self._num_choices = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        scores_NE: torch.Tensor = args[0] if args else kwargs["input"]
        num_tokens, top_k = self._ids_NK.shape
        # A topk over groups of experts has other sizes, and is not replayed.
        if scores_NE.shape[-1] != self._router.num_experts or result.indices.shape[-1] != top_k:
            return result
        self._num_choices += 1
        if scores_NE.dim() != 2 or len(scores_NE) != num_tokens:
            raise ConfigError(
                f"routing of shape {self._shape} has {num_tokens} tokens, and the forward pass of "
                f"{type(self._router).__name__} {scores_NE.shape[:-1].numel()}; replay the "
                "routing of the batch that is computed, padded or packed like its tokens"
            )
        ids_NK = self._ids_NK.to(scores_NE.device).long()  # copied as int16: a quarter of the bytes
        is_known_N1 = (ids_NK >= 0).all(dim=-1, keepdim=True)
        ids_NK = torch.where(is_known_N1, ids_NK, result.indices)
        return torch.return_types.topk((scores_NE.gather(-1, ids_NK), ids_NK))

    def check(self) -> None:
        """Raise ConfigError unless the router chose its experts by exactly one `torch.topk`."""
        if self._num_choices != 1:
            raise ConfigError(
                f"{type(self._router).__name__} called torch.topk {self._num_choices} times for "
                f"{self._ids_NK.shape[1]} of {self._router.num_experts} experts, and "
                "replay_routing knows routers that do so once; train without replay"
            )


def _replays(routers: Sequence[nn.Module], routing_BTLK: torch.Tensor) -> list[_Replay]:
    shape = f"{list(routing_BTLK.shape)}"
    for router in routers:
        wanted: tuple[Any, Any] = len(routers), router.top_k
        if routing_BTLK.dim() != 4 or tuple(routing_BTLK.shape[2:]) != wanted:
            raise ConfigError(
                f"routing of shape {shape} must be [rows, positions, {wanted[0]}, {wanted[1]}]: "
                f"{wanted[0]} layers with experts, whose {type(router).__name__} chooses "
                f"{wanted[1]}; leave out rows of dense layers (trainer_hooks.losses.routing_forms)"
            )
    ids_LNK = routing_BTLK.flatten(0, 1).transpose(0, 1).contiguous()
    for layer, (router, ids_NK) in enumerate(zip(routers, ids_LNK, strict=True)):
        _check_ids(ids_NK, int(router.num_experts), layer)  # type: ignore[arg-type]
    return [_Replay(router, ids_NK, shape) for router, ids_NK in zip(routers, ids_LNK, strict=True)]


def _check_ids(ids_NK: torch.Tensor, num_experts: int, layer: int) -> None:
    known_NK = ids_NK[(ids_NK >= 0).all(dim=-1)]
    if known_NK.numel() and int(known_NK.max()) >= num_experts:
        raise ConfigError(
            f"routing names expert {int(known_NK.max())} in layer {layer} of those with experts, "
            f"which has {num_experts}; was it recorded with another model?"
        )
    ordered_NK = known_NK.sort(dim=-1).values
    if bool((ordered_NK[:, 1:] == ordered_NK[:, :-1]).any()):
        raise ConfigError(
            f"routing names an expert twice for one token in layer {layer} of those with experts; "
            "unknown rows must be -1, not zeros "
            "(trainer_hooks.losses.routing_forms reads other forms)"
        )
