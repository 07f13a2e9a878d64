"""Every attention kernel as the engine launches it, for compiling without a device.

`python -m tests.backends.aot_attention DTYPE` compiles the kernels of a model's dtype for an H100
and prints the memory of each as JSON. It must run where TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton

from rollout.backends.cuda import attention_plan as plan
from rollout.backends.cuda.append import NUM_WARPS, ROWS_PER_PROGRAM, append_kv_kernel
from rollout.backends.cuda.attention import PARTS_PER_MERGE, launch_choice
from rollout.backends.cuda.attention_kernels import (
    decode_attention_kernel,
    merge_parts_kernel,
    merge_prefill_kernel,
    prefill_attention_kernel,
)
from tests.backends.aot_usage import Configuration, usage

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = (64, 96, 128, 256)
TRAIT_HEAD_DIMS = (64, 256)  # GPT-OSS, Gemma
GROUP_SIZES = (1, 64)  # the smallest and the largest give every tile of decode and of prefill
POINTERS = {
    "slots": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
    "tables": "*i32",
    "query_starts": "*i32",
    "context_lens": "*i32",
    "tile_starts": "*i32",
    "first_rows": "*i32",
    "tile_rows": "*i32",
    "tile_tokens": "*i32",
    "tile_lengths": "*i32",
    "ordered_rows": "*i32",
    "ordered_tokens": "*i32",
    "ordered_lengths": "*i32",
    "first_programs": "*i32",
    "program_tiles": "*i32",
    "num_cut": "*i32",
}
# Of the model's dtype.
TENSORS = ("q", "k", "v", "q_out", "out", "cache", "q_norm", "k_norm", "sinks")
FLOATS = ("eps", "scale", "softcap")


def configurations(dtype: str) -> Iterator[Configuration]:
    """Return what the engine can launch for head dims and group sizes up to 64."""
    for head_dim in HEAD_DIMS:
        yield from append_configurations(dtype, head_dim)
        yield from attention_configurations(dtype, head_dim)
        constexprs = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_S": PARTS_PER_MERGE,
        }
        for kernel in (merge_parts_kernel, merge_prefill_kernel):
            yield configuration(kernel, dtype, constexprs, {"num_warps": 4})
    yield from plan_configurations(dtype)


def plan_configurations(dtype: str) -> Iterator[Configuration]:
    """Return the plan's kernels, which do not depend on the model's dtype."""
    sizes, options = {"BLOCK": plan.BLOCK}, {"num_warps": 4}
    for window in (False, True):
        constexprs = sizes | {"BLOCK_N": 64, "HAS_WINDOW": window}
        yield configuration(plan.tile_starts_kernel, dtype, constexprs, options)
        yield configuration(plan.query_tiles_kernel, dtype, constexprs, options)
    for kernel in (plan.first_rows_kernel, plan.cut_tiles_kernel, plan.program_tiles_kernel):
        yield configuration(kernel, dtype, sizes, options)
    constexprs = sizes | {"BLOCK_J": plan.BLOCK_J}
    yield configuration(plan.order_tiles_kernel, dtype, constexprs, options)


def append_configurations(dtype: str, head_dim: int) -> Iterator[Configuration]:
    """Return append_kv with and without norms of heads; weights with an offset are float32."""
    rounds = {"ROUNDS_NORM_FIRST": True, "ROUNDS_ANGLES": True, "ROUNDS_EACH": True}
    rounds_once = dict.fromkeys(rounds, False)
    constexprs = {
        "HEAD_DIM": head_dim,
        "BLOCK_F": triton.next_power_of_2(head_dim // 2),
        "BLOCK_R": ROWS_PER_PROGRAM,
        "HAS_ROTATION": True,
    } | rounds
    options = {"num_warps": NUM_WARPS}
    for norms in ({}, {"q_norm": None, "k_norm": None}):
        yield configuration(append_kv_kernel, dtype, constexprs | norms, options)
    if head_dim == max(TRAIT_HEAD_DIMS):
        constexprs |= {"ROUNDS_NORM_FIRST": False}
        case = configuration(append_kv_kernel, dtype, constexprs, options)
        offset = {"q_norm": "*fp32", "k_norm": "*fp32"}
        yield case._replace(signature=case.signature | offset)
        yield configuration(append_kv_kernel, dtype, constexprs | rounds_once, options)


def attention_configurations(dtype: str, head_dim: int) -> Iterator[Configuration]:
    """Return every distinct choice of `launch_choice`, plain and with all traits."""
    choices = {
        (is_decode, launch_choice(DTYPES[dtype], head_dim, group_size, is_decode))
        for is_decode in (True, False)
        for group_size in GROUP_SIZES
    }
    plain = {"HAS_WINDOW": False, "HAS_SOFTCAP": False, "sinks": None}
    traits = [plain]
    if head_dim in TRAIT_HEAD_DIMS:
        traits.append({"HAS_WINDOW": True, "HAS_SOFTCAP": True})
    for (is_decode, choice), trait in product(sorted(choices, key=repr), traits):
        constexprs = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": choice.block_m,
            "BLOCK_N": choice.block_n,
        } | trait
        options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
        kernel = decode_attention_kernel if is_decode else prefill_attention_kernel
        yield configuration(kernel, dtype, constexprs, options)


def configuration(
    kernel: Any, dtype: str, constexprs: dict[str, Any], options: dict[str, int]
) -> Configuration:
    """Return the configuration of a kernel, with a signature by the arguments' names."""
    types = POINTERS | dict.fromkeys(TENSORS, f"*{dtype}") | dict.fromkeys(FLOATS, "fp32")
    types |= dict.fromkeys(constexprs, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    return Configuration(kernel, signature, constexprs, options)


def odd_arguments(case: Configuration) -> set[str]:
    """Return the integer arguments that are not specialised; the others are multiples of 16."""
    return {parameter.name for parameter in case.kernel.params if parameter.do_not_specialize}


def wanted_programs(case: Configuration, dtype: str) -> int:
    """Return the number of programs per multiprocessor that the launch assumes."""
    sizes = case.constexprs
    if case.kernel is prefill_attention_kernel:
        return launch_choice(DTYPES[dtype], sizes["HEAD_DIM"], 1, False).num_resident
    if case.kernel is not decode_attention_kernel:
        return 1
    group_size = 1 if sizes["BLOCK_M"] == 16 else sizes["BLOCK_M"]
    return launch_choice(DTYPES[dtype], sizes["HEAD_DIM"], group_size, True).num_resident


def main(dtype: str) -> None:
    found = {}
    for case in configurations(dtype):
        used = usage(case, odd_arguments(case))._asdict()
        found[case.name] = used | {"wanted_programs": wanted_programs(case, dtype)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
