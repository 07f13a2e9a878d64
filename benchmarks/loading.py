"""What building an engine takes of memory: peaks of resident bytes over the bytes of the weights.

    python -m benchmarks.loading            # some minutes; writes 1.7 GB to the temporary folder
    python -m benchmarks.loading --small    # shows that it runs

Each case loads a model in a process of its own, in the stages in which an engine is built: the
model is opened, its weights are placed and filled, and products are tuned, which packs weights. It
comes from a Hugging Face directory of one file or of four, from random numbers, or from a CausalLM
that has its values already, whose memory counts as well. ROLLOUT_TUNE names the products. Resident
bytes are those of the whole process, pages of checkpoint files included, less those that it had
before, with torch imported and the CPU kernels loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.models import QWEN_05B
from rollout import InferenceConfig
from rollout.backends.select import create_backend
from rollout.models import CausalLM, ModelSpec, save_hf_directory
from rollout.models.loading import open_model
from rollout.runner.weights import ServedWeights

# A Qwen2.5 0.5B with fewer layers and a smaller vocabulary: 0.8 GB in float32, of which 28% are the
# table of embeddings, which is also the head.
LARGE = replace(QWEN_05B, vocab_size=65_536, num_layers=10)
SMALL = replace(LARGE, vocab_size=8192, num_layers=2, intermediate_size=2048)  # 88 MB
TINY = replace(LARGE, vocab_size=256, hidden_size=64, num_layers=1, intermediate_size=64)
SOURCES = ("one file", "four files", "random", "CausalLM")
TUNES = ("plain", "native", "1")
STAGES = ("open", "fill", "tune")


def write_directories(spec: ModelSpec, folder: Path) -> None:
    """Write one model twice, in one file and in four, to folders named after these sources."""
    model = CausalLM.random(spec)
    save_hf_directory(model, folder / "one file")
    save_hf_directory(model, folder / "four files")
    single = folder / "four files" / "model.safetensors"
    single.unlink()
    views = model.read_weights()
    del views["lm_head.weight"]
    names = sorted(views)
    weight_map: dict[str, str] = {}
    for index in range(4):
        file_name = f"model-{index + 1:05}-of-00004.safetensors"
        shard = names[index * len(names) // 4 : (index + 1) * len(names) // 4]
        save_file({name: views[name] for name in shard}, single.with_name(file_name))
        weight_map |= dict.fromkeys(shard, file_name)
    index_file = single.with_name("model.safetensors.index.json")
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measure(source: Callable[[], Any]) -> dict[str, float]:
    """Load what `source` returns, in this process.

    Returns bytes over the bytes of the weights: the peak of each stage by the stage's name, what is
    resident at the end ("built"), and what packed copies take of that ("packed").
    """
    backend = create_backend(InferenceConfig(num_threads=1))
    CausalLM.random(TINY).prepare(backend)  # what is loaded and compiled at first use
    peaks, before = {}, _status_bytes("VmRSS")

    def stage(name: str, work: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, see proc(5)
        result = work()
        peaks[name] = _status_bytes("VmHWM") - before
        return result

    model, fill = stage("open", lambda: open_model(source()))
    weights = stage(
        "fill",
        lambda: ServedWeights(model, backend, version=0, reject_non_finite=True, fill=fill),
    )
    stage("tune", lambda: model.prepare(backend))
    handles = [layer.handle for layer in model.linear_layers().values()]
    packed = sum(h.weight_NK.nbytes for h in handles if h.packed is not None and not h.is_repacked)
    results = peaks | {"built": _status_bytes("VmRSS") - before, "packed": packed}
    return {name: num_bytes / weights.num_bytes for name, num_bytes in results.items()}


def measure_elsewhere(source: str, tune: str, folder: Path, *, is_small: bool) -> dict[str, float]:
    """As `measure`, in a new process that has compiled kernels but no choices of products yet."""
    command = [sys.executable, "-m", "benchmarks.loading", "--source", source]
    command += ["--folder", str(folder), *["--small"] * is_small]
    cache = folder / "cache"
    shutil.rmtree(cache / "rollout" / "products", ignore_errors=True)
    environment = os.environ | {"ROLLOUT_TUNE": tune, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, float] = json.loads(done.stdout)
    return results


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def _source(name: str, spec: ModelSpec, folder: Path) -> Any:
    if name == "CausalLM":
        return CausalLM.random(spec)
    return spec if name == "random" else folder / name


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a model of 88 MB")
    parser.add_argument("--source", choices=SOURCES, help="measure this one here, print JSON")
    parser.add_argument("--folder", type=Path, help="where the directories of models are")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """Measure every case and print a table. Returns the results by source and product."""
    arguments = _parse_arguments(argv)
    spec = SMALL if arguments.small else LARGE
    if arguments.source:
        torch.set_num_threads(1)
        print(json.dumps(measure(lambda: _source(arguments.source, spec, arguments.folder))))
        return {}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_directories(spec, Path(folder))
        cases = [(source, tune) for source in SOURCES for tune in TUNES]
        for source, tune in track(cases, "loading"):
            results[source, tune] = measure_elsewhere(
                source, tune, Path(folder), is_small=arguments.small
            )
    columns = (*(f"peak: {stage}" for stage in STAGES), "built", "packed")
    table = Table("source", "ROLLOUT_TUNE", *columns, title="resident bytes over the weights'")
    for (source, tune), result in results.items():
        table.add_row(source, tune, *(f"{value:.2f}" for value in result.values()))
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
