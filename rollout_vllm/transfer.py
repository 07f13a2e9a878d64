"""Messages between the trainer's end of a vLLM weight transfer and the engines', and its backends.

vLLM's trainer-side classes drive the engines by four calls (its VLLMWeightSyncClient). The trainer
relays each call to all engines of a push through its TCPStore, in these keys below the push's id:

- `member/<slot>`: a Member, written by each engine when it begins to commit.
- `go`: the sender's Go: who takes part, and their ranks. Until then vLLM is not touched.
- `call/<n>`: a Call. `answer/<n>/<slot>`: the text of an engine's error, "" if it succeeded.

Used by `rollout_vllm.transfer_sender`, `rollout_vllm.transfer_receiver` and `rollout_vllm.engine`.
Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rollout.errors import ConfigError

KIND = "vllm:"  # and the backend: the `kind` of these WeightsSources
# Their `address` has four words: HOST:PORT of the store, the push's id, FINITE unless a tensor
# holds NaN or infinity, and the GPU that an "ipc" engine must share.
FINITE = "finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How one of vLLM's backends for weight transfer is used.

    is_on_gpu: tensors are on GPUs. is_on_one_gpu: the engine uses the trainer's GPU. can_hang: a
    transfer does not end by itself when the sender ends.
    """

    is_on_gpu: bool
    is_on_one_gpu: bool = False
    can_hang: bool = False


# "gloo" is this package's: `rollout_vllm.gloo_engine`. The others are vLLM's.
BACKENDS = {
    "gloo": Backend(is_on_gpu=False),
    "nccl": Backend(is_on_gpu=True, can_hang=True),
    "ipc": Backend(is_on_gpu=True, is_on_one_gpu=True),
}
# Backends of vLLM that cannot carry a push, and why.
UNUSABLE = {
    "nccl_m2n": "it numbers the workers of one engine only, and takes a source with layouts",
    "sharded_rdt": "its trainer and engines are actors of Ray",
    "sparse_nccl": "it sends patches, not weights",
    "modelexpress": "its weights come from a server of its own",
}


def require_backend(name: str) -> Backend:
    """Return a backend by name. Raises ConfigError for one that cannot carry a push."""
    if name in BACKENDS:
        return BACKENDS[name]
    known = ", ".join(f"{KIND}{each}" for each in BACKENDS)
    reason = f": {UNUSABLE[name]}" if name in UNUSABLE else ""
    raise ConfigError(f"weight_transport='{KIND}{name}' is not supported{reason}; use {known}")


class Member(msgspec.Struct, frozen=True, array_like=True):
    """An engine that begins to commit. `group`: the group that it still has, "" for none.
    `num_members`: engines that the coordinator has asked to commit."""

    engine: str
    num_workers: int
    group: str
    num_members: int


class Go(msgspec.Struct, frozen=True, array_like=True):
    """The sender's message that begins a transfer.

    `offsets`: the number of workers before each engine's, by engine. `fault`: why there is no
    transfer; "" if there is one.
    """

    group: str
    offsets: Mapping[str, int]
    fault: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of vLLM's client. `payload`: its argument, packed by `pack_payload`; b"" for none.
    `fault`: why the sender has ended the transfer; "" for a call."""

    method: str
    payload: bytes = b""
    fault: str = ""


# ---- arguments of calls, whose CUDA IPC handles name classes and dtypes of torch

_TORCH_NAME = 1  # the code of msgpack's extension type
_CLASSES = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "UntypedStorage": torch.UntypedStorage,
    "TypedStorage": torch.storage.TypedStorage,
}


def pack_payload(payload: Any) -> bytes:
    """Encode the argument of a call. Raises TypeError for a value that no backend sends."""
    return msgspec.msgpack.encode(payload, enc_hook=_encoded)


def unpack_payload(packed: bytes) -> Any:
    """Decode the argument of a call. Raises msgspec.MsgspecError if it is malformed."""
    payload = msgspec.msgpack.decode(packed, ext_hook=_decoded)
    handles = payload.get("ipc_handles") if isinstance(payload, dict) else None
    if isinstance(handles, dict):
        payload["ipc_handles"] = _with_tuples(handles)
    elif isinstance(handles, list):
        payload["ipc_handles"] = [_with_tuples(each) for each in handles]
    return payload


def _with_tuples(handle: Mapping[str, Any]) -> dict[str, Any]:
    """Return a handle with the tuples that msgpack made lists: vLLM takes it as a key."""
    return {
        device: tuple(tuple(value) if isinstance(value, list) else value for value in arguments)
        for device, arguments in handle.items()
    }


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return msgspec.msgpack.Ext(_TORCH_NAME, str(value).encode())
    for name, kind in _CLASSES.items():
        if value is kind:
            return msgspec.msgpack.Ext(_TORCH_NAME, name.encode())
    raise TypeError(f"a {type(value).__name__} cannot be sent to vLLM's workers")


def _decoded(code: int, data: memoryview) -> Any:
    name = bytes(data).decode()
    if code != _TORCH_NAME:
        raise ValueError(f"unknown type {code}")
    if name in _CLASSES:
        return _CLASSES[name]
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of torch")
    return dtype
