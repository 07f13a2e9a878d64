"""What a coordinator's process loads."""

from __future__ import annotations

import subprocess
import sys


def test_a_coordinator_loads_no_torch() -> None:
    program = (
        "import sys, rollout.coordinator.coordinator as module; "
        "module.DataParallelInferenceCoordinator(None, 1, None).stop(); "
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.split() == []
