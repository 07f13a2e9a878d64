"""Kernels: the functions of the compiled library with their types, and work split over threads.

Used by `rollout.backends.cpu.backend`, by the modules of `rollout.backends.cpu` that call C, and by
benchmarks. The ctypes structures must match the C structs field by field.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_double, c_float, c_int64, c_void_p
from itertools import pairwise
from typing import Any

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # the enum FLOAT32, BFLOAT16 of vectors.h
VECTORS, DOT, AMX = range(3)  # enum unit of vectors.h

_CACHE_LINE = 64
_ARGUMENTS = {"p": c_void_p, "i": c_int64, "f": c_float}
# Arguments of each function: p pointer, i int64, f float.
_SIGNATURES = {
    "run_parts": "pppiii",
    "linear_part": "ppii",
    "sort_experts": "p",
    "experts_gate_up_part": "ppii",
    "experts_down_part": "ppii",
    "pack_weights": "ppiiiiii",
    "unpack_weights": "ppiiiiii",
    "exchange": "ppiip",
    "rms_norm": "pppiiiifii",
    "add_rms_norm": "pppppiifii",
    "rotary": "ppppiiiii",
    "silu_mul": "ppii",
    "gelu_mul": "ppiii",
    "layer_norm": "pppiifii",
    "write_tokens": "p",
    "attend_decode_part": "piiii",
    "attend_prefill_part": "ppiiii",
    "sample_rows": "ppii",
    "score_rows": "ppii",
    "fingerprint": "ppiiiiiiii",
    "copy_fingerprint": "pppiiii",
    "decoder_forward": "pp",
    "decoder_tokens_at_once": "",
    "prefill_scratch_bytes": "",
    "sampling_scratch_bytes": "i",
    "linear_max_lanes": "",
    "dot_is_usable": "",
    "amx_is_usable": "",
}

_RETURNS_NUMBER = ("_bytes", "_lanes", "_at_once", "_usable")  # name endings; others return void


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class AttentionArgs(ctypes.Structure):
    """struct attention of paged_cache.h."""

    _fields_ = (
        *_fields(c_void_p, "out q k v cache slots tables query_starts context_lens"),
        *_fields(c_int64, "q_stride k_stride v_stride table_stride block_stride block_size"),
        *_fields(c_int64, "tokens heads kv_heads dim planes token_type cache_type lanes unit"),
        *_fields(c_int64, "window"),
        *_fields(c_void_p, "sinks"),
        *_fields(c_double, "scale softcap"),
    )


class WeightArgs(ctypes.Structure):
    """struct weight of decoder.c."""

    _fields_ = (*_fields(c_void_p, "packed bias"), *_fields(c_int64, "outputs"))


class LayerArgs(ctypes.Structure):
    """struct layer of decoder.c."""

    _fields_ = (
        *_fields(c_void_p, "attention_norm attention_after mlp_norm mlp_after q_norm k_norm"),
        *_fields(WeightArgs, "qkv output gate_up down"),
        *_fields(c_void_p, "cache cos sin order sinks"),
        *_fields(c_int64, "window is_parallel has_whole_norms"),
        *_fields(c_double, "scale softcap"),
    )


class DecoderArgs(ctypes.Structure):
    """struct decoder of decoder.c."""

    _fields_ = (
        *_fields(c_void_p, "layers embedding final_norm"),
        *_fields(c_int64, "embedding_width num_layers hidden lanes is_bfloat16 is_layer_norm"),
        *_fields(c_int64, "is_gelu growth_positions"),
        *_fields(c_double, "eps embedding_multiplier residual_multiplier query_growth"),
        *_fields(c_void_p, "add_up context"),
        *_fields(c_int64, "first_id num_ids q_size k_size counts_k"),
    )


class PassArgs(ctypes.Structure):
    """struct pass of decoder.c."""

    _fields_ = (
        *_fields(c_void_p, "out token_ids positions kept residual normed fused wide added"),
        *_fields(c_void_p, "squares scratch"),
        *_fields(c_int64, "num_kept rows decode_rows threads unit"),
        *_fields(AttentionArgs, "attention"),
    )


class LinearArgs(ctypes.Structure):
    """struct linear of linear.h."""

    _fields_ = (
        *_fields(c_void_p, "y x w bias"),
        *_fields(c_int64, "tokens inputs outputs x_stride lanes is_bfloat16 unit accumulate"),
    )


class ExpertsArgs(ctypes.Structure):
    """struct experts of experts.c."""

    _fields_ = (
        *_fields(c_void_p, "out x ids weights gate_up down gate_up_bias down_bias"),
        *_fields(c_void_p, "starts order active"),
        *_fields(c_int64, "tokens per_token experts hidden size type lanes activation"),
        *_fields(c_double, "alpha limit"),
    )


class SamplingArgs(ctypes.Structure):
    """struct sampling of sampling.c."""

    _fields_ = (
        *_fields(c_void_p, "logits uniforms temperature top_k top_p min_p mode tokens is_finite"),
        *_fields(c_void_p, "logprobs top_ids top_logprobs"),
        *_fields(c_int64, "vocabulary top_n"),
    )


class ScoringArgs(ctypes.Structure):
    """struct scoring of sampling.c."""

    _fields_ = (
        *_fields(c_void_p, "logits targets logprobs top_ids top_logprobs"),
        *_fields(c_int64, "vocabulary top_n"),
    )


class Kernels:
    """The functions of the compiled library, as attributes with the names in _SIGNATURES. Calls
    release the GIL. The first `split` that needs threads starts a pool of Python threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_ARGUMENTS[letter] for letter in arguments]
            function.restype = c_int64 if name.endswith(_RETURNS_NUMBER) else None
            setattr(self, name, function)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0  # the process that started the pool's threads

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not a kernel; the kernels are {sorted(_SIGNATURES)}")

    def run(
        self,
        part: Any,
        args: ctypes.Structure,
        num_items: int,
        *,
        smallest: int = 1,
        scratch_bytes: int = 0,
    ) -> None:
        """Call part(args, scratch, first, last) over the items [0, num_items), on OpenMP threads.

        `part` is a function of the library with these arguments. There are at most as many threads
        as torch uses. Each thread gets at least `smallest` items, and a scratch buffer of
        `scratch_bytes`.
        """
        num_threads = max(1, min(torch.get_num_threads(), num_items // smallest))
        scratch_bytes = -(-scratch_bytes // _CACHE_LINE) * _CACHE_LINE
        scratch = torch.empty(num_threads * scratch_bytes, dtype=torch.uint8)
        pointers = ctypes.addressof(args), scratch.data_ptr()
        if num_threads == 1:
            part(*pointers, 0, num_items)
        else:
            function = ctypes.cast(part, c_void_p)
            self.run_parts(function, *pointers, scratch_bytes, num_items, num_threads)

    def split(self, num_items: int, work: Callable[[int, int], None], smallest: int = 1) -> None:
        """Call the Python function work(first, last) over the items [0, num_items), on at most as
        many threads as torch uses. Each thread gets at least `smallest` items."""
        num_threads = torch.get_num_threads()  # a part on another thread costs 50 us
        num_parts = 1 if num_threads == 1 else min(num_threads, num_items // smallest)
        if num_parts <= 1:
            work(0, num_items)
            return
        if self._pool is None or self._pool_pid != os.getpid():
            self._pool = ThreadPoolExecutor(thread_name_prefix="rollout-native")
            self._pool_pid = os.getpid()
        edges = [num_items * part // num_parts for part in range(num_parts + 1)]
        futures = [self._pool.submit(work, *part) for part in pairwise(edges[1:])]
        work(edges[0], edges[1])
        for future in futures:
            future.result()
