"""The package that stands for vLLM where its tests run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SHIMS = Path(__file__).parent / "shims"


def run(program: str) -> None:
    """Run a program that imports the shims; an assertion of it that fails, fails the test."""
    environment = {
        **os.environ,
        "PEER_MODEL": "DIRECTORY",
        "PEER_PYTHON": "PYTHON",
        "PEER_VERSION": "0.33.0",
        "PYTHONPATH": str(SHIMS),
    }
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_an_absent_class_may_be_named_and_skips_the_test_that_uses_it() -> None:
    run(
        """
        import pytest
        from vllm import LLM, envs
        from vllm.a.module.that_is_not_here import Request, function
        from vllm.version import __version__

        assert __version__ == "0.33.0" and not envs.VLLM_ANYTHING

        def annotated(request: Request[int] | None) -> LLM: ...

        class Derived(Request): ...

        uses = (Derived, function, lambda: Request.field, lambda: LLM("model"))
        for use in uses:
            with pytest.raises(pytest.skip.Exception, match="in process: "):
                use()
        """
    )


def test_options_of_vllm_serve_become_settings_of_rollout_serve() -> None:
    run(
        """
        from vllm.entrypoints.openai.api_server import serve_command

        options = ["--model", "a/name", "--max-model-len=64", "--lora-modules", "a=b", "c=d"]
        command = serve_command([*options, "--enforce-eager", "--api-key", "secret"])
        assert command[:5] == ["PYTHON", "-m", "rollout", "serve", "model=DIRECTORY"]
        settings = dict(setting.split("=") for setting in command[5:])
        assert settings["served_model_name"] == "a/name"
        assert settings["max_sequence_length"] == "64"
        assert settings["enable_prefix_caching"] == "true"
        assert "secret" not in " ".join(command)
        command = serve_command([*options, "--no-enable-prefix-caching"])
        assert not [setting for setting in command if "prefix_caching" in setting]
        """
    )


def test_an_option_of_vllm_serve_without_a_counterpart_is_refused_by_name() -> None:
    run(
        """
        import pytest
        from vllm.entrypoints.openai.api_server import UnservedOptionError, serve_command

        with pytest.raises(UnservedOptionError, match="--root-path: the server has no path"):
            serve_command(["--root-path", "/a"])
        with pytest.raises(KeyError, match="--of-a-later-version"):
            serve_command(["--of-a-later-version"])
        """
    )
