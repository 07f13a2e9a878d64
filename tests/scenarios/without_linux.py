"""Imports everything and runs an engine without the calls that only Linux has, as on macOS.

Prints one JSON object of results.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import mmap
import os
import pkgutil
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

# While the names are there: they are taken from us, not from others.
import zmq  # noqa: F401
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401

ABSENT = {
    mmap: "MADV_DONTDUMP MADV_DODUMP MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE MAP_POPULATE "
    "MAP_DENYWRITE MAP_EXECUTABLE MAP_STACK",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE",
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING sched_getaffinity sched_setaffinity eventfd "
    "pidfd_open posix_fadvise posix_fallocate O_TMPFILE O_PATH copy_file_range splice getrandom "
    "setns unshare",
    select: "epoll",
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGSTKFLT",
    socket: "SO_PEERCRED AF_NETLINK AF_PACKET SOCK_CLOEXEC SOCK_NONBLOCK",
}


def hide_what_only_linux_has() -> None:
    for module, names in ABSENT.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.modules["triton"] = None  # type: ignore[assignment]  # not to be had elsewhere
    read_text = Path.read_text

    def without_proc(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(2, "no such file", str(self))
        return read_text(self, *args, **kwargs)

    Path.read_text = without_proc  # type: ignore[method-assign]


def failed_imports() -> dict[str, str]:
    """Return the import error of each module of both packages that has one."""
    failed = {}
    for package in ("rollout", "trainer_hooks"):
        folders = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folders, f"{package}."):
            try:
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
            except Exception as error:
                failed[module.name] = f"{type(error).__name__}: {error}"
    return failed


def generated_across_an_offload() -> int:
    """Return the tokens of a request that was suspended in generation."""
    from rollout import LLM, InferenceConfig, SamplingParams

    config = InferenceConfig(max_sequence_length=64, kv_cache_management_mode="offload")
    with LLM(random_model(), inference_config=config) as llm:
        llm.submit([[1, 2, 3]], SamplingParams(num_tokens_to_generate=8))
        llm.engine.step()
        llm.pause()
        llm.suspend()
        llm.resume()
        llm.unpause()
        (group,) = llm.collect()
        return len(group.requests[0].generated_tokens)


def random_model() -> Any:
    from rollout.models import ModelSpec

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    rest = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "model_type": "llama"}
    return ModelSpec.from_hf_config(sizes | heads | rest)


def error_of_reserved_memory() -> str:
    from rollout import LLM, InferenceConfig

    config = InferenceConfig(kv_cache_management_mode="offload", static_kv_memory_pointers=True)
    try:
        LLM(random_model(), inference_config=config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def error_of_publishing() -> str:
    from rollout.weights.transports.shared import SharedTransport

    try:
        SharedTransport().publish({"w": torch.ones(1)})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    asyncio.new_event_loop().close()
    hide_what_only_linux_has()
    outcomes = {
        "failed imports": failed_imports(),
        "generated": generated_across_an_offload(),
        "reserved": error_of_reserved_memory(),
        "publish": error_of_publishing(),
    }
    print(json.dumps(outcomes))
