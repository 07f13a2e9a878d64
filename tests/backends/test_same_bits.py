"""deterministic=True gives the same bits whatever processor the kernels are compiled for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.backends.cpu.library import TARGETS, cpu_flags, load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")
ROOT = Path(__file__).parents[2]
IS_LONG = os.environ.get("ROLLOUT_TEST_LONG") == "1"
NUM_TOKENS = 1024 if IS_LONG else 128
RUNNABLE = {target.name for target in TARGETS if target.cpu_flags <= cpu_flags()}


def digest_of(march: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.same_bits", f"-march={march}", str(NUM_TOKENS)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "ROLLOUT_TUNE": "0"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("x86-64-v3" not in RUNNABLE, reason="the processor is below x86-64-v3")
def test_every_build_of_the_kernels_gives_the_same_tokens_and_logprobs() -> None:
    """On x86-64-v3, torch also uses its own kernels for such a processor."""
    digests = {
        "native": digest_of("native"),
        "x86-64-v3": digest_of("x86-64-v3", ATEN_CPU_CAPABILITY="avx2"),
    }
    if IS_LONG and "x86-64-v4" in RUNNABLE:
        digests["x86-64-v4"] = digest_of("x86-64-v4")
    print(digests)
    assert len(set(digests.values())) == 1, digests
