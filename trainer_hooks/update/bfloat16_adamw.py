"""BFloat16AdamW: AdamW with its two moments in bfloat16, which halves the memory of its state.

Used by `trainer_hooks.train.learner` for `trainer.optimizer_state_dtype=bfloat16`, and by users'
training loops. The optimizer writes the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rollout.errors import ConfigError
from rollout.models.plain_tensors import is_sharded

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Numbers of a parameter that are updated at once: on a CPU their float32 moments stay in its cache.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 24


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW without weight decay on float32 parameters, with moments in bfloat16.

    A step computes in float32 by torch's fused AdamW and then rounds the moments stochastically, so
    they have no bias and errors of a few percent. Rounding to nearest is unsound. With beta2=0.999
    a step changes the second moment by less than half of bfloat16's last bit, so the moment never
    moves.
    The random bits depend only on the step's number, so a resumed run repeats the same steps.
    Source of the rounding: Gupta et al. 2015, arXiv 1502.02551, section 3.
    Raises ConfigError if a parameter is not float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.float32:
                    raise ConfigError(
                        f"moments in bfloat16 need parameters in float32, and one is in "
                        f"{parameter.dtype}; load the model with dtype=torch.float32"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bits: dict[tuple[int, torch.device], Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._state_of(parameter)
                    key = int(state["step"]), parameter.device
                    if key not in bits:
                        bits[key] = _random_bits(*key)
                    _update(parameter, state, group, bits[key])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, with the moments in bfloat16."""
        super().load_state_dict(state_dict)  # casts the moments to float32, which is exact
        for state in self.state.values():
            for name in _MOMENTS:
                state[name] = state[name].to(torch.bfloat16)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = torch.zeros_like(
                    parameter, dtype=torch.bfloat16, memory_format=torch.contiguous_format
                )
        return state


def _update(
    parameter: Tensor, state: dict[str, Any], group: dict[str, Any], bits_2C: Tensor
) -> None:
    # A chunk at a time, and for a sharded parameter only this rank's part.
    assert parameter.grad is not None, "the caller checks it"
    own = _local(parameter.detach())
    whole = own.contiguous()  # itself, unless its strides are unusual
    size = bits_2C.shape[1]
    # The fused kernel needs contiguous numbers, also of an expanded gradient.
    gradient = _local(parameter.grad).contiguous()
    parts = (whole, gradient, *(_local(state[name]) for name in _MOMENTS))
    beta1, beta2 = group["betas"]
    for values, slopes, mean, square in zip(
        *(part.reshape(-1).split(size) for part in parts), strict=True
    ):
        exact_mean, exact_square = mean.float(), square.float()
        step = state["step"].to(values.device, copy=True)  # fused kernels read it there, and add 1
        adamw(
            [values], [slopes], [exact_mean], [exact_square], [], [step],
            fused=True, amsgrad=False, maximize=False, weight_decay=0.0, lr=group["lr"],
            beta1=beta1, beta2=beta2, eps=group["eps"],
        )  # fmt: skip
        _round(exact_mean, bits_2C[0, : len(values)], mean)
        _round(exact_square, bits_2C[1, : len(values)], square)
    if whole is not own:
        own.copy_(whole)
    state["step"] += 1


def _random_bits(step: int, device: torch.device) -> Tensor:
    shape = 2, _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    generator = torch.Generator(device).manual_seed(step)
    return torch.randint(1 << 16, shape, generator=generator, device=device, dtype=torch.int32)


def _round(exact: Tensor, bits: Tensor, to: Tensor) -> None:
    """Round float32 numbers stochastically to bfloat16. Changes `exact`."""
    # A bfloat16 is the upper 16 bits of a float32.
    upper = exact.view(torch.int32).add_(bits).bitwise_right_shift_(16)
    to.view(torch.int16).copy_(upper)


def _local(tensor: Tensor) -> Tensor:
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return own
