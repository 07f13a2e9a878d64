"""Faults of a part of gpu-check: ROLLOUT_FAKE_FAULTS maps parts to faults, as JSON."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

FAULTS: dict[str, str] = json.loads(os.environ.get("ROLLOUT_FAKE_FAULTS", "{}"))


def happen(part: str) -> None:
    """Do what is to go wrong in this part; nothing if that is nothing."""
    fault = FAULTS.get(part)
    if fault == "fails":
        raise AssertionError("made up")
    if fault == "aborts":
        os.abort()
    if fault == "hangs":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(os.environ["ROLLOUT_FAKE_FAULTS_FOLDER"], f"{part} hangs").touch()
        while True:
            time.sleep(60)
    if fault == "loses the device":
        import torch

        torch.cuda.launch_out_of_bounds()
