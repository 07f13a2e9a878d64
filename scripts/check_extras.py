"""Install extras of pyproject.toml, each alone in a new environment, and run what each is for.

    python -m scripts.check_extras serve ray    # these; some minutes each
    python -m scripts.check_extras              # all but dev and docs

An environment is made by venv and pip from the last commit, with the torch of constraints.txt, and
removed afterwards. Prints a line for each extra: the environment's size in megabytes, and "ok" or
the last line of the error. Exits with 1 if an extra failed. Needs a package index and up to 6 GB of
disk.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Extra -> a program that uses its packages as the project does, without a GPU or a network.
PROGRAMS = {
    "serve": "import uvloop; from rollout.cli.main import main; main(['serve', '--help'])",
    "hf": "import jinja2, sentencepiece, google.protobuf;"
    " from trainer_hooks.rewards.reward_model import RewardModel;"
    " from transformers import AutoTokenizer, AutoModelForCausalLM",
    "train": "import trainer_hooks.train.main;"
    " from trainer_hooks.train.job import compose_settings; compose_settings(config_name='demo')",
    "demo": "import reasoning_gym, trainer_hooks.train.main",
    "wandb": "import wandb",
    "smollm2": "import gguf; from rollout import LLM",
    "data": "import pyarrow.parquet, reasoning_gym",
    "figure": "import matplotlib.pyplot, trainer_hooks.train.plots",
    "lora": "from peft import LoraConfig; from rollout import LoraAdapter",
    "all": "import peft, reasoning_gym, wandb, uvloop, gguf, trainer_hooks.train.main",
    "gpu": "import triton, torch_memory_saver, rollout.backends.cuda.memory_saver",
    "ray": "import ray, ray.util.scheduling_strategies; from rollout.launch.ray import RayLauncher",
    "slurm": "import submitit; from rollout.launch.slurm import SlurmLauncher",
    "trl": "from trl import GRPOConfig, GRPOTrainer;"
    " from trainer_hooks.trl_rollouts import TRLRollouts",
    "verl": "from rollout_verl.__main__ import main; raise SystemExit(main())",
    "verifiers": "from verifiers.v1.utils.loaders import load_environment, resolve_env_config;"
    " from verifiers.v1.clients import EvalClientConfig, ModelContext;"
    " from trainer_hooks.environments.verifiers_v1 import VerifiersV1Environment",
    "openenv": "from openenv.core import GenericEnvClient;"
    " from trainer_hooks.environments.openenv import OpenEnvironment",
}


def check(extra: str, source: Path) -> tuple[str, int]:
    """Install `extra` and run its program. Returns "ok" or the error, and the size in bytes."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==\S+", pins, re.MULTILINE)
    assert torch is not None
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder) / "bin" / "python")
        for command in (
            [sys.executable, "-m", "venv", folder],
            [python, "-m", "pip", "install", "-q", "--no-compile", torch[0], f"{source}[{extra}]"],
            [python, "-c", PROGRAMS[extra]],
        ):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
                return lines[-1] if lines else f"{command[0]} exited with {done.returncode}", 0
        files = (file for file in Path(folder).rglob("*") if file.is_file())
        return "ok", sum(file.lstat().st_size for file in files)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the extras on the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="extra", help=f"some of {', '.join(PROGRAMS)}")
    extras = parser.parse_args(argv).extras or list(PROGRAMS)
    if unknown := [extra for extra in extras if extra not in PROGRAMS]:
        parser.error(f"no program for {', '.join(unknown)}; the extras are {', '.join(PROGRAMS)}")
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", folder], check=True)
        for extra in extras:
            answer, num_bytes = check(extra, Path(folder))
            num_failed += answer != "ok"
            print(f"{extra:10} {num_bytes / 1e6:7,.0f} MB  {answer}", flush=True)
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
