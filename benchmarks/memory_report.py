"""The figures of suspend_resume as a Markdown page and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.update_gaps import gaps_as_markdown

_HEAD = (
    "| mode | kind | live | moved, MiB | suspend, ms (CPU) | over floor | resume, ms (CPU) "
    "| over floor | suspend over its memcpy alone |"
)


def as_markdown(results: dict[str, Any]) -> str:
    """A page: one table of cycles, then the single figures."""
    machine, persist, update = results["machine"], results["persist"], results["update"]
    growth = results["persist_growth"]
    recompute = results["recompute"]
    lines = [
        f"# Suspend, resume and updates, {results['date']}",
        "",
        f"{machine['cpu']}, one thread, torch {machine['torch']}; a pool of {results['pool_mib']} "
        f"MiB, median of {results['repeats']} interleaved rounds. The floor of a suspend is a "
        "memcpy of the same bytes into pages that are there and a bare madvise over the pool, of a "
        "resume a memcpy into pages just released.",
        "",
        _HEAD,
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["cycles"]:
        cells = [
            row["mode"],
            row["memory_kind"],
            f"{row['live_fraction']:.0%}",
            f"{row['bytes_moved'] / 2**20:.1f}",
            f"{row['suspend_seconds'] * 1e3:.2f} ({row['suspend_cpu_seconds'] * 1e3:.2f})",
            f"{row['suspend_over_floor']:.2f}" if "suspend_over_floor" in row else "",
            f"{row['resume_seconds'] * 1e3:.2f} ({row['resume_cpu_seconds'] * 1e3:.2f})",
            f"{row['resume_over_floor']:.2f}" if "resume_over_floor" in row else "",
            f"{row['suspend_over_memcpy']:.2f}" if "suspend_over_memcpy" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"PERSIST, suspend plus resume: {persist['cpu_seconds'] * 1e3:.3f} ms of CPU time "
        f"(median of {persist['repeats']}). Over {growth['repeats']} cycles that each serve the "
        f"same small load, resident memory goes from {growth['first_mib']:.0f} to "
        f"{growth['last_mib']:.0f} MiB: {100 * growth['growth']:+.1f}%.",
        "",
        f"RECOMPUTE, from resume to the next token of requests with {recompute['num_tokens']} "
        f"tokens in all: {recompute['cpu_seconds'] * 1e3:.0f} ms of CPU time; prefill of as many "
        f"new tokens {recompute['prefill_cpu_seconds'] * 1e3:.0f} ms, ratio "
        f"{recompute['over_floor']:.2f} (median of {recompute['repeats']}).",
        "",
        f"In-flight update of {update['num_bytes'] / 2**20:.0f} MiB: stall "
        f"{update['stall_seconds'] * 1e3:.1f} ms, one copy of the weights "
        f"{update['floor_seconds'] * 1e3:.1f} ms, ratio {update['over_floor']:.2f}; staging and "
        f"stall together {update['seconds'] * 1e3:.0f} ms.",
        "",
        *gaps_as_markdown(results["update_gaps"]),
    ]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """CPU time against live bytes, with the floors of OFFLOAD."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, name in zip(axes, ("suspend", "resume"), strict=True):
        for mode in ("persist", "offload", "recompute"):
            shown = (mode, "reserved")
            rows = [r for r in results["cycles"] if (r["mode"], r["memory_kind"]) == shown]
            live = [100 * row["live_fraction"] for row in rows]
            axis.plot(live, [1e3 * r[f"{name}_cpu_seconds"] for r in rows], "o-", label=mode)
            if mode == "offload":
                floors = [1e3 * row[f"{name}_floor_cpu_seconds"] for row in rows]
                axis.plot(live, floors, "k--", label="floor of offload")
        axis.set(title=name, xlabel="live part of the pool, %", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU time, ms")
    axes[0].legend()
    figure.suptitle(f"Pool of {results['pool_mib']} MiB, memory_kind reserved, one thread")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
