"""Stands for a CUDA device whose launches are recorded: kernels do not run, results are torch's.

Engines with device="cuda" use it, and capture and replay their steps as on a device: what they
launch, and in what shapes, is decided by the engine's own code. Tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollout.backends import devices
from rollout.backends.base import AttentionBackend, Backend, BackendExecutor
from rollout.backends.buffers import CopyTokens, Strips
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cuda.attention import TritonPagedAttention
from rollout.backends.cuda.copy import copy_tokens
from rollout.backends.cuda.graph import GraphExecutor
from rollout.backends.cuda.graph_shapes import make_graph_shapes
from rollout.backends.cuda.ops import TritonOps
from rollout.backends.executors.eager import EagerExecutor
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.backends.ops.fingerprint import Places
from rollout.backends.ops.reference import DenseLinear, ReferenceOps
from rollout.parallel.collectives import ONE_RANK, Collectives
from rollout.step.output import SampleResult
from scripts.kernel_launches import Recorder
from tests.backends.repeating_device import CPU, HostlessAttention, RepeatingDevice
from tests.backends.triton_references import copy_tokens_reference

NUM_MULTIPROCESSORS = 132  # of an H100 and of an H200


class LaunchedOps(TritonOps):
    """Launches what TritonOps launches; results are those of ReferenceOps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder


def _launched(name: str) -> Callable[..., Any]:
    def launch_and_compute(self: LaunchedOps, *args: Any, **kwargs: Any) -> Any:
        with self._recorder.launches_alone():
            getattr(TritonOps, name)(self, *args, **kwargs)
        return getattr(ReferenceOps, name)(self, *args, **kwargs)

    return launch_and_compute


for _name in vars(TritonOps).keys() & set(dir(ReferenceOps)):
    if callable(getattr(TritonOps, _name)) and not _name.startswith("__"):
        setattr(LaunchedOps, _name, _launched(_name))


class LaunchedAttention(TritonPagedAttention):
    """Launches what TritonPagedAttention launches; results are those of the reference."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(num_multiprocessors=NUM_MULTIPROCESSORS)
        self._recorder = recorder

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
        with self._recorder.launches_alone():
            out_THD = super().attend(q_THD, k_TGD, v_TGD, layer, batch, rotation, traits)
        return self._result(out_THD, q_THD, k_TGD, v_TGD, layer, batch, rotation, traits)

    def _result(self, out_THD: Tensor, *arguments: Any) -> Tensor:
        *parts, layer, batch, rotation, traits = arguments
        # From [blocks, 2, G, block_size, D] to the reference's layout, without a copy.
        caches = {layer: batch.kv[layer].permute(0, 3, 1, 2, 4)}
        in_tokens = replace(batch, kv=caches)  # type: ignore[arg-type]
        return HostlessAttention().attend(*parts, layer, in_tokens, rotation, traits)


class UncomputedOps(TritonOps):
    """Launches what TritonOps launches and computes nothing: products are zero, and so is each
    sampled token. For models that this machine is too small for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def linear(self, x_TK: Tensor, handle: DenseLinear) -> Tensor:
        return x_TK.new_zeros(len(x_TK), len(handle.weight_NK))

    def linear_float32(self, x_TK: Tensor, handle: DenseLinear) -> Tensor:
        return self.linear(x_TK, handle).float()

    def sample(self, logits_SV: Tensor, sampling: Any) -> SampleResult[Tensor]:
        super().sample(logits_SV, sampling)
        num_rows = len(sampling.temperature_S)
        return SampleResult(
            token_ids_S=torch.zeros(num_rows, dtype=torch.int64),
            logprobs_S=torch.zeros(num_rows),
            is_finite_S=torch.ones(num_rows, dtype=torch.bool),
        )

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        return super().fingerprint(x, dtype, places).zero_()


class UncomputedAttention(LaunchedAttention):
    """Launches attention and computes nothing: results are zero."""

    def _result(self, out_THD: Tensor, *arguments: Any) -> Tensor:
        return out_THD.zero_()


def _launched_copy(recorder: Recorder) -> CopyTokens:
    def copy(
        pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
    ) -> None:
        with recorder.launches_alone():
            copy_tokens(pool_BN, source_K, target_K, length_K, strips)
        copy_tokens_reference(pool_BN, source_K, target_K, length_K, strips)

    return copy


def launching_backend(
    recorder: Recorder,
    memory_kind: str,
    *,
    num_graphs: int | None,
    max_mixed_graphs: int,
    max_rows: int,
    collectives: Collectives = ONE_RANK,
    computes: bool = True,
    **_: Any,
) -> Backend:
    """A backend in place of `cuda_backend`'s, whose arguments it takes. Unless it `computes`, its
    results are zeros.
    """
    executor: BackendExecutor = EagerExecutor(CPU)
    if num_graphs != 0:
        graph_shapes = make_graph_shapes(num_graphs, max_rows, max_mixed_graphs)
        executor = GraphExecutor(CPU, RepeatingDevice(), graph_shapes, collectives)
    attention: AttentionBackend = LaunchedAttention(recorder)
    ops: TritonOps = LaunchedOps(recorder)
    if not computes:
        attention, ops = UncomputedAttention(recorder), UncomputedOps(recorder)
    return replace(
        cpu_backend("device" if memory_kind == "device" else "reserved"),
        ops=ops,
        attention=attention,
        executor=executor,
        copy_tokens=_launched_copy(recorder),
        collectives=collectives,
        fuse_decoder=None,
    )


class _CudaIsHere(TorchFunctionMode):
    """Copies to "cuda" are copies in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            return args[0].clone()
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


@contextmanager
def launching_device(recorder: Recorder, *, computes: bool = True) -> Iterator[None]:
    """Make engines with device="cuda" that are built while entered launch as on a device."""

    def cuda_backend(memory_kind: str, **config: Any) -> Backend:
        return launching_backend(recorder, memory_kind, computes=computes, **config)

    with pytest.MonkeyPatch.context() as patch, _CudaIsHere():
        patch.setattr("rollout.backends.select.require_device", devices.parse_device)
        patch.setattr("rollout.backends.cuda.backend.cuda_backend", cuda_backend)
        if computes:
            yield
        else:
            with recorder.launches_alone():
                yield


def run_captured_steps_again(module: Any) -> None:
    """Make a test's trainer compute its steps each time instead of replaying captured ones."""
    trainer = getattr(module, "Trainer", None)
    if isinstance(trainer, type) and hasattr(trainer, "_captured"):
        trainer._captured = lambda self: self._step
