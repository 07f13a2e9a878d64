"""Formats a diagnosis for a terminal.

Used by `trainer_hooks.doctor.command` and by users. The functions print nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.extras import extra_needed
from trainer_hooks.doctor.diagnosis import Diagnosis

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLES = {"sound": "bold green", "fault": "bold red", "inconclusive": "bold yellow"}
_NUM_TOKENS, _NUM_EXPLANATIONS = 8, 6


def report(diagnosis: Diagnosis) -> RenderableType:
    """Return the verdict, each finding with its remedy, and tables, for printing by rich.

    Tables show the squared gap's shares by cause, the best hypotheses, gaps by version lag and
    by place in rollouts, and the largest token gaps. Raises ConfigError if the package rich is not
    installed.
    """
    with extra_needed("train", "the doctor's report"):
        from rich.console import Group
        from rich.text import Text
    known = f"{diagnosis.num_known_tokens} of {diagnosis.num_tokens} tokens examined"
    head = Text(diagnosis.verdict, style=_STYLES[diagnosis.verdict])
    head.append(
        f"  {known}; gap to the trainer's weights {diagnosis.gap_rms:.2e} nats, to the stamped "
        f"ones {diagnosis.unexplained_rms:.2e}; rounding explains {diagnosis.tolerance.rms:.1e}",
        style="not bold default",
    )
    parts: list[RenderableType] = [head]
    for finding in diagnosis.findings:
        share = "" if finding.share is None else f" explains {finding.share:.1%} of the gap"
        parts.append(Text(f"{finding.name}", style="bold").append(f" ({finding.side}){share}"))
        parts.append(Text(f"  {finding.evidence}"))
        parts.append(Text(f"  remedy: {finding.remedy}", style="green"))
    parts += [Text(f"  note: {note}") for note in diagnosis.notes]
    if diagnosis.verdict == "inconclusive":
        parts.append(Text("  no token's own weights are known; pass older weights (older_models)"))
    if diagnosis.attributions:
        parts.append(_shares(diagnosis.attributions))
    if diagnosis.explanations:
        parts.append(_explanations(diagnosis))
    parts.append(_table("by lag, in versions", diagnosis.lag_table))
    parts.append(_table("by place", diagnosis.place_table))
    parts.append(_table("tokens with the largest gap", diagnosis.token_table[:_NUM_TOKENS]))
    return Group(*parts)


def _shares(shares: Mapping[str, float]) -> Table:
    table = _new_table("causes of the gap", "cause", "share of the squared gap")
    for name, share in shares.items():
        table.add_row(name, f"{share:.1%}")
    return table


def _explanations(diagnosis: Diagnosis) -> Table:
    table = _new_table("hypotheses", "hypothesis", "side", "explains", "leaves, nats")
    for tried in diagnosis.explanations[:_NUM_EXPLANATIONS]:
        share = f"{tried.share:.1%}" if tried.share > -1.0 else "nothing"
        table.add_row(tried.name, tried.side, share, f"{tried.residual_rms:.2e}")
    return table


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _new_table(title)
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _new_table(title: str, *columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, title=title)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
