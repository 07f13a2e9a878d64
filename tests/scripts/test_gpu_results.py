"""Output of gpu-check: it stays within its bounds and names each failure, whatever is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.gpu_processes import Ended, Part
from scripts.gpu_results import (
    FILES,
    ROOT,
    SUMMARY_CHARACTERS,
    Failure,
    Outcome,
    Results,
    line_of,
    outcome_of,
    shortened,
    stacks_in,
    summary_of,
)

OUTPUT_CHARACTERS = 12_000
NAMES = ("facts", "install", "smoke", "kernels", "memory", "scenarios", "benchmark")
PART = Part(name="scenarios", command=["true"], limit_s=1.0, has_tests=True)

texts = st.one_of(st.text(max_size=300), st.integers(0, 5000).map(lambda n: "x " * n))
failures = st.builds(Failure, test=texts, error=texts, frame=texts)


def outcome(name: str, found: list[Failure], **changes: object) -> Outcome:
    fields = {
        "status": "failed" if found else "passed",
        "seconds": 61.5,
        "exit_status": 1,
        "num_passed": 10**6,
        "num_failed": len(found),
        "num_skipped": 10**6,
        "num_not_run": 10**6,
        "num_compiled": 10**6,
    }
    return Outcome(name=name, failures=found, **{**fields, **changes})  # type: ignore[arg-type]


@given(
    found=st.lists(st.lists(failures, max_size=5), min_size=len(NAMES), max_size=len(NAMES)),
    unknown=st.lists(texts, max_size=5),
    table=st.one_of(texts, st.lists(texts, max_size=9).map("\n".join)),
)
def test_a_summary_fits_and_names_every_part_and_its_failures(
    found: list[list[Failure]], unknown: list[str], table: str
) -> None:
    outcomes = [outcome(*pair) for pair in zip(NAMES, found, strict=True)]
    text = summary_of(outcomes, unknown, table)
    assert len(text) <= SUMMARY_CHARACTERS
    for each in outcomes:
        assert line_of(each) in text
        assert text.count(f"--- {each.name}: ") == min(len(each.failures), 4)


def test_the_longest_summary_and_the_lines_before_it_are_what_the_caller_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path, "first", [f"tests/a.py::{'x' * 5000}"] * 9)
    (tmp_path / "gpu.md").write_text("# On a card\n" + "| a row of figures |\n" * 5000)
    worst = Failure(test="t/" * 5000, error="e " * 5000, frame="f/" * 5000)
    for name in NAMES:
        results.add(outcome(name, [worst] * 400), tmp_path / "none.log", [])
    print(results.summary())
    printed = capsys.readouterr().out
    assert 11_500 < len(printed) <= OUTPUT_CHARACTERS
    assert printed.count("| a row of figures |\n") > 50
    assert "# On a card\n| a row of figures |\n" in printed
    assert "more lines in gpu.md)" in printed.splitlines()[-1]


def test_of_a_long_line_both_ends_are_kept() -> None:
    assert shortened("a b\n c", 10) == "a b c"
    assert shortened("0123456789" * 3, 15) == "01234 ... 56789"


def test_files_are_written_after_every_part_and_those_of_an_earlier_call_go(
    tmp_path: Path,
) -> None:
    for name in FILES:
        (tmp_path / name).write_text("old")
    results, log = Results(tmp_path, "first", []), tmp_path / "a.log"
    assert not [name for name in FILES if (tmp_path / name).exists()]
    log.write_text("card: one\n")
    results.add(outcome("facts", []), log, [])
    found = [Failure(test="tests/a.py::test_b[c d]", error="e", frame="")]
    results.add(outcome("kernels", [*found, Failure(test="", error="e", frame="")]), log, [])
    assert (tmp_path / "facts.txt").read_text() == "card: one\n"
    assert (tmp_path / "logs.txt").read_text().count("=== ") == 2
    assert (tmp_path / "again.txt").read_text() == "tests/a.py::test_b[c d]\n"
    content = json.loads((tmp_path / "check.json").read_text())
    assert [part["name"] for part in content["parts"]] == ["facts", "kernels"]
    assert not results.are_good


def ended(exit_status: int | None = 0, is_late: bool = False) -> Ended:
    return Ended(exit_status=exit_status, is_late=is_late, seconds=1.0)


def line(event: str, **fields: object) -> str:
    return json.dumps({"part": "scenarios", "event": event, **fields}) + "\n"


@pytest.mark.parametrize(
    ("how", "lines", "status"),
    [
        (ended(0), line("started", test="a") + line("passed", test="a"), "passed"),
        (ended(1), line("failed", test="a", error="e", frame=""), "failed"),
        (ended(0), line("failed", test="a", error="e", frame=""), "failed"),
        (ended(5), line("collected", count=0), "nothing to run"),
        (ended(4), "", "failed"),
        (ended(-6), line("passed", test="a"), "failed"),
        (ended(-9, is_late=True), line("passed", test="a"), "timed out"),
        (ended(None, is_late=True), "", "timed out"),
    ],
)
def test_a_part_passes_only_if_it_ended_well_and_no_test_failed(
    tmp_path: Path, how: Ended, lines: str, status: str
) -> None:
    journal = tmp_path / "tests.jsonl"
    journal.write_text(lines)
    found = outcome_of(PART, how, journal, tmp_path / "none.log", 0)
    assert found.status == status
    assert bool(found.failures) == (status in ("failed", "timed out"))


def test_tests_that_did_not_run_are_counted_over_all_processes_of_a_part(tmp_path: Path) -> None:
    journal = tmp_path / "tests.jsonl"
    first = line("collected", count=5) + line("started", test="a")
    journal.write_text(first + line("collected", count=4) + line("started", test="b"))
    assert outcome_of(PART, ended(1), journal, tmp_path / "none.log", 0).num_not_run == 3


OURS = f'  File "{ROOT}/rollout/a.py", line 3'
TEST = f'  File "{ROOT}/tests/test_a.py", line 9'
THEIRS = '  File "/usr/lib/python3/site-packages/torch/b.py", line 7'
ERROR_STACK = f"""Traceback (most recent call last):
{TEST}, in test_it
    engine.step()
{OURS}, in step
    torch.sum(x)
{THEIRS}, in sum
RuntimeError: bad
"""
ABORT_STACK = f"""Fatal Python error: Aborted

Current thread 0x7f (most recent call first):
{THEIRS} in sum
{OURS} in step
{TEST} in test_it
"""
TIMEOUT_STACK = f"""~~~~~ Stack of MainThread (1) ~~~~~
{TEST}, in test_it
    engine.step()
{OURS}, in step
    torch.sum(x)
"""


@pytest.mark.parametrize("stack", [ERROR_STACK, ABORT_STACK, TIMEOUT_STACK])
def test_the_innermost_frame_of_ours_is_found_in_every_kind_of_stack(
    tmp_path: Path, stack: str
) -> None:
    assert stacks_in("noise\n" + stack) == [["tests/test_a.py:9 test_it", "rollout/a.py:3 step"]]
    log, journal = tmp_path / "a.log", tmp_path / "tests.jsonl"
    log.write_text(stack.replace("test_it", "test_other").replace("step", "other") + stack)
    journal.write_text(line("failed", test="tests/test_a.py::test_it[x]", error="e", frame=""))
    (failure,) = outcome_of(PART, ended(1), journal, log, 0).failures
    assert failure.frame == "rollout/a.py:3 step"


def test_a_part_without_tests_tells_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"begun\n{ERROR_STACK}see the manual\n")
    part = Part(name="smoke", command=["true"], limit_s=1.0)
    (failure,) = outcome_of(part, ended(1), tmp_path / "none", log, 0).failures
    assert failure.error == "its process ended with exit status 1: RuntimeError: bad"
    assert failure.frame == "rollout/a.py:3 step"
