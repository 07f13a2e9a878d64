"""Writes a distribution named vllm: what TRL imports of it to send weights, over gloo.

TRL asks whether vllm is installed, and takes the trainer's side of the transfer from it. This one
makes the same rendezvous and the same packed chunks without a GPU.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

VERSION = "0.30.0"
_NETWORK_UTILS = """
import socket

def get_ip():
    return "127.0.0.1"

def get_open_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
"""
_NCCL_COMMON = """
from datetime import timedelta
from types import SimpleNamespace

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

GROUP = "weight_transfer"

def trainer_init(init_info):
    timeout = timedelta(seconds=120)
    size = init_info["world_size"]
    address, port = init_info["master_address"], init_info["master_port"]
    store = TCPStore(address, port, size, is_master=True, wait_for_workers=False, timeout=timeout)
    places = PrefixStore("cpu/", PrefixStore(GROUP + "/", PrefixStore(GROUP, store)))
    gloo = ProcessGroupGloo(places, 0, size, timeout)
    return SimpleNamespace(gloo=gloo, group=SimpleNamespace(store=store, socket=None))
"""
_PACKED_TENSOR = """
import torch
from torch.distributed import BroadcastOptions

BUFFER_BYTES = 2**30

def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func):
    options, held = BroadcastOptions(), []
    options.rootRank = src

    def send():
        group.gloo.broadcast([torch.cat(held)], options).wait()
        held.clear()

    for item in iterator:
        held.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(map(len, held)) > BUFFER_BYTES:
            send()
    if held:
        send()
"""
_FILES = {
    # TRL imports these names beside its client, and uses them without a server only.
    "vllm/__init__.py": (
        f'__version__ = "{VERSION}"\nclass LLM: ...\nclass RequestOutput: ...\n'
        "class SamplingParams: ...\n"
    ),
    "vllm/sampling_params.py": "class StructuredOutputsParams: ...\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": _NETWORK_UTILS,
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_common.py": _NCCL_COMMON,
    "vllm/distributed/weight_transfer/packed_tensor.py": _PACKED_TENSOR,
    f"vllm-{VERSION}.dist-info/METADATA": (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"
    ),
}


def stub_directory() -> str:
    """Write it; the directory, which goes at exit, belongs on the path of modules."""
    directory = tempfile.mkdtemp(prefix="rollout-stub-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name, content in _FILES.items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return directory
