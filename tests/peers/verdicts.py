"""Verdicts of the tables of cases, and their comparison with a run's outcomes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Verdict(Enum):
    """The state of one case of a peer's suite against our server."""

    PASSED = "passed"
    DIFFERS = "differs on purpose"
    NOT_APPLICABLE = "not applicable"
    OURS = "ours wrong"
    UNLISTED = "unlisted"
    STALE = "passes, though listed"


FAULTS = (Verdict.UNLISTED, Verdict.STALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The known verdict of cases or files.

    pattern: of ids, below the suite's folder of tests. `*` stands for any text.
    verdict: DIFFERS and OURS are run, and must fail; NOT_APPLICABLE are not run.
    reason: a sentence. page: the page of ours that says so; for DIFFERS only.
    """

    pattern: str
    verdict: Verdict
    reason: str
    page: str | None = None

    def matches(self, name: str) -> bool:
        return re.fullmatch(expression_of(self.pattern), name) is not None


def differs(page: str, reason: str, *patterns: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(pattern=each, verdict=Verdict.DIFFERS, reason=reason, page=page) for each in patterns
    )


def not_applicable(reason: str, *patterns: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(pattern=each, verdict=Verdict.NOT_APPLICABLE, reason=reason) for each in patterns
    )


def ours(reason: str, *patterns: str) -> tuple[Rule, ...]:
    return tuple(Rule(pattern=each, verdict=Verdict.OURS, reason=reason) for each in patterns)


def expression_of(pattern: str) -> str:
    """The regular expression of a pattern."""
    return ".*".join(map(re.escape, pattern.split("*")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a case in pytest: "passed", "failed" or "skipped"; "unrun" if a rule kept it
    from running."""

    case: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    case: str
    verdict: Verdict
    reason: str


@dataclass(slots=True, kw_only=True)
class Judged:
    """The cases of a suite with their verdicts.

    unmatched: patterns that matched no case or file. unrun: how many test functions are in files
    that do not run, by reason.
    """

    cases: list[Judgement] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    unrun: dict[str, int] = field(default_factory=dict)

    @property
    def is_as_listed(self) -> bool:
        return not self.unmatched and not any(case.verdict in FAULTS for case in self.cases)


def judge(outcomes: Iterable[Outcome], rules: Sequence[Rule]) -> Judged:
    """Compare outcomes with the rules. The first rule that matches a case is its rule.

    A case that neither passed nor was listed is UNLISTED; one that is listed as failing and passed
    is STALE. A case that was skipped where it ran is not applicable, for the reason it gave.
    """
    judged, used = Judged(), set[str]()
    for case in _one_of_each(outcomes):
        rule = next((rule for rule in rules if rule.matches(case.case)), None)
        if rule is not None:
            used.add(rule.pattern)
        judged.cases.append(_judge_one(case, rule))
    judged.unmatched = [rule.pattern for rule in rules if rule.pattern not in used]
    return judged


def _one_of_each(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return one outcome of each case: of the phase that failed, if a phase failed."""
    cases: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.case not in cases or outcome.outcome == "failed":
            cases[outcome.case] = outcome
    return list(cases.values())


def _judge_one(case: Outcome, rule: Rule | None) -> Judgement:
    verdict, reason = Verdict.UNLISTED, case.reason
    if case.outcome == "skipped":
        verdict = Verdict.NOT_APPLICABLE if rule is None else Verdict.UNLISTED
    elif case.outcome == "passed":
        verdict = Verdict.PASSED if rule is None else Verdict.STALE
    elif rule is not None and (case.outcome == "unrun") == (rule.verdict is Verdict.NOT_APPLICABLE):
        verdict, reason = rule.verdict, rule.reason
        if rule.page is not None:
            reason = f"{reason} ({rule.page})"
    return Judgement(case=case.case, verdict=verdict, reason=reason)


def counts_by_file(cases: Iterable[Judgement]) -> Mapping[str, Counter[Verdict]]:
    """Count the cases of each verdict, by file in the order of names."""
    counts: dict[str, Counter[Verdict]] = {}
    for case in cases:
        counts.setdefault(case.case.partition("::")[0], Counter())[case.verdict] += 1
    return dict(sorted(counts.items()))


def judge_unrun_files(
    tests: Path, pattern: str, run_files: Sequence[str], rules: Sequence[Rule], judged: Judged
) -> None:
    """Add the files of tests, of names as `pattern`, that do not run to `judged`, by their rules.

    A file that neither runs nor has a rule is UNLISTED. Cases are counted as test functions.
    """
    used = set[str]()
    for path in sorted(tests.rglob(pattern)):
        name = path.relative_to(tests).as_posix()
        if name in run_files:
            continue
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is None:
            judged.cases.append(
                Judgement(case=name, verdict=Verdict.UNLISTED, reason="neither runs nor is listed")
            )
            continue
        used.add(rule.pattern)
        number = judged.unrun.get(rule.reason, 0) + _num_tests(path.read_text(encoding="utf-8"))
        judged.unrun[rule.reason] = number
    judged.unmatched += [rule.pattern for rule in rules if rule.pattern not in used]
    missing = [name for name in run_files if not (tests / name).exists()]
    judged.unmatched += missing


def _num_tests(source: str) -> int:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(
        isinstance(node, functions) and node.name.startswith("test")
        for node in ast.walk(ast.parse(source))
    )
