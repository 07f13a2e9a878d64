"""Print the tests of changed files. Run by `make quick`.

    python scripts/affected_tests.py                      # files changed since main, or untracked
    python scripts/affected_tests.py rollout/scheduling   # the named files and folders

The tests of `rollout/X` and `trainer_hooks/X` are in tests/X and tests/trainer_hooks/X, except for
the paths in `OTHERS`. If no file has tests, the fast tests in `CORE` are printed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# Tests that start neither an engine process nor an example job.
CORE = [
    *("tests/blocks", "tests/layers", "tests/requests", "tests/scheduling", "tests/step"),
    *("tests/parallel", "tests/worker", "tests/test_config.py", "tests/test_public_api.py"),
]
# Tests of paths whose tests are elsewhere. The longest path that contains a file counts.
OTHERS: dict[str, list[str]] = {
    "rollout": CORE,
    "rollout/__main__.py": ["tests/cli"],
    "rollout/backends": ["tests/backends", "tests/contracts"],
    "rollout/chat_messages.py": ["tests/serve/test_chat.py"],
    "rollout/child_process.py": ["tests/apis/test_child_process.py"],
    "rollout/control": ["tests/engine/test_states.py", "tests/engine/test_state_space.py"],
    "rollout/coordinator/agent": ["tests/coordinator/agent"],
    "rollout/coordinator/client": ["tests/coordinator/client"],
    "rollout/coordinator/core": ["tests/coordinator/core"],
    "rollout/coordinator/protocol": ["tests/coordinator/protocol"],
    "rollout/coordinator/routing": ["tests/coordinator/routing"],
    "rollout/deferred_signals.py": ["tests/engine/test_interrupted_calls.py"],
    "rollout/ranges.py": ["tests/test_setting_ranges.py", "tests/test_config.py"],
    "rollout/tensor_parallel": ["tests/engine/test_ranks.py", "tests/apis/test_spmd.py"],
    "rollout/testing.py": ["tests/test_fake_llm.py"],
    "rollout/tool_calls": ["tests/serve/test_tool_calls.py"],
    "rollout/wire.py": ["tests/coordinator/protocol"],
    "README.md": ["tests/test_docs_names.py", "tests/test_readme.py"],
    "conf": [
        "tests/scripts/test_settings_pages.py",
        "tests/trainer_hooks/train/test_algorithm_groups.py",
        "tests/trainer_hooks/train/test_override_help.py",
    ],
    "docs": [
        *("tests/scripts/test_settings_pages.py", "tests/test_docs_names.py"),
        *("tests/test_docs_site.py", "tests/test_readme.py", "tests/test_snippets.py"),
    ],
    "pyproject.toml": ["tests/architecture/test_environment.py", "tests/test_extras.py"],
    "trainer_hooks": ["tests/trainer_hooks"],
    "trainer_hooks/prompts": [
        *("tests/trainer_hooks/test_prompt_checks.py", "tests/trainer_hooks/test_prompt_ledger.py"),
        *("tests/trainer_hooks/test_prompt_rows.py", "tests/trainer_hooks/test_prompt_sources.py"),
    ],
}


def tests_of(path: PurePosixPath) -> list[str]:
    """Return the test files or folders of a path of the repository, or [] if it has none."""
    if path.parts[:1] == ("tests",):
        is_test = path.suffix != ".py" or path.name.startswith("test_")
        return [str(path if is_test else path.parent)] if len(path.parts) > 2 or is_test else []
    for part in (path, *path.parents):
        if str(part) in OTHERS:
            return OTHERS[str(part)]
        folder = PurePosixPath("tests", *part.parts[part.parts[:1] == ("rollout",) :])
        if folder == PurePosixPath("tests"):
            continue
        tests = [ROOT / folder] if (ROOT / folder).is_dir() else []
        tests += sorted((ROOT / folder.parent).glob(f"test_{folder.stem}.py"))
        tests += sorted((ROOT / folder.parent).glob(f"test_{folder.stem}_*.py"))
        if tests:
            return [str(test.relative_to(ROOT)) for test in tests]
    return []


def changed_files() -> list[str]:
    """Return the untracked files, and the files changed since main, committed or not."""
    base = _git("merge-base", "HEAD", "main")[0]
    return [*_git("diff", "--name-only", base), *_git("ls-files", "-o", "--exclude-standard")]


def affected(paths: Iterable[str]) -> list[str]:
    """Return the existing tests of `paths`, sorted. Tests within a returned folder are left out."""
    found = {test for path in paths for test in tests_of(PurePosixPath(path))}
    found = {test for test in found if (ROOT / test).exists()}
    return sorted(t for t in found if not any(str(p) in found for p in PurePosixPath(t).parents))


def _git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


if __name__ == "__main__":
    sys.stdout.write(" ".join(affected(sys.argv[1:] or changed_files()) or CORE) + "\n")
