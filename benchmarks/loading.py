"""Memory to build an engine: peak resident bytes, relative to the bytes of its weights.

    python -m benchmarks.loading                  # 44M parameters; some minutes
    python -m benchmarks.loading --model large    # 0.8 GB, twice in the temporary folder
    python -m benchmarks.loading --model small    # shows that it runs

A program, run by hand. Each case loads a model in a child process, in three stages: the model is
opened, its weights are filled, and matrix products are chosen, which may pack weights. The model is
a Hugging Face directory of one file or of four, random numbers, or a CausalLM in memory. Resident
bytes include mapped checkpoint files, but not what the process had before the load.

The program prints a Markdown page, and writes it and a JSON file to benchmarks/results.
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
from safetensors.torch import save_file

from benchmarks.machine import reset_peak, status_bytes
from benchmarks.models import M45, QWEN_05B
from benchmarks.pages import dated, publish, results_parser
from rollout import InferenceConfig
from rollout.backends.cpu.library import load_library
from rollout.backends.select import create_backend
from rollout.models import CausalLM, ModelSpec, save_hf_directory
from rollout.models.checkpoints.loading import open_model
from rollout.weights.served import ServedWeights

# A Qwen2.5 0.5B with fewer layers and a smaller vocabulary: 0.8 GB in float32, of which 28% are the
# table of embeddings, which is also the head.
LARGE = replace(QWEN_05B, vocab_size=65_536, num_layers=10)
SMALL = replace(LARGE, vocab_size=8192, num_layers=2, intermediate_size=2048)  # 88 MB
TINY = replace(LARGE, vocab_size=256, hidden_size=64, num_layers=1, intermediate_size=64)
MODELS = {"m45": M45, "large": LARGE, "small": SMALL}
SOURCES = ("one file", "four files", "random", "CausalLM")
UNSET = "unset"  # without ROLLOUT_TUNE: products are chosen by the rule
PRODUCTS = ("plain", "native", "onednn", "mkl")
CASES = [(source, UNSET) for source in reversed(SOURCES)]
CASES += [(SOURCES[0], switch) for switch in PRODUCTS]
STAGES = ("open", "fill", "products")


def write_directories(spec: ModelSpec, folder: Path) -> None:
    """Write one model to the folders "one file" and "four files", as one and four weight files."""
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
    """Load the model that `source` returns, in this process.

    Returns resident bytes over the bytes of the weights, by name. The names are STAGES (the stage's
    peak), "built" (at the end) and "packed" (packed copies at the end).
    """
    backend = create_backend(InferenceConfig(num_threads=1))
    CausalLM.random(TINY).prepare(backend)  # loads and compiles what the first use needs
    peaks, before = {}, status_bytes("VmRSS")

    def stage(name: str, work: Callable[[], Any]) -> Any:
        reset_peak()
        result = work()
        peaks[name] = status_bytes("VmHWM") - before
        return result

    model, fill = stage("open", lambda: open_model(source()))
    weights = stage(
        "fill",
        lambda: ServedWeights(model, backend, version=0, reject_non_finite=True, fill=fill),
    )
    stage("products", lambda: model.prepare(backend))
    handles = [layer.handle for layer in model.linear_layers().values()]
    packed = sum(h.weight_NK.nbytes for h in handles if h.packed is not None and not h.is_repacked)
    results = peaks | {"built": status_bytes("VmRSS") - before, "packed": packed}
    return {name: num_bytes / weights.num_bytes for name, num_bytes in results.items()}


def measure_elsewhere(source: str, switch: str, folder: Path, model: str) -> dict[str, float]:
    """Run `measure` in a child process, and return its result.

    ROLLOUT_TUNE is set to `switch`, or removed if `switch` is UNSET. `folder` has the model
    directories. This process's compiled kernels are copied there, for the child.
    """
    command = [sys.executable, "-m", "benchmarks.loading", "--source", source]
    command += ["--folder", str(folder), "--model", model]
    cache = folder / "cache"
    _copy_kernels(cache)
    environment = os.environ | {"ROLLOUT_TUNE": switch, "XDG_CACHE_HOME": str(cache)}
    # malloc maps large pieces one by one, so that holes in the C heap are not measured.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    if switch == UNSET:
        del environment["ROLLOUT_TUNE"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, float] = json.loads(done.stdout)
    return results


def _copy_kernels(cache: Path) -> None:
    library, folder = load_library(), cache / "rollout" / "native"
    if library is not None and not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
        shutil.copy(library._name, folder)


def _source(name: str, spec: ModelSpec, folder: Path) -> Any:
    """Return the source `name` of SOURCES, in a form that an engine accepts."""
    if name == "CausalLM":
        return CausalLM.random(spec)
    return spec if name == "random" else folder / name


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row for each case."""
    machine, names = results["machine"], (*STAGES, "built", "packed")
    lines = [
        f"# Memory while loading, {results['date']}",
        "",
        f"{machine['cpu']} ({machine['instruction_set']}), torch {machine['torch']}; model "
        f"{results['model']}, {results['weights_mib']:.0f} MiB of weights in float32. Resident "
        "bytes over those of the weights: the peak of each stage, what is left in the end, and "
        "what packed copies take of that. oneDNN and MKL, where forced, keep a packed copy beside "
        "the weights. The parameters of a CausalLM move one by one.",
        "",
        "| source | ROLLOUT_TUNE | peak: open | peak: fill | peak: products | built | packed |",
        "|---|---|" + "---:|" * len(names),
    ]
    for case in results["cases"]:
        figures = " | ".join(f"{case[name]:.2f}" for name in names)
        lines.append(f"| {case['source']} | {case['switch']} | {figures} |")
    return "\n".join(lines) + "\n"


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = results_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="m45")
    parser.add_argument("--source", choices=SOURCES, help="measure only it, in this process")
    parser.add_argument("--folder", type=Path, help="folder of the models' directories")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every case, print and write the results, and return them. Returns {} with
    --source."""
    arguments = _parse_arguments(argv)
    spec = MODELS[arguments.model]
    torch.set_num_threads(1)
    if arguments.source:
        print(json.dumps(measure(lambda: _source(arguments.source, spec, arguments.folder))))
        return {}
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_directories(spec, Path(folder))
        weights = (Path(folder) / "one file" / "model.safetensors").stat().st_size
        for source, switch in track(CASES, "loading"):
            figures = measure_elsewhere(source, switch, Path(folder), arguments.model)
            cases.append({"source": source, "switch": switch} | figures)
    results = {
        **dated(),
        "model": arguments.model,
        "weights_mib": weights / 2**20,
        "cases": cases,
    }
    console = Console(stderr=True)
    publish(results, as_markdown(results), f"loading-{arguments.model}", arguments.output, console)
    return results


if __name__ == "__main__":
    main()
