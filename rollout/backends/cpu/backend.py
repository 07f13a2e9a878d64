"""cpu_backend: puts the parts of the CPU backend together.

Used by `rollout.backends.select`. `rollout.weights.fingerprints` and
`rollout.weights.transports.reading` use its operations to compute fingerprints. Kernels that this
machine compiles are written to the user's cache directory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rollout.backends.base import AttentionBackend, Backend, Ops
from rollout.backends.buffers import MemoryBackend
from rollout.backends.cpu.attention import NativePagedAttention
from rollout.backends.cpu.decoder import native_decoder
from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.library import load_library
from rollout.backends.cpu.linear_ops import CpuOps, rule_of_environment
from rollout.backends.cpu.memory import DeviceMemory, MappedHostArena, ReservedMemory
from rollout.backends.cpu.ops import NativeOps
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.backends.executors.eager import EagerExecutor
from rollout.backends.limits import memory_limit_bytes
from rollout.errors import ConfigError
from rollout.parallel.collectives import ONE_RANK, Collectives


def cpu_backend(
    memory_kind: str, *, deterministic: bool = False, collectives: Collectives = ONE_RANK
) -> Backend:
    """Return a Backend on CPU, with compiled kernels if `load_library` finds or compiles them.

    `memory_kind` is "device" or "reserved". If `deterministic`, a token's logits and log-probs do
    not depend on the schedule. Raises ConfigError if `deterministic` is True and there are no
    compiled kernels, and if "reserved" is not supported.
    """
    device = torch.device("cpu")
    memory: MemoryBackend = ReservedMemory() if memory_kind == "reserved" else DeviceMemory()
    library = load_library()
    fuse_decoder = None
    if deterministic and library is None:
        raise ConfigError(
            "deterministic=True needs the compiled kernels: install a C compiler and unset "
            "ROLLOUT_NATIVE, or leave it False"
        )
    if library is None:
        ops: Ops[Any] = CpuOps()
        attention: AttentionBackend = TorchSdpaAttention(ops)
    else:
        kernels = Kernels(library)
        ops = NativeOps(kernels, rule_of_environment(kernels, native_only=deterministic))
        attention = NativePagedAttention(kernels, ops, deterministic=deterministic)
        fuse_decoder = partial(native_decoder, kernels, deterministic=deterministic)
    return Backend(
        device=device,
        memory_bytes=memory_limit_bytes(),
        ops=ops,
        attention=attention,
        executor=EagerExecutor(device),
        memory=memory,
        create_host_arena=MappedHostArena,
        collectives=collectives,
        fuse_decoder=fuse_decoder,
    )
