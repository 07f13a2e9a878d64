"""Random adapters of a model's linear layers, and what merging one into plain weights gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rollout import LoraAdapter

Weights = dict[str, Tensor]
PEFT_NAME = "base_model.model.{module}.lora_{half}.{adapter}.weight"  # of a live model
SAVED_NAME = "base_model.model.{module}.lora_{half}.weight"
PEFT_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 8,
    "bias": "none",
    "init_lora_weights": True,
    "target_modules": ["q_proj", "up_proj"],
}


def linear_modules(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of the linear layers, the head included."""
    ends = ("proj.weight", "lm_head.weight")
    return sorted(name.removesuffix(".weight") for name in weights if name.endswith(ends))


def random_adapter(
    weights: Mapping[str, Tensor],
    modules: Iterable[str] | None = None,
    *,
    seed: int = 0,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
    name: str = PEFT_NAME,
    **fields: Any,
) -> LoraAdapter:
    """An adapter of these modules of a model, or of all linear layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Weights = {}
    for module in linear_modules(weights) if modules is None else modules:
        num_outputs, num_inputs = weights[f"{module}.weight"].shape
        for half, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            drawn = torch.randn(shape, generator=generator).mul(0.1).to(dtype)
            tensors[name.format(module=module, half=half, adapter="default")] = drawn
    return LoraAdapter(tensors=tensors, rank=rank, **{"alpha": 7.0} | fields)


def merged(weights: Mapping[str, Tensor], adapter: LoraAdapter) -> Weights:
    """Base + (B @ A) * scaling in float32, cast to the dtype of the base."""
    found = dict(weights)
    for module, pair in adapter.pairs().items():
        base = weights[f"{module}.weight"]
        change = (pair.b_NR.float() @ pair.a_RK.float()) * pair.scale
        found[f"{module}.weight"] = (base.float() + change).to(base.dtype)
    return found


# ---- a live model, as PEFT makes it


class LoraLinear(nn.Module):
    """Stand-in for the layer with which PEFT replaces a linear layer."""

    def __init__(self, adapters: dict[str, float]) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 4, bias=False)
        self.lora_A = nn.ModuleDict({name: nn.Linear(6, 2, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 4, bias=False) for name in adapters})
        self.scaling = dict(adapters)


class PeftLike(nn.Module):
    """`base_model.model.q_proj`, with one or several adapters."""

    def __init__(self, *adapters: str, **changes: Any) -> None:
        super().__init__()
        config = PEFT_CONFIG | changes
        inner = nn.Module()
        inner.q_proj = LoraLinear(dict.fromkeys(adapters, config["lora_alpha"] / config["r"]))
        self.base_model = nn.Module()
        self.base_model.model = inner
        self.peft_config = {name: SimpleNamespace(to_dict=lambda: config) for name in adapters}
        self.active_adapters = list(adapters[:1])
