"""Compare compiled CPU attention with lower bounds of its time.

`python -m benchmarks.attention`, run by hand, prints three tables of ratios of CPU seconds:
- Decode: attention of a step, over one sequential read of as many bytes.
- Prefill: attention, over torch.mm with the same number of floating-point operations.
- Shared prefix: rows that share blocks, over the same rows without shared blocks.

Each ratio is the median over rounds. Decode KV is larger than the CPU's caches, so no KV is still
cached from the round before.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.one_thread import restart_with_one_thread
from rollout.backends.cpu.attention import NativePlan, set_tensors, set_traits
from rollout.backends.cpu.kernels import AttentionArgs, Kernels
from rollout.backends.cpu.library import load_library
from rollout.backends.forward_batch import PLAIN, ForwardBatch

NUM_KV_HEADS = 4
GROUPS = (1, 4, 7)
COLD_BYTES = 256 << 20  # of KV that is visited in turn: more than the processor's caches hold
MAX_TOKENS = 1 << 17
CONTEXTS = (128, 512, 4096)
MIN_SECONDS = 0.03  # of one measurement
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Shape of one attention call.

    context: tokens of each row. The last `num_new` of these tokens are computed.
    group: query heads per KV head.
    shared: number of leading context tokens whose blocks all rows share.
    """

    num_rows: int
    context: int
    num_new: int = 1
    block_size: int = 16
    group: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    shared: int = 0

    @property
    def kv_bytes(self) -> int:
        token = 2 * NUM_KV_HEADS * self.head_dim * self.dtype.itemsize
        return self.num_rows * self.context * token

    @property
    def num_flops(self) -> int:
        """FLOPs of the two matrix products of causal attention."""
        first = self.context - self.num_new
        keys = sum(range(first + 1, self.context + 1))
        return 4 * self.num_rows * NUM_KV_HEADS * self.group * self.head_dim * keys


class Problem:
    """Inputs and kernel arguments of a case.

    A decode case has enough layers to exceed the CPU's caches. A prefill case has one layer.
    """

    def __init__(self, case: Case) -> None:
        num_blocks = -(-case.context // case.block_size)
        num_shared = case.shared // case.block_size
        count = num_shared + case.num_rows * (num_blocks - num_shared)
        ids = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()
        own = ids[num_shared:].view(case.num_rows, -1)
        tables = torch.cat((ids[:num_shared].expand(case.num_rows, -1), own), dim=1)
        shape = (count, case.block_size, 2, NUM_KV_HEADS, case.head_dim)
        layer_bytes = math.prod(shape) * case.dtype.itemsize
        num_layers = max(1, -(-COLD_BYTES // layer_bytes)) if case.num_new == 1 else 1
        self.case = case
        block = torch.randn(shape[1:]).to(case.dtype)
        self._pool = block.repeat(num_layers * count, 1, 1, 1, 1)
        self.caches = self._pool.split(count)
        num_tokens = case.num_rows * case.num_new
        heads = (case.group * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        fused = torch.randn(num_tokens, sum(heads), case.head_dim).to(case.dtype)
        self._tensors = q, k, v = fused.split(heads, dim=1)
        self._out = torch.empty(q.shape, dtype=case.dtype)
        self._batch = _batch(case, tables.contiguous(), self.caches)
        self.args = []
        for cache in self.caches:
            args = NativePlan(self._batch).args
            set_tensors(args, q, k, v, self._out, cache)
            set_traits(args, PLAIN, None)
            self.args.append(args)

    def read_seconds(self) -> float:
        """Return the CPU seconds to read one layer's KV. Reads all layers and returns one
        layer's share."""
        words = self._pool.view(-1).view(torch.int32)
        return cpu_seconds(words.amax) * self.case.kv_bytes / self._pool.nbytes


def _batch(case: Case, tables_RM: torch.Tensor, kv: Sequence[torch.Tensor]) -> ForwardBatch:
    starts = np.arange(0, (case.num_rows + 1) * case.num_new, case.num_new, dtype=np.int32)
    lens = np.full(case.num_rows, case.context, dtype=np.int32)
    positions = torch.arange(case.context - case.num_new, case.context)
    blocks = tables_RM[:, positions // case.block_size].long()
    slots = blocks * case.block_size + positions % case.block_size
    return ForwardBatch(
        token_ids_T=torch.zeros(len(slots.view(-1)), dtype=torch.int64),
        positions_T=positions.repeat(case.num_rows),
        slots_T=slots.view(-1).contiguous(),
        block_tables_RM=tables_RM,
        query_starts_E=torch.from_numpy(starts),
        context_lens_R=torch.from_numpy(lens),
        query_starts=starts,
        context_lens=lens,
        num_decode_rows=case.num_rows if case.num_new == 1 else 0,
        block_size=case.block_size,
        logit_indices_L=torch.zeros(0, dtype=torch.int64),
        kv=kv,
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Bench:
    """The compiled kernels, and their measurements over `num_rounds` rounds.

    Raises SystemExit if this machine has no compiled kernels.
    """

    def __init__(self, num_rounds: int) -> None:
        library = load_library()
        if library is None:
            raise SystemExit("there are no compiled kernels on this machine")
        self._kernels = Kernels(library)
        self._scratch = torch.empty(self._kernels.prefill_scratch_bytes(), dtype=torch.uint8)
        self._num_rounds = num_rounds

    def decode(self, problem: Problem, layer: int) -> None:
        args = addressof(problem.args[layer])
        self._kernels.attend_decode_part(args, 0, problem.case.num_rows, 0, 1)

    def prefill(self, args: AttentionArgs, num_rows: int) -> None:
        scratch = self._scratch.data_ptr()
        self._kernels.attend_prefill_part(addressof(args), scratch, 0, num_rows, 0, 1)

    def decode_ratio(self, case: Case) -> tuple[float, float]:
        """Return attention's GB/s of KV, and its time over the time of a plain read."""
        problem = Problem(case)
        rounds = []
        for visited in self._cycle(problem):
            ours = self._decode_all(problem, visited)
            read = problem.read_seconds() * len(visited)
            rounds.append((ours / len(visited), ours / read))
        seconds = statistics.median(s for s, _ in rounds)
        return case.kv_bytes / seconds / 1e9, statistics.median(r for _, r in rounds)

    def _decode_all(self, problem: Problem, layers: Sequence[int]) -> float:
        def work() -> None:
            for layer in layers:
                self.decode(problem, layer)

        return cpu_seconds(work)

    def _cycle(self, problem: Problem) -> Iterator[list[int]]:
        """Yield the layer indices of each round: as many decode calls as take MIN_SECONDS."""
        count = len(problem.args)
        self.decode(problem, 0)
        seconds = cpu_seconds(lambda: self.decode(problem, count - 1))
        length = max(1, int(MIN_SECONDS / max(seconds, 1e-6)))
        turn = itertools.cycle(range(count))
        for _ in range(self._num_rounds):
            yield list(itertools.islice(turn, length))

    def prefill_ratio(self, case: Case) -> tuple[float, float]:
        """Return attention's GFLOP/s, and its time over torch.mm's time for as many FLOPs."""
        problem = Problem(case)
        size = 1024
        a, b = torch.rand(size, size), torch.rand(size, size)
        rounds = []
        for index in range(self._num_rounds + 1):
            ours = cpu_seconds(lambda: self.prefill(problem.args[0], case.num_rows))
            product = cpu_seconds(lambda: torch.mm(a, b)) * case.num_flops / (2 * size**3)
            if index:
                rounds.append((ours, ours / product))
        seconds = statistics.median(s for s, _ in rounds)
        return case.num_flops / seconds / 1e9, statistics.median(r for _, r in rounds)

    def sharing_ratio(self, case: Case) -> float:
        """Return the time of rows with a shared prefix over that of rows without one."""
        shared, own = Problem(case), Problem(replace(case, shared=0))
        rounds = []
        count = len(own.args)
        for visited in self._cycle(shared):
            ours = self._decode_all(shared, visited)
            plain = self._decode_all(own, [i % count for i in visited])
            rounds.append(ours / plain)
        return statistics.median(rounds)


def over_groups(case: Case, cell: Callable[[Case], str]) -> list[str]:
    """Return `cell` of the case for each GQA group size."""
    return [cell(replace(case, group=group)) for group in GROUPS]


def decode_table(bench: Bench, dtype: torch.dtype, head_dim: int, console: Console) -> None:
    """Print the decode ratios, with a column per GQA group size."""
    table = Table("batch", "context", "block", *(f"GQA {g}: x read (GB/s)" for g in GROUPS))

    def cell(case: Case) -> str:
        rate, ratio = bench.decode_ratio(case)
        return f"{ratio:.2f} ({rate:.1f})"

    for rows, context, block_size in itertools.product((1, 8, 64), CONTEXTS, (16, 64, 256)):
        if rows * context <= MAX_TOKENS:
            case = Case(num_rows=rows, context=context, head_dim=head_dim, dtype=dtype)
            cells = over_groups(replace(case, block_size=block_size), cell)
            table.add_row(str(rows), str(context), str(block_size), *cells)
    console.print(f"Decode, {dtype}, head dim {head_dim}", table)


def prefill_table(bench: Bench, dtype: torch.dtype, console: Console) -> None:
    """Print the prefill ratios, with a column per GQA group size."""
    table = Table("tokens", "head dim", *(f"GQA {g}: x product (GFLOP/s)" for g in GROUPS))

    def cell(case: Case) -> str:
        rate, ratio = bench.prefill_ratio(case)
        return f"{ratio:.2f} ({rate:.0f})"

    for tokens, head_dim in itertools.product((512, 2048), (64, 128)):
        case = Case(num_rows=1, context=tokens, num_new=tokens, head_dim=head_dim, dtype=dtype)
        table.add_row(str(tokens), str(head_dim), *over_groups(case, cell))
    console.print(f"Prefill, {dtype}", table)


def sharing_table(bench: Bench, dtype: torch.dtype, console: Console) -> None:
    """Print the ratios of rows that share a prompt, each with 64 tokens of its own."""
    table = Table("samples", "prompt", *(f"GQA {g}: x unshared" for g in GROUPS))
    for num_rows, prompt in itertools.product((8, 64), (128, 512, 1024)):
        case = Case(num_rows=num_rows, context=prompt + 64, shared=prompt, dtype=dtype)
        cells = over_groups(case, lambda one: f"{bench.sharing_ratio(one):.2f}")
        table.add_row(str(num_rows), str(prompt), *cells)
    console.print(f"Shared prefix, {dtype}", table)


def main() -> None:
    restart_with_one_thread()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tables", nargs="+", default=["decode", "prefill", "sharing"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    bench, dtype, console = Bench(options.rounds), DTYPES[options.dtype], Console(width=120)
    if "decode" in options.tables:
        for head_dim in options.head_dims:
            decode_table(bench, dtype, head_dim, console)
    if "prefill" in options.tables:
        prefill_table(bench, dtype, console)
    if "sharing" in options.tables:
        sharing_table(bench, dtype, console)


if __name__ == "__main__":
    main()
