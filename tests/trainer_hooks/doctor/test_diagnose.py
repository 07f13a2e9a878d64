"""diagnose names each mismatch of the real engine's rollouts, and finds nothing in sound runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import IS_LONG
from tests.trainer_hooks.doctor.runs import MISMATCHES, SOUND_RUNS
from trainer_hooks.doctor import diagnose

NUM_EXAMPLES = 300 if IS_LONG else 6


def check_named(mismatch: str, seed: int) -> None:
    name, make = MISMATCHES[mismatch]
    diagnosis = diagnose(**make(seed))
    assert diagnosis.verdict == "fault"
    names = [finding.name for finding in diagnosis.findings]
    assert names[0] == name, (names, [(e.name, e.share) for e in diagnosis.explanations[:4]])
    assert set(names) == {name}


def check_sound(run: str, seed: int) -> None:
    diagnosis = diagnose(**SOUND_RUNS[run](seed))
    assert [f.evidence for f in diagnosis.findings] == []
    assert diagnosis.verdict == "sound"
    assert diagnosis.num_known_tokens == diagnosis.num_tokens


@pytest.mark.drawn(8)
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_diagnose_names_a_mismatch(mismatch: str) -> None:
    check_named(mismatch, seed=1)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("run", SOUND_RUNS)
def test_diagnose_finds_nothing_in_a_sound_run(run: str) -> None:
    check_sound(run, seed=1)


def test_diagnose_notes_that_kv_versions_are_bounds() -> None:
    """Only requests over a vLLM server have bounds. Here an update in flight left older KV."""
    given_arguments = SOUND_RUNS["update in flight"](1)
    assert diagnose(**given_arguments).notes == []
    for request in given_arguments["sources"]:
        request.kv_versions_are_bounds = True
    (note,) = diagnose(**given_arguments).notes
    assert note.startswith("KV versions are bounds: KV is at most 1 versions old")


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(mismatch=st.sampled_from(sorted(MISMATCHES)), seed=st.integers(0, 10_000))
def test_diagnose_names_mismatches_for_many_models(mismatch: str, seed: int) -> None:
    check_named(mismatch, seed)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(run=st.sampled_from(sorted(SOUND_RUNS)), seed=st.integers(0, 10_000))
def test_diagnose_finds_nothing_in_sound_runs_of_many_models(run: str, seed: int) -> None:
    check_sound(run, seed)
