"""The measurements on a GPU as a Markdown page: a table per kind of part, then what became of each
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
Column = tuple[str, Callable[[Figures], str]]


def _number(name: str, scale: float, form: str) -> Callable[[Figures], str]:
    """The figure of that name times `scale`; a dash where there is none."""
    return lambda f: "-" if f[name] is None else format(f[name] * scale, form)


def _text(name: str) -> Callable[[Figures], str]:
    return lambda f: "-" if f[name] is None else str(f[name])


def _both(first: Callable[[Figures], str], second: Callable[[Figures], str]) -> Any:
    return lambda f: f"{first(f)} / {second(f)}"


US, MS, GB, TERA = 1e6, 1e3, 1e-9, 1e-12

TITLES = {
    "floors": "Floors, measured in this run",
    "decode": "Decode, beside reading weights and KV once",
    "prefill": "Prefill, beside the matrix units",
    "turn": "Attention of short prompts behind long contexts, one layer, beside the longer floor",
    "suspend": "Suspend and resume, beside the bare pinned copy",
    "update": "Weight updates, beside a copy on the device",
    "generation": "Generation, beside transformers with the same weights and beside the floor",
    "host": "Wall and CPU time of a step that leaves the device next to idle",
}
COLUMNS: dict[str, list[Column]] = {
    "floors": [
        ("memory, GB/s", _number("memory_bytes_per_s", GB, ".0f")),
        ("read, GB/s", _number("device_read_bytes_per_s", GB, ".0f")),
        ("copy on the device, GB/s", _number("device_copy_bytes_per_s", GB, ".0f")),
        ("to device, GB/s", _number("to_device_bytes_per_s", GB, ".1f")),
        ("to host, GB/s", _number("to_host_bytes_per_s", GB, ".1f")),
        ("matrix product, TFLOP/s", _number("matmul_flops_per_s", TERA, ".0f")),
    ],
    "decode": [
        ("context", _number("mean_context", 1, ".0f")),
        ("tokens/s", _number("tokens_per_s", 1, ".0f")),
        ("step, ms", _number("step_s", MS, ".3f")),
        ("floor, ms", _number("floor_s", MS, ".3f")),
        ("share of floor", _number("share_of_floor", 1, ".2f")),
        ("CPU, ms", _number("cpu_s_per_step", MS, ".3f")),
        ("graphs captured meanwhile", _text("num_graph_captures")),
    ],
    "prefill": [
        ("tokens", lambda f: str(f["num_prompts"] * f["prompt_len"])),
        ("tokens/s", _number("tokens_per_s", 1, ".0f")),
        ("TFLOP/s", _number("flops_per_s", TERA, ".0f")),
        ("share of floor", _number("share_of_floor", 1, ".2f")),
    ],
    "turn": [
        ("attention, us", _number("attention_s", US, ".0f")),
        ("reading KV once, us", _number("memory_floor_s", US, ".0f")),
        ("products, us", _number("products_floor_s", US, ".0f")),
        ("share of floor", _number("share_of_floor", 1, ".2f")),
    ],
    "suspend": [
        ("on host, GB", _number("bytes_on_host", GB, ".2f")),
        (
            "suspend, ms / share of floor",
            _both(_number("suspend_s", MS, ".1f"), _number("suspend_share_of_floor", 1, ".2f")),
        ),
        (
            "resume, ms / share of floor",
            _both(_number("resume_s", MS, ".1f"), _number("resume_share_of_floor", 1, ".2f")),
        ),
        ("next tokens, ms", _number("next_token_s", MS, ".1f")),
        (
            "released, GB: report / driver",
            _both(_number("bytes_released", GB, ".2f"), _number("driver_bytes_back", GB, ".2f")),
        ),
        ("graphs captured after", _text("num_graph_captures")),
        ("same addresses", _text("has_same_addresses")),
    ],
    "update": [
        ("GB", _number("num_bytes", GB, ".2f")),
        ("stage, ms", _number("stage_s", MS, ".1f")),
        ("commit, ms", _number("commit_s", MS, ".1f")),
        ("copy, ms", _number("floor_s", MS, ".1f")),
        ("GB/s", _number("bytes_per_s", GB, ".1f")),
        ("commit alone, GB/s", _number("commit_bytes_per_s", GB, ".0f")),
        ("copy, GB/s", _number("floor_bytes_per_s", GB, ".0f")),
        ("share of floor", _number("share_of_floor", 1, ".2f")),
        ("commit's share", _number("commit_share_of_floor", 1, ".2f")),
    ],
    "generation": [
        ("tokens/s", lambda f: _by_name(f["tokens_per_s"], ".0f")),
        ("ratio to the best peer", _number("ratio", 1, ".2f")),
        ("share of floor", _number("share_of_floor", 1, ".2f")),
        ("peers without figures", lambda f: "; ".join(f"{n}: {e}" for n, e in f["errors"].items())),
    ],
    "host": [
        ("wall, ms", _number("wall_s_per_step", MS, ".3f")),
        ("CPU, ms", _number("cpu_s_per_step", MS, ".3f")),
        ("graphs captured meanwhile", _text("num_graph_captures")),
    ],
}


def as_markdown(results: Mapping[str, Any]) -> str:
    """A page of the results as they are in the JSON file."""
    machine = results["machine"]
    lines = [
        f"# On a device, {results['date']}",
        "",
        f"{machine['device']}, torch {machine['torch']}, CUDA {machine['cuda']}, Triton "
        f"{machine['triton']}, Python {machine['python']}. Random weights, bfloat16 on a GPU. A "
        "share of floor is the time that physics asks for over the time that was taken.",
    ]
    for kind, title in TITLES.items():
        parts = [part for part in results["parts"] if part["kind"] == kind and part["figures"]]
        if parts:
            lines += ["", f"## {title}", "", *_table(kind, parts)]
    lines += ["", "## All parts", "", "| part | outcome | seconds | why |", "|---|---|---:|---|"]
    lines += [
        _row([p["name"], p["status"], f"{p['seconds']:.1f}", p["error"] or ""])
        for p in results["parts"]
    ]
    return "\n".join(lines) + "\n"


def _table(kind: str, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = COLUMNS[kind]
    head = [_row(["part", *(title for title, _ in columns)]), "|---|" + "---:|" * len(columns)]
    return head + [
        _row([part["name"], *(show(part["figures"]) for _, show in columns)]) for part in parts
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\n", " ").replace("|", "/") for cell in cells) + " |"


def _by_name(figures: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {format(value, form)}" for name, value in figures.items())
