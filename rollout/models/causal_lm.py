"""CausalLM: the model that an engine runs, with its weights addressable by Hugging Face names.

Used by ModelRunner for steps and by ServedWeights, which alone writes to its weights. Shape
letters: L logit rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout.backends.base import AttentionBackend, Backend, CacheSpec
from rollout.backends.forward_batch import ForwardBatch
from rollout.backends.fused_decoder import FusedDecoder
from rollout.errors import ModelError
from rollout.layers.base import BackendLayer
from rollout.layers.experts import MixtureOfExperts
from rollout.layers.latent_attention import HeadProjections
from rollout.layers.linear import Linear
from rollout.layers.rope import RotaryTable
from rollout.layers.shard import Shard
from rollout.layers.weight_slot import WeightSlot, write_rows
from rollout.models.decoder import Decoder
from rollout.models.families.registry import find_family
from rollout.models.spec import ModelSpec
from rollout.models.weight_names import table_of
from rollout.models.weights import WeightTable
from rollout.parallel.collectives import Collectives

INIT_STD = 0.02
_DRAWN_AT_ONCE = 1 << 20  # values of random weights, so that no second copy of a weight is made


class CausalLM(nn.Module):
    """A decoder with its language-model head, for inference: no parameter has a gradient.

    Life: build (weights undefined), fill through `weight_slots`, `prepare`, then run. After an
    in-place change of weights call `refresh`.
    """

    attention: AttentionBackend
    collectives: Collectives

    def __init__(self, spec: ModelSpec, device: torch.device | str = "cpu") -> None:
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.model = Decoder(spec, device)
        self.lm_head = Linear(
            spec.hidden_size,
            {"lm_head": spec.vocab_size},
            bias=False,
            dtype=spec.dtype,
            device=device,
            tied_weight=self.model.embed_tokens.weight if spec.tie_word_embeddings else None,
            rows={"lm_head": [spec.shard.range_of(spec.vocab_size)]},
        )
        self.rotary = [
            RotaryTable(rope, spec.head_dim, device=device) for rope in spec.distinct_ropes
        ]
        self.fused: FusedDecoder | None = None
        self.is_prepared = False
        self._table: WeightTable | None = None
        self._linear_layers: dict[str, Linear] | None = None

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> CausalLM:
        """Return a model whose weights `randomize` has drawn. They are the same on every device."""
        model = cls(spec if dtype is None else replace(spec, dtype=dtype), device)
        model.randomize(seed)
        return model

    def randomize(self, seed: int) -> None:
        """Draw all weights, on the host in float32: matrices of standard deviation 0.02, norms
        that multiply by 1, biases, corrections and sinks 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, slot in self.weight_slots().items():
            if len(slot.shape) == 1 or name.endswith("bias"):
                is_norm = name.endswith("norm.weight")
                value = 1.0 - self.spec.norm_offset if is_norm else 0.0
                write_rows(slot, torch.full(slot.shape, value), 0)
            elif not (name == "lm_head.weight" and self.spec.tie_word_embeddings):
                num_rows, *row_shape = slot.shape
                rows_at_once = max(1, _DRAWN_AT_ONCE // math.prod(row_shape))
                for row in range(0, num_rows, rows_at_once):
                    shape = min(rows_at_once, num_rows - row), *row_shape
                    drawn = torch.empty(shape, dtype=torch.float32)
                    write_rows(slot, drawn.normal_(std=INIT_STD, generator=generator), row)

    def prepare(self, backend: Backend) -> None:
        """Bind the backend into every layer. The weights must be there: products may pack them, and
        those that one packed product serves alone in their own memory. Raises ModelError where the
        backend's group is not the one that the spec was cut for.
        """
        shard, group = self.spec.shard, backend.collectives
        if (shard.rank, shard.size) != (group.rank, group.size):
            raise ModelError(
                f"the model has what rank {shard.rank} of {shard.size} keeps, but runs on rank "
                f"{group.rank} of {group.size}; build it from spec.local(rank, size)"
            )
        for module in self.modules():
            if isinstance(module, BackendLayer):
                module.bind(backend)
        mixtures = (m for m in self.modules() if isinstance(m, MixtureOfExperts))
        fuse = backend.fuse_decoder
        self.fused = None if fuse is None else fuse(self.model.parts())
        backend.ops.choose_products(
            (layer.handle for layer in self.linear_layers().values()),
            (mixture.weights for mixture in mixtures),
            self.fused,
        )
        if self.spec.tie_word_embeddings:
            self.model.embed_tokens.repacked = self.lm_head.repacked
        self.attention, self.collectives = backend.attention, group
        self.is_prepared = True

    def reserve_positions(self, num_positions: int) -> None:
        """Make the rotary tables this long now, as graph capture needs; they grow on demand."""
        for table in self.rotary:
            table.reserve(num_positions)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the final-normed hidden states of `batch.logit_indices_L`, [L, E]. Writes the KV
        cache."""
        self._require_prepared()
        num_positions = batch.block_tables_RM.shape[1] * batch.block_size
        if any(num_positions > table.num_positions for table in self.rotary):
            self.reserve_positions(num_positions)  # never where graphs are captured
        if self.fused is not None:
            tables = [(table.cos_PD, table.sin_PD) for table in self.rotary]
            fused_LE = self.fused.run(tables, batch)
            if fused_LE is not None:
                return fused_LE
        angles = [table(batch.positions_T) for table in self.rotary]
        hidden_LE: Tensor = self.model(angles, self.attention.begin(batch))
        return hidden_LE

    def compute_logits(self, hidden_LE: Tensor) -> Tensor:
        """Return the logits in float32, [L, V], on all ranks of a group."""
        self._require_prepared()
        spec = self.spec
        logits_LV: Tensor = self.lm_head.float32(hidden_LE)
        if spec.logit_multiplier != 1.0:
            logits_LV = logits_LV * spec.logit_multiplier
        if spec.logit_softcap is not None:
            logits_LV = (logits_LV / spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits_LV if spec.shard.size == 1 else self._gathered(logits_LV)

    def _gathered(self, logits_LP: Tensor) -> Tensor:
        """Gather the logits of all ids, [L, V], from the logits of P ids that each rank has."""
        size, vocab_size = self.spec.shard.size, self.spec.vocab_size
        widths = [Shard(rank, size).range_of(vocab_size).length for rank in range(size)]
        if vocab_size % size == 0:
            gathered_SLP = self.collectives.all_gather(logits_LP.contiguous())
            return gathered_SLP.transpose(0, 1).reshape(-1, vocab_size)  # no copy of a single row
        padded_LP = F.pad(logits_LP, (0, max(widths) - logits_LP.shape[1]))
        parts = self.collectives.all_gather(padded_LP).unbind()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def weight_slots(self) -> Mapping[str, WeightSlot]:
        """Return a slot for every weight, to read and write it, by its name in the family's saved
        directories.

        A rank of a group has slots of all weights, too. It keeps a part of the values, or none.
        Tied weights appear under both names and have equal addresses. Persistent buffers are
        weights, too. Call `refresh` after writes.
        """
        return self.weight_table().slots

    def weight_table(self) -> WeightTable:
        """Return the weight slots with the live module's names for them. Made once, because slots
        follow their memory."""
        if self._table is None:
            spec = self.spec
            mtp_layers = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
            self._table = table_of(
                self,
                self.persistent_buffers(),
                find_family(spec.family).saved_name,
                unserved=tuple(f"model.layers.{index}." for index in mtp_layers),
            )
        return self._table

    def read_weights(self) -> dict[str, Tensor]:
        """Return the values of every weight by its Hugging Face name, as `WeightSlot.read` returns
        them.

        Raises ModelError on a rank of a group, which does not have all values.
        """
        if self.spec.shard.size > 1:
            raise ModelError(
                f"rank {self.spec.shard.rank} of {self.spec.shard.size} keeps parts of the weights "
                "only; read them from the model that was pushed or loaded"
            )
        return {name: slot.read() for name, slot in self.weight_slots().items()}

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that checkpoints hold, by name. Tables that the model computes are
        left out."""
        return {
            name: tensor
            for name, tensor in self.state_dict(keep_vars=True).items()
            if not isinstance(tensor, nn.Parameter)
        }

    @property
    def num_table_bytes(self) -> int:
        """Bytes of all that the model keeps beside its parameters: rotary tables, buffers."""
        modules = (self, *self.rotary)
        return sum(buffer.nbytes for module in modules for buffer in module.buffers())

    def refresh(self, staged: Sequence[Any] | None = None) -> None:
        """Let packed copies of the weights follow an in-place change.

        `staged` holds what each of `linear_layers` had staged for it.
        """
        self._require_prepared()
        layers = self.linear_layers().values()
        for layer, prepared in zip(layers, staged or [None] * len(layers), strict=True):
            layer.refresh(prepared)

    def release_packed(self) -> None:
        """Drop packed copies of the weights, until `refresh`. Repacked weights are no copies."""
        self._require_prepared()
        for layer in self.linear_layers().values():
            layer.release_packed()

    def linear_layers(self) -> dict[str, Linear]:
        """Return all linear layers by path, the head included, in the same order at every call."""
        if self._linear_layers is None:
            linear = {path: m for path, m in self.named_modules() if isinstance(m, Linear)}
            self._linear_layers = linear
        return self._linear_layers

    def linear_modules(self) -> set[str]:
        """Return the names of the linear layers in checkpoints: each part of a fused layer, and the
        projections that latent attention takes apart."""
        parts = {
            f"{path.rpartition('.')[0]}.{part}".removeprefix(".")
            for path, layer in self.linear_layers().items()
            for part in layer.parts
        }
        return parts | {p for p, m in self.named_modules() if isinstance(m, HeadProjections)}

    def cache_spec(self, block_size: int, dtype: torch.dtype | None = None) -> CacheSpec:
        """Return the sizes that the KV cache of this model needs. `dtype` None means the model's
        own."""
        latent = self.spec.latent
        return CacheSpec(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kept_kv_heads if latent is None else 1,
            head_dim=self.spec.head_dim if latent is None else latent.cached_dim,
            value_dim=None if latent is None else latent.kv_lora_rank,
            dtype=self.spec.dtype if dtype is None else dtype,
            block_size=block_size,
        )

    def _require_prepared(self) -> None:
        if not self.is_prepared:
            raise ModelError("the model has no operations yet; call prepare(backend) first")
