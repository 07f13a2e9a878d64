"""CausalLM: the model that an engine runs, with its weights addressable by Hugging Face names.

`rollout.models.checkpoints.loading` builds and fills a CausalLM, `rollout.worker.loading` prepares
it, and `rollout.worker.model_runner` runs it. The modules of `rollout.weights` update its weights.
`rollout.serve.control.announcement` reads its weight table, and `rollout.engine.build` uses it to
build the engine. Shape letters: L logit rows, E hidden size, V vocabulary, P vocabulary ids of one
rank.
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
_DRAWN_AT_ONCE = 1 << 20  # random values; bounds the temporary memory


class CausalLM(nn.Module):
    """A decoder with its language-model head, for inference. No parameter requires a gradient. A
    new model has undefined weights. Fill them through `weight_slots`, call `prepare`, then run the
    model. Call `refresh` after an in-place change of weights."""

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
        """Return a model with the weights that `randomize` draws, equal on every device. If `dtype`
        is None, the spec's dtype is used."""
        model = cls(spec if dtype is None else replace(spec, dtype=dtype), device)
        model.randomize(seed)
        return model

    def randomize(self, seed: int) -> None:
        """Overwrite all weights with random values, drawn on the host in float32. Matrices have a
        standard deviation of 0.02. Norms multiply by 1. Biases, router corrections and attention
        sinks are 0."""
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
        """Bind the backend into every layer, and let the backend choose matrix products. Fill the
        weights before, because the backend can pack copies of them or repack them in place. Raises
        ModelError unless the backend has the rank and group size of the spec's `shard`."""
        shard, group = self.spec.shard, backend.collectives
        if (shard.rank, shard.size) != (group.rank, group.size):
            raise ModelError(
                f"the model was built for rank {shard.rank} of {shard.size}, but its backend is "
                f"rank {group.rank} of {group.size}; build it from "
                f"spec.local({group.rank}, {group.size})"
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
        """Make the rotary tables at least this long. Call this before a graph capture, during which
        `forward` cannot extend them."""
        for table in self.rotary:
            table.reserve(num_positions)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of `batch.logit_indices_L` after the final norm, [L, E]. Writes
        the KV cache. Raises ModelError before `prepare`."""
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
        """Return the float32 logits of all vocabulary ids, [L, V], on every rank. Raises ModelError
        before `prepare`."""
        self._require_prepared()
        spec = self.spec
        logits_LV: Tensor = self.lm_head.float32(hidden_LE)
        if spec.logit_multiplier != 1.0:
            logits_LV = logits_LV * spec.logit_multiplier
        if spec.logit_softcap is not None:
            logits_LV = (logits_LV / spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits_LV if spec.shard.size == 1 else self._gathered(logits_LV)

    def _gathered(self, logits_LP: Tensor) -> Tensor:
        """Return the logits of all ids, [L, V], gathered from all ranks. A collective."""
        size, vocab_size = self.spec.shard.size, self.spec.vocab_size
        widths = [Shard(rank, size).range_of(vocab_size).length for rank in range(size)]
        if vocab_size % size == 0:
            gathered_SLP = self.collectives.all_gather(logits_LP.contiguous())
            return gathered_SLP.transpose(0, 1).reshape(-1, vocab_size)  # no copy of a single row
        padded_LP = F.pad(logits_LP, (0, max(widths) - logits_LP.shape[1]))
        parts = self.collectives.all_gather(padded_LP).unbind()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def weight_slots(self) -> Mapping[str, WeightSlot]:
        """Return a slot to read and write each weight, by its name in saved directories.

        Persistent buffers are included. Tied weights appear under both names and have equal
        addresses. A rank of a group has slots of all weights, but keeps only a part of each
        weight's values, or none. Call `refresh` after writes.
        """
        return self.weight_table().slots

    def weight_table(self) -> WeightTable:
        """Return the weight slots with all their names. The result is the same object at every
        call."""
        if self._table is None:
            # Made once: slots look up their memory at each use.
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
        """Return the values of every weight by its Hugging Face name, as `WeightSlot.read` does.
        Raises ModelError on a rank of a group, which does not have all values."""
        if self.spec.shard.size > 1:
            raise ModelError(
                f"rank {self.spec.shard.rank} of {self.spec.shard.size} keeps only parts of the "
                "weights; read them from the model that was pushed or loaded"
            )
        return {name: slot.read() for name, slot in self.weight_slots().items()}

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that checkpoints hold, by their names in this module. Rotary tables
        are not included."""
        return {
            name: tensor
            for name, tensor in self.state_dict(keep_vars=True).items()
            if not isinstance(tensor, nn.Parameter)
        }

    @property
    def num_table_bytes(self) -> int:
        """Bytes of the model's buffers and rotary tables, which are not parameters."""
        modules = (self, *self.rotary)
        return sum(buffer.nbytes for module in modules for buffer in module.buffers())

    def refresh(self, staged: Sequence[Any] | None = None) -> None:
        """Bring packed copies of the weights up to date after an in-place change. `staged` has the
        result of `Linear.stage` for each of `linear_layers`, in order. If it is None or empty, the
        layers pack their present weights."""
        self._require_prepared()
        layers = self.linear_layers().values()
        for layer, prepared in zip(layers, staged or [None] * len(layers), strict=True):
            layer.refresh(prepared)

    def release_packed(self) -> None:
        """Drop packed copies of the weights, which `refresh` makes again. Weights that were
        repacked in place stay."""
        self._require_prepared()
        for layer in self.linear_layers().values():
            layer.release_packed()

    def linear_layers(self) -> dict[str, Linear]:
        """Return all linear layers by path, including the head, in the same order at every call."""
        if self._linear_layers is None:
            linear = {path: m for path, m in self.named_modules() if isinstance(m, Linear)}
            self._linear_layers = linear
        return self._linear_layers

    def linear_modules(self) -> set[str]:
        """Return the checkpoint's names of all linear layers, which LoRA can target. Each part of a
        fused layer has its own name, such as "q_proj". `kv_b_proj` of latent attention is
        included."""
        parts = {
            f"{path.rpartition('.')[0]}.{part}".removeprefix(".")
            for path, layer in self.linear_layers().items()
            for part in layer.parts
        }
        return parts | {p for p, m in self.named_modules() if isinstance(m, HeadProjections)}

    def cache_spec(self, block_size: int, dtype: torch.dtype | None = None) -> CacheSpec:
        """Return the sizes of this model's KV cache on this rank. If `dtype` is None, the model's
        dtype is used."""
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
