"""NativeDecoder: a decoder's forward pass as one call of the compiled kernels (native/decoder.c).

`rollout.backends.cpu.backend` sets `native_decoder` as `Backend.fuse_decoder`, and
`rollout.models.causal_lm` runs the NativeDecoder. A pass writes only the KV cache. Weights and KV
are float32 or bfloat16. Activations are float32.

Shape letters: T tokens, L kept tokens, E hidden size, P positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, Array, addressof, c_int64, c_void_p, cast
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from rollout.backends.cpu.attention import MAX_GROUP, MAX_HEAD_DIM, prefill_units
from rollout.backends.cpu.kernels import (
    TYPES,
    AttentionArgs,
    DecoderArgs,
    Kernels,
    LayerArgs,
    PassArgs,
    WeightArgs,
)
from rollout.backends.cpu.products import (
    BUCKETS,
    LinearHandle,
    NativeProduct,
    bucket_of,
)
from rollout.backends.forward_batch import ForwardBatch
from rollout.backends.fused_decoder import DecoderLayerParts, DecoderParts
from rollout.errors import ConfigError
from rollout.parallel.collectives import Collectives

_LANES = 8
_MAX_IDS = 2**63 - 1
_ADD_UP = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


class GroupSums:
    """A function that the compiled decoder calls to sum over the ranks, between its phases."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._room: Tensor | None = None
        self._failure: BaseException | None = None
        self._function = _ADD_UP(self._add_up)  # kept alive here: C has only its address

    @property
    def address(self) -> int:
        """Address of the function that C calls to sum."""
        return cast(self._function, c_void_p).value or 0

    @contextmanager
    def within(self, room: Tensor) -> Iterator[None]:
        """Return a context in which C can sum floats of the buffer `room`. If a sum failed, the end
        of the context raises the error."""
        self._room, self._failure = room, None
        yield
        self._room = None
        if self._failure is not None:
            raise self._failure

    def _add_up(self, _context: int | None, address: int, count: int) -> None:
        """Sum `count` floats at `address` over the ranks, in place. Called by C."""
        assert self._room is not None
        try:
            if self._failure is None:
                start = (address - self._room.data_ptr()) // self._room.itemsize
                self._collectives.all_reduce_(self._room[start : start + count])
        except BaseException as error:
            self._failure = error  # raised by `within`: C cannot propagate it


class NativeDecoder:
    """`FusedDecoder` for passes in which all weights use one compiled product. Keeps the addresses
    of weights and caches, and collects them again when they change."""

    def __init__(
        self, kernels: Kernels, parts: DecoderParts, *, deterministic: bool = False
    ) -> None:
        """If `deterministic`, every pass must run here. Raises ConfigError if `deterministic` is
        True and the kernels do not support the decoder."""
        self._kernels, self._parts, self._deterministic = kernels, parts, deterministic
        self._prefill_units = prefill_units(kernels, deterministic=deterministic)
        is_supported = _is_supported(parts)
        if deterministic and not is_supported:
            raise ConfigError(
                f"deterministic=True needs {_what_is_supported(parts)}; leave deterministic False"
            )
        self._has_indirect_branches = _has_indirect_branches(parts)
        self._sums = None if parts.share is None else GroupSums(parts.share.collectives)
        layers = parts.layers if is_supported else []
        self.handles: Sequence[LinearHandle] = [
            handle for layer in layers for handle in _handles(layer)
        ]
        self._layers: Array[LayerArgs] = (LayerArgs * len(parts.layers))()
        self._decoder = DecoderArgs()
        self._floats: list[Tensor] = []  # float32 copies of norms and biases
        self._seen: Any = None
        self._products: Mapping[int, NativeProduct] = {}  # by bucket; only buckets that run here

    def run(self, tables: Sequence[tuple[Tensor, Tensor]], batch: ForwardBatch) -> Tensor | None:
        """Return the hidden states of the kept tokens after the final norm, [L, E], in the model's
        dtype.

        Returns None, and does nothing, if the kernels do not support the dtype or the sizes, or if
        another product was chosen for this number of rows. A deterministic decoder never returns
        None.
        """
        generation = sum([handle.generation for handle in self.handles])
        addresses = [cos_PD.data_ptr() for cos_PD, _ in tables]
        addresses += [self._parts.embedding.data_ptr(), batch.kv[0].data_ptr()]
        if self._seen != (generation, addresses):
            self._collect(tables, batch.kv)
            self._seen = generation, addresses
        num_kept = batch.logit_indices_L.shape[0]
        bucket = bucket_of(batch.token_ids_T.shape[0])
        if not {bucket, bucket_of(num_kept)} <= self._products.keys():
            assert not self._deterministic, "the layers one by one would give other bits"
            return None
        out_LE = torch.empty(num_kept, _hidden_size(self._parts), dtype=torch.float32)
        # The product chosen for all tokens also serves the kept tokens.
        self._forward(out_LE, batch, unit=self._products[bucket].unit)
        dtype = self._parts.embedding.dtype
        return out_LE if dtype == torch.float32 else out_LE.to(dtype)

    def explain(self) -> str:
        """Return which numbers of rows run here, such as "for 1 to 64 rows; for others the layers
        run one by one, ..."."""
        if not self.handles:
            return f"never: the compiled kernels need {_what_is_supported(self._parts)}"
        buckets = self._find_products().keys()
        if len(buckets) == len(BUCKETS):
            return "for any number of rows"
        others = "the layers run one by one, as other products were chosen for their weights"
        if not buckets:
            return f"never: {others}"
        return f"for {_rows_of(buckets)} rows; for others {others}"

    def _find_products(self) -> dict[int, NativeProduct]:
        """Return, by bucket, the compiled product that all weights use. Buckets without such a
        product are missing."""
        products = {}
        for bucket in range(len(BUCKETS)):
            serving = {handle.products[bucket] for handle in self.handles}
            product = serving.pop() if len(serving) == 1 else None
            if isinstance(product, NativeProduct):
                products[bucket] = product
        return products

    def _collect(self, tables: Sequence[tuple[Tensor, Tensor]], caches: Sequence[Tensor]) -> None:
        """Collect the products of the buckets that the kernels can run, and all addresses."""
        parts = self._parts
        self._products = self._find_products()
        if not all(cache.dtype in TYPES for cache in caches):
            self._products = {}
        if not self._products:
            return
        product, *_ = self._products.values()  # all of them share the packed copies
        self._floats = []
        for args, layer, cache in zip(self._layers, parts.layers, caches, strict=True):
            self._collect_layer(args, layer, tables)
            args.cache = cache.data_ptr()
        embedding = parts.embedding
        self._decoder = DecoderArgs(
            *(addressof(self._layers), embedding.data_ptr(), self._norm(parts.final_norm_E)),
            *(embedding.shape[2] if embedding.dim() == 3 else 1, len(parts.layers)),
            *(_hidden_size(parts), product.lanes, embedding.dtype == torch.bfloat16),
            *(parts.is_layer_norm, parts.is_gelu, parts.growth_positions, parts.eps),
            *(parts.embedding_multiplier, parts.residual_multiplier, parts.query_growth),
            *self._share_args(),
        )

    def _share_args(self) -> tuple[int | None, ...]:
        """Return the last fields of DecoderArgs, which describe this rank's share."""
        share = self._parts.share
        if share is None or self._sums is None:
            return None, None, 0, _MAX_IDS, 0, 0, 0
        sizes = share.q_size, share.k_size, share.counts_k
        return self._sums.address, None, share.first_id, share.num_ids, *sizes

    def _collect_layer(
        self, args: LayerArgs, layer: DecoderLayerParts, tables: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Set the fields of `args`, except the layer's cache."""
        args.attention_norm, args.attention_after = map(self._norm, layer.attention_norms_E)
        args.mlp_norm, args.mlp_after = map(self._norm, layer.mlp_norms_E)
        is_reordered = layer.order_D is not None and not layer.has_whole_norms
        order_D = layer.order_D if is_reordered else None
        args.q_norm, args.k_norm = (self._norm(norm, order_D) for norm in layer.head_norms)
        args.qkv, args.output, args.gate_up, args.down = map(self._weight, _handles(layer))
        if layer.rope is not None:
            args.cos, args.sin = (table.data_ptr() for table in tables[layer.rope])
        args.order = None if layer.order_D is None else layer.order_D.data_ptr()
        args.sinks = self._float(layer.traits.sinks_H)
        args.window, args.softcap = layer.traits.window or 0, layer.traits.softcap or 0.0
        args.scale = layer.traits.scale_of(self._parts.head_dim)
        args.is_parallel, args.has_whole_norms = layer.is_parallel, layer.has_whole_norms

    def _norm(self, weight: Tensor | None, order_D: Tensor | None = None) -> int | None:
        """Return the address of a norm's weight plus its offset, in float32 and in the order
        `order_D` if given. Return None for None."""
        if weight is None or (not self._parts.norm_offset and order_D is None):
            return self._float(weight)
        values = weight.detach().float() + self._parts.norm_offset
        self._floats.append(values if order_D is None else values[order_D])
        return self._floats[-1].data_ptr()

    def _float(self, values: Tensor | None) -> int | None:
        """Return the address of `values` in float32, which is a copy for other dtypes. Return None
        for None."""
        if values is None:
            return None
        if values.dtype != torch.float32:
            values = values.detach().float()
            self._floats.append(values)  # not the model's own memory, which must stay releasable
        return values.data_ptr()

    def _weight(self, handle: LinearHandle) -> WeightArgs:
        packed = handle.packed
        return WeightArgs(
            packed.panels_PKW.data_ptr(), self._float(handle.bias_N), packed.num_outputs
        )

    def _forward(self, out_LE: Tensor, batch: ForwardBatch, *, unit: int) -> None:
        parts, num_tokens, num_kept = self._parts, batch.token_ids_T.shape[0], out_LE.shape[0]
        num_rows, num_threads = batch.context_lens_R.shape[0], torch.get_num_threads()
        sizes = self._room_sizes(num_tokens, num_kept)
        has_prefill = num_rows > batch.num_decode_rows
        scratch_size = num_threads * self._kernels.prefill_scratch_bytes() // 4 * has_prefill
        room = torch.empty(sum(sizes) + scratch_size, dtype=torch.float32)
        address = room.data_ptr()
        places = [address + 4 * end for end in accumulate(sizes, initial=0)]
        cache, tables_RM = batch.kv[0], batch.block_tables_RM
        args = PassArgs(
            *(out_LE.data_ptr(), batch.token_ids_T.data_ptr(), batch.positions_T.data_ptr()),
            *(batch.logit_indices_L.data_ptr(), *places, num_kept, num_rows),
            *(batch.num_decode_rows, num_threads, unit),
            AttentionArgs(
                slots=batch.slots_T.data_ptr(),
                tables=tables_RM.data_ptr(),
                query_starts=batch.query_starts_E.data_ptr(),
                context_lens=batch.context_lens_R.data_ptr(),
                table_stride=tables_RM.stride(0),
                block_stride=cache.stride(0),
                block_size=batch.block_size,
                tokens=num_tokens,
                heads=parts.num_heads,
                kv_heads=parts.num_kv_heads,
                dim=parts.head_dim,
                planes=2,
                token_type=TYPES[torch.float32],
                cache_type=TYPES[cache.dtype],
                unit=self._prefill_units[cache.dtype],
            ),
        )
        if self._sums is None:
            self._kernels.decoder_forward(addressof(self._decoder), addressof(args))
            return
        with self._sums.within(room):
            self._kernels.decoder_forward(addressof(self._decoder), addressof(args))

    def _room_sizes(self, num_tokens: int, num_kept: int) -> tuple[int, ...]:
        """Return the number of floats in each work buffer of a pass: residual, normed, fused heads,
        widest activations, a branch's output, and sums of squares."""
        parts = self._parts
        hidden_size = _hidden_size(parts)
        heads_size = parts.num_heads * parts.head_dim
        layer = parts.layers[0]
        num_rows = max(num_tokens, num_kept)  # a token may be kept several times
        num_at_once = min(num_rows, self._kernels.decoder_tokens_at_once())
        return (
            num_tokens * hidden_size,
            num_rows * max(hidden_size, heads_size),
            num_rows * layer.qkv.num_outputs,
            num_at_once * layer.gate_up.num_outputs * 3 // 2,
            num_rows * hidden_size * self._has_indirect_branches,
            num_tokens * 2 * (parts.share is not None),
        )


def native_decoder(
    kernels: Kernels, parts: DecoderParts | None, *, deterministic: bool = False
) -> NativeDecoder | None:
    """Return a decoder of these parts. Return None if `parts` is None, for a model whose layers
    must run one by one. Raises ConfigError if `deterministic` is True and the model cannot run
    fused."""
    if parts is not None:
        return NativeDecoder(kernels, parts, deterministic=deterministic)
    if deterministic:
        raise ConfigError(
            "deterministic=True needs layers of one attention and one gated MLP each, which the "
            "compiled kernels run as a whole; leave deterministic False"
        )
    return None


def _what_is_supported(parts: DecoderParts) -> str:
    dtype = str(parts.embedding.dtype).removeprefix("torch.")
    return (
        "a float32 or bfloat16 model whose head_dim is a multiple of 16, "
        f"at most {MAX_HEAD_DIM}, and whose other sizes are multiples of {_LANES}; "
        f"this one has {dtype}, "
        f"head_dim={parts.head_dim}, hidden_size={_hidden_size(parts)}, "
        f"intermediate_size={parts.layers[0].down.num_inputs}"
    )


def _rows_of(buckets: Collection[int]) -> str:
    """Describe the numbers of rows in these buckets, such as "1 to 64, 129 or more"."""
    ranges = []
    for is_in, group in groupby(range(len(BUCKETS)), lambda bucket: bucket in buckets):
        first, *_, last = [*group] * 2
        if is_in:
            start = BUCKETS[first - 1] + 1 if first else 1
            end = "or more" if last == len(BUCKETS) - 1 else f"to {BUCKETS[last]}"
            ranges.append(str(start) if start == BUCKETS[last] else f"{start} {end}")
    return ", ".join(ranges)


def _has_indirect_branches(parts: DecoderParts) -> bool:
    """Return whether branches need their own buffer before they are added to the residual."""
    # A branch's output is then normed, scaled, or summed with another branch or over the ranks.
    return (
        parts.residual_multiplier != 1.0
        or parts.share is not None
        or any(
            layer.is_parallel or (layer.attention_norms_E[1], layer.mlp_norms_E[1]) != (None, None)
            for layer in parts.layers
        )
    )


def _hidden_size(parts: DecoderParts) -> int:
    return parts.layers[0].qkv.num_inputs  # type: ignore[no-any-return]


def _handles(layer: DecoderLayerParts) -> tuple[LinearHandle, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _is_supported(parts: DecoderParts) -> bool:
    hidden_size, intermediate_size = _hidden_size(parts), parts.layers[0].down.num_inputs
    return (
        parts.embedding.dtype in TYPES
        and parts.num_heads // parts.num_kv_heads <= MAX_GROUP
        and hidden_size % _LANES == 0
        and intermediate_size % _LANES == 0
        and parts.head_dim % (2 * _LANES) == 0
        and parts.head_dim <= MAX_HEAD_DIM
    )
