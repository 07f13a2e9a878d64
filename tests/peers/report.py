"""The table of cases as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.peers.verdicts import FAULTS, Judged, Verdict, counts_by_file

NEWLINE = "\n"
COLUMNS = ("passed", "differs", "n/a", "ours wrong", "unlisted", "stale")


def summary_lines(name: str, judged: Judged) -> Iterator[str]:
    """The counts by file, and of files that do not run by reason; then what is not as listed."""
    counts = counts_by_file(judged.cases)
    width = max([len(name) + 30, *map(len, counts)])
    yield f"{name:{width}} " + " ".join(f"{column:>10}" for column in COLUMNS)
    for file, of_file in counts.items():
        yield _row(file, width, of_file)
    for reason, number in judged.unrun.items():
        yield _row(f"({reason})", width, Counter({Verdict.NOT_APPLICABLE: number}))
    total = sum(counts.values(), Counter({Verdict.NOT_APPLICABLE: sum(judged.unrun.values())}))
    yield _row(f"{name}, {total.total()} cases", width, total)
    for case in judged.cases:
        if case.verdict in (*FAULTS, Verdict.OURS):
            yield f"{case.verdict.value}: {case.case}: {case.reason.partition(NEWLINE)[0]}"
    for pattern in judged.unmatched:
        yield f"listed, and no case matches: {pattern}"


def case_lines(name: str, judged: Judged) -> Iterator[str]:
    """One line a case."""
    for case in judged.cases:
        reason = " ".join(case.reason.split())
        yield f"{name}\t{case.verdict.value}\t{case.case}\t{reason}"


def _row(name: str, width: int, counts: Counter[Verdict]) -> str:
    return f"{name:{width}} " + " ".join(f"{counts[verdict]:10}" for verdict in Verdict)
