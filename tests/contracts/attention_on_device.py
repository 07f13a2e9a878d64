"""TritonPagedAttention for the contract suites, whose tensors are on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rollout.backends.cuda.attention import TritonPagedAttention
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation

DEVICE = torch.device("cuda")


class DeviceAttention(TritonPagedAttention):
    """Runs on a GPU over copies, and copies the result and the written cache back."""

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        traits: AttentionTraits = PLAIN,
    ) -> Tensor:
        fields = {f.name: moved(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        fields["kv"] = {layer: moved(batch.kv[layer])}
        if rotation is not None:
            turn = (getattr(rotation, f.name) for f in dataclasses.fields(rotation))
            rotation = Rotation(*map(moved, turn))
        q_THD, k_TGD, v_TGD = moved(q_THD), moved(k_TGD), moved(v_TGD)
        traits = dataclasses.replace(traits, sinks_H=moved(traits.sinks_H))
        on_device = self.begin(ForwardBatch(**fields))
        out = super().attend(q_THD, k_TGD, v_TGD, layer, on_device, rotation, traits)
        batch.kv[layer].copy_(fields["kv"][layer])
        return out.cpu()


def moved(value: Any) -> Any:
    """Return a tensor's copy on the device with the same strides; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    storage = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    return storage.to(DEVICE).as_strided(value.shape, value.stride(), value.storage_offset())


def device_attention(num_programs: int | None = None) -> TritonPagedAttention:
    """Return Triton's attention on a GPU if there is one, else interpreted on CPU tensors."""
    kind = DeviceAttention if torch.cuda.is_available() else TritonPagedAttention
    return kind(num_programs=num_programs)
