"""scripts/affected_tests.py: which tests `make quick` runs."""

from __future__ import annotations

import pytest

from scripts.affected_tests import CORE, OTHERS, ROOT, affected


def packages_and_modules() -> list[str]:
    found = [*(ROOT / "rollout").iterdir(), *(ROOT / "trainer_hooks").iterdir()]
    return [
        str(path.relative_to(ROOT))
        for path in found
        if path.suffix == ".py" or (path / "__init__.py").exists()
    ]


@pytest.mark.parametrize("path", packages_and_modules())
def test_affected_has_tests_for_every_package_and_module(path: str) -> None:
    assert affected([path])


def test_affected_names_only_tests_that_exist() -> None:
    named = [*CORE, *(test for tests in OTHERS.values() for test in tests)]
    assert [test for test in named if not (ROOT / test).exists()] == []


def test_affected_takes_the_room_of_a_file_and_a_test_itself() -> None:
    assert affected(["rollout/blocks/pool.py"]) == ["tests/blocks"]
    assert affected(["rollout/blocks/prefix_index.py"]) == ["tests/blocks/test_prefix_index.py"]
    assert affected(["trainer_hooks/metrics/axes.py"]) == ["tests/trainer_hooks/test_metrics.py"]
    assert affected(["rollout/telemetry.py"]) == sorted(CORE)
    assert affected(["tests/blocks/test_prefix_index.py"]) == ["tests/blocks/test_prefix_index.py"]
    assert affected(["tests/blocks", "tests/blocks/test_prefix_index.py"]) == ["tests/blocks"]
    assert affected(["LICENSE"]) == []
