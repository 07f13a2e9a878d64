"""How outcomes of peers' tests are judged by the tables of known cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.doors.environments import ROOT
from tests.peers.suites import SUITES, Suite
from tests.peers.verdicts import (
    Judged,
    Judgement,
    Outcome,
    Rule,
    Verdict,
    differs,
    judge,
    judge_unrun_files,
    not_applicable,
    ours,
)

CASE = "test_a.py::test_it[x]"
DIFFERS = differs("docs/serving.md", "it differs", CASE)
OURS = ours("it is wrong", CASE)
NOT_APPLICABLE = not_applicable("it has no counterpart", CASE)


@pytest.mark.parametrize(
    ("outcome", "rules", "verdict", "is_as_listed"),
    [
        ("passed", (), Verdict.PASSED, True),
        ("failed", (), Verdict.UNLISTED, False),
        ("skipped", (), Verdict.NOT_APPLICABLE, True),
        ("failed", DIFFERS, Verdict.DIFFERS, True),
        ("passed", DIFFERS, Verdict.STALE, False),
        ("skipped", DIFFERS, Verdict.UNLISTED, False),
        ("failed", OURS, Verdict.OURS, True),
        ("passed", OURS, Verdict.STALE, False),
        ("unrun", NOT_APPLICABLE, Verdict.NOT_APPLICABLE, True),
    ],
)
def test_a_case_is_judged_by_its_outcome_and_its_rule(
    outcome: str, rules: tuple[Rule, ...], verdict: Verdict, is_as_listed: bool
) -> None:
    judged = judge([Outcome(case=CASE, outcome=outcome)], rules)
    assert [case.verdict for case in judged.cases] == [verdict]
    assert judged.is_as_listed is is_as_listed


def test_a_failed_phase_decides_over_a_call_that_passed() -> None:
    phases = [Outcome(case=CASE, outcome="passed"), Outcome(case=CASE, outcome="failed")]
    (case,) = judge(phases, ()).cases
    assert case.verdict is Verdict.UNLISTED


def test_a_rule_that_matches_no_case_is_a_fault() -> None:
    judged = judge([Outcome(case="test_a.py::test_other", outcome="passed")], DIFFERS)
    assert judged.unmatched == [CASE]
    assert not judged.is_as_listed


def test_the_first_rule_that_matches_is_the_rule_of_a_case() -> None:
    rules = (*OURS, *differs("docs/serving.md", "all differ", "test_a.py::*"))
    outcomes = [
        Outcome(case=CASE, outcome="failed"),
        Outcome(case="test_a.py::test_b", outcome="failed"),
    ]
    judged = judge(outcomes, rules)
    assert [case.verdict for case in judged.cases] == [Verdict.OURS, Verdict.DIFFERS]


def test_only_a_star_is_special_in_a_pattern() -> None:
    (rule,) = not_applicable("", "test_a.py::test_it[*.]")
    assert rule.matches("test_a.py::test_it[1.]")
    assert not rule.matches("test_a.py::test_it[12")


def test_functions_of_unrun_files_are_counted_by_the_reason_of_their_rule(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    source = "def test_a(): ...\nclass TestIt:\n    async def test_b(self): ...\ndef help(): ...\n"
    for name in ("test_run.py", "test_unlisted.py", "deep/test_unrun.py"):
        (tmp_path / name).write_text(source)
    judged = Judged()
    rules = (*not_applicable("deep", "deep/*"), *not_applicable("gone", "gone/*"))
    judge_unrun_files(tmp_path, "test_*.py", ["test_run.py", "test_missing.py"], rules, judged)
    assert judged.unrun == {"deep": 2}
    assert judged.unmatched == ["gone/*", "test_missing.py"]
    assert judged.cases == [
        Judgement(
            case="test_unlisted.py", verdict=Verdict.UNLISTED, reason="neither runs nor is listed"
        )
    ]


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_a_page_says_in_the_same_words_what_differs_on_purpose(suite: Suite) -> None:
    for rule in suite.cases:
        assert (rule.page is not None) == (rule.verdict is Verdict.DIFFERS), rule.pattern
        if rule.page is not None:
            assert f"| {rule.reason} |" in (ROOT / rule.page).read_text(encoding="utf-8")


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_patterns_of_cases_lie_in_files_that_run(suite: Suite) -> None:
    for rule in suite.cases:
        file = replace(rule, pattern=rule.pattern.partition("::")[0])
        assert any(map(file.matches, suite.run_files)), rule.pattern
