"""A small Ray cluster on loopback, and submitit without Slurm, where these are installed."""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import shutil
import tempfile
from functools import cache
from typing import Any

from rollout.launch.ray import RayLauncher
from rollout.launch.slurm import SlurmLauncher


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def has_submitit() -> bool:
    return importlib.util.find_spec("submitit") is not None


def slurm_launcher() -> SlurmLauncher:
    """Its jobs are processes of this machine."""
    folder = tempfile.mkdtemp(prefix="rollout-slurm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SlurmLauncher(folder=folder, cluster="local", host="127.0.0.1", timeout_min=60)


@cache
def cluster_options() -> dict[str, Any]:
    """Arguments of ray.init for a cluster with two CPUs and its files in a directory of its own."""
    # Else Ray writes a token to the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    directory = tempfile.mkdtemp(prefix="rollout-ray-")
    atexit.register(_leave_nothing, directory)
    return {
        "num_cpus": 2,
        "object_store_memory": 80 * 2**20,
        "include_dashboard": False,
        "_temp_dir": directory,
        # Ray looks for another address than 127.0.0.1.
        "_node_ip_address": "127.0.0.2",
    }


def ray_launcher(**options: Any) -> RayLauncher:
    """One for the cluster of this process, which is started when the first is made."""
    import ray

    if not ray.is_initialized():
        ray.init(**cluster_options())
    return RayLauncher(**options)


def _leave_nothing(directory: str) -> None:
    import ray

    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
