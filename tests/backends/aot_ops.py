"""Every kernel of TritonOps as the engine launches it, for compiling without a device.

`python -m tests.backends.aot_ops SHARE` compiles those of a model's dtype, or all others, for an
H100 and prints the registers and memory of each as JSON. It must run where TRITON_INTERPRET is
not set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import triton

from rollout.backends.cuda import copy, fingerprint, layers, sampling
from rollout.backends.cuda import sampling_kernels as kernels
from rollout.backends.cuda import truncation_kernels as truncation
from rollout.backends.ops.fingerprint import EXPONENT_BITS
from tests.backends.aot_usage import Configuration, usage

VOCABULARIES = (256, 32_000, 151_936)
POINTERS = {
    "sums_ptr": "*i64",
    "token_ptr": "*i64",
    "target_ptr": "*i64",
    "is_finite_ptr": "*i1",
    "mode_ptr": "*i8",
    "logprob_ptr": "*fp32",
    "max_ptr": "*fp32",
    "temperature_ptr": "*fp32",
    "mass_ptr": "*fp64",
    "raw_mass_ptr": "*fp64",
    "kept_mass_ptr": "*fp64",
    "uniform_ptr": "*fp64",
    "threshold_ptr": "*fp32",
    "largest_ptr": "*fp32",
    "last_tie_ptr": "*i32",
    "histogram_ptr": "*i64",
    "candidates_ptr": "*i32",
    "top_k_ptr": "*i64",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "pool": "*i32",
    "sources": "*i64",
    "targets": "*i64",
    "lengths": "*i64",
}  # the other pointers are to the model's dtype
ABSENT = dict.fromkeys(("kept_mass_ptr", "threshold_ptr", "last_tie_ptr", "min_p_ptr"))
MAY_BE_ODD = ("num_heads", "num_chunks")  # the rest are multiples of 16 in practice


def configurations(dtype: str) -> Iterator[Configuration]:
    """Return what a model of this dtype launches, for one hidden size and one vocabulary."""
    yield from norm_configurations(dtype, block=4096)
    yield configuration(layers.silu_mul_kernel, dtype, BLOCK=layers.SILU_BLOCK)
    yield from chunk_configurations(dtype)
    yield from row_configurations(dtype, VOCABULARIES[0])
    # It moves words, whatever they hold.
    sizes = {"BLOCK_C": copy.WORDS_PER_CHUNK}
    yield configuration(copy.copy_tokens_kernel, dtype, num_warps=copy.NUM_WARPS, **sizes)


def other_configurations() -> Iterator[Configuration]:
    """Return kernels of hidden sizes up to 16384, the other VOCABULARIES, and fingerprints."""
    for block in (64, 1024, 16_384):
        yield from norm_configurations("bf16", block=block)
    for vocabulary in VOCABULARIES[1:]:
        yield from row_configurations("fp32", vocabulary)
    # The launcher makes a constant of an integer that is 1.
    yield configuration(
        layers.rms_norm_kernel, "bf16", num_heads=1, num_warps=8, BLOCK=4096, ROUNDS_FIRST=True
    )
    yield from row_configurations("fp32", 1, vocabulary=1, row_stride=1, num_chunks=1)
    yield from fingerprint_configurations()


def fingerprint_configurations() -> Iterator[Configuration]:
    """Return the fingerprint kernel for every cast, for more than 2^31 values, and for
    one value.
    """
    kernel = fingerprint.fingerprint_kernel
    for source, dtype in product(("bf16", "fp16", "fp32", "fp64"), fingerprint.TYPES):
        target, bits = fingerprint.TYPES[dtype]
        constants = {
            "TARGET": target,
            "BITS": bits,
            "EXPONENT": EXPONENT_BITS[dtype],
            "IS_PART": False,
            "BLOCK": fingerprint.BLOCK,
            "num_warps": fingerprint.NUM_WARPS,
        }
        yield configuration(kernel, source, **constants)
    many = configuration(kernel, source, **constants)
    yield many._replace(signature=many.signature | {"num_values": "i64"})
    yield configuration(kernel, source, **constants | {"IS_PART": True})
    yield configuration(kernel, source, num_values=1, **constants)


def norm_configurations(dtype: str, *, block: int) -> Iterator[Configuration]:
    num_warps = layers.num_warps_of(block)
    for kernel, rounds_first in product(
        (layers.rms_norm_kernel, layers.add_rms_norm_kernel), (True, False)
    ):
        yield configuration(
            kernel, dtype, num_warps=num_warps, BLOCK=block, ROUNDS_FIRST=rounds_first
        )


def chunk_configurations(dtype: str) -> Iterator[Configuration]:
    yield configuration(kernels.chunk_statistics_kernel, dtype, CHUNK=sampling.CHUNK)
    yield configuration(truncation.kept_mass_kernel, dtype, CHUNK=sampling.CHUNK)
    yield configuration(
        kernels.score_kernel, dtype, num_warps=sampling.ROW_WARPS, CHUNK=sampling.ROW_CHUNK
    )


def row_configurations(dtype: str, size: int, **ones: int) -> Iterator[Configuration]:
    """Return the kernels that read a row of a vocabulary of `size`."""
    num_chunks = triton.next_power_of_2(triton.cdiv(size, sampling.CHUNK))
    sizes = {"CHUNK": sampling.CHUNK, "CHUNKS": num_chunks, **ones}
    yield configuration(kernels.draw_kernel, dtype, TRUNCATES=True, **sizes)
    yield configuration(kernels.draw_kernel, dtype, TRUNCATES=False, **sizes, **ABSENT)
    yield configuration(truncation.histogram_kernel, dtype, **sizes)
    sizes["ROOM"] = sampling.ROOM
    yield configuration(truncation.candidates_kernel, dtype, **sizes)
    sizes["CHUNK"] = sampling.LIST_CHUNK
    yield configuration(truncation.threshold_kernel, dtype, **sizes)


def configuration(
    kernel: Any, dtype: str, *, num_warps: int = 4, **constexprs: Any
) -> Configuration:
    signature = {name: type_of(name, dtype) for name in kernel.arg_names}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return Configuration(kernel, signature, constexprs, {"num_warps": num_warps})


def type_of(parameter: str, dtype: str) -> str:
    if parameter in POINTERS or parameter.endswith("_ptr"):
        return POINTERS.get(parameter, f"*{dtype}")
    return "fp32" if parameter in ("eps", "unit") else "i32"


def odd_arguments(case: Configuration) -> set[str]:
    """Return the integer arguments that need not be multiples of 16."""
    return {*MAY_BE_ODD, *case.constexprs}


def main(share: str) -> None:
    used = {}
    for config in other_configurations() if share == "others" else configurations(share):
        name = f"{config.kernel.__name__}({config.signature}, {config.constexprs})"
        used[name] = usage(config, odd_arguments(config))._asdict()
    print(json.dumps(used))


if __name__ == "__main__":
    main(sys.argv[1])
