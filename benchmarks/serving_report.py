"""The page of benchmarks/serving.py."""

from __future__ import annotations

from typing import Any

# What was aimed at.
MIN_OF_GENERATE = 0.85
MAX_FIRST_TOKEN_ABOVE_MS = 5.0


def as_markdown(results: dict[str, Any]) -> str:
    """A page: the machine, a table, and what was aimed at."""
    machine, work, (low, high) = results["machine"], results["work"], results["load_averages"]
    lines = [
        f"# Serving, {results['date']}",
        "",
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['instruction_set']}, one "
        f"computing thread, Python {machine['python']}. Model {results['model']}, float32. "
        f"{work['num_prompts']} prompts of {work['prompt_tokens']} tokens, {work['num_tokens']} "
        f"generated tokens each, {work['concurrency']} at once: as one batch of `LLM.generate`, "
        "and as streams of a server in other processes. Medians of "
        f"{len(results['rounds'])} rounds, in which all ways take turns; ratios and differences "
        "are taken within a round. CPU seconds are those of all processes of a server; *with the "
        "client*: and of the one that asks. First tokens: one request at a time, through a server "
        "as its client sees them, in `LLM.generate` as the engine counts them.",
        "",
        f"Load averages of the machine meanwhile, with this benchmark's own share: {low:.1f} to "
        f"{high:.1f}.",
        "",
        "| way | tokens/CPU s | of `LLM.generate` | with the client | tokens/s "
        "| first token, ms | above `LLM.generate`, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for way, row in results["medians"].items():
        with_client = row.get("tokens_per_cpu_s_with_client_of_generate")
        cells = [
            way,
            f"{row['tokens_per_cpu_s']:,.0f}",
            f"**{row['tokens_per_cpu_s_of_generate']:.2f}**",
            "" if with_client is None else f"{with_client:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['first_token_ms']:.1f}",
            f"{row['first_token_ms_above_generate']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_shares(results), "", "## What was aimed at", "", *_aims(results)]
    return "\n".join(lines) + "\n"


def _shares(results: dict[str, Any]) -> list[str]:
    lines = []
    for way, row in results["medians"].items():
        prefix = "cpu_share_of_"
        shares = [
            f"{name.removeprefix(prefix)} {value:.0%}"
            for name, value in row.items()
            if name.startswith(prefix)
        ]
        if shares:
            lines.append(f"CPU time of {way}: {', '.join(shares)}.")
    if results["missing"]:
        lines.append(f"vLLM took no part: {results['missing']}.")
    return lines


def _aims(results: dict[str, Any]) -> list[str]:
    row = results["medians"]["rollout serve"]
    ratio, above = row["tokens_per_cpu_s_of_generate"], row["first_token_ms_above_generate"]
    return [
        f"- Tokens per CPU second of all processes at least {MIN_OF_GENERATE} of `LLM.generate`: "
        f"**{ratio:.2f}**.",
        f"- First token at most {MAX_FIRST_TOKEN_ABOVE_MS:g} ms later than the engine's own: "
        f"**{above:.1f} ms**.",
    ]
