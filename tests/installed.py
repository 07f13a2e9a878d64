"""Mark of tests that need a package which may be missing. Used by tests of optional packages."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test unless all top-level `packages` are installed.

    It imports none of them, as pytest.importorskip would: trl, reasoning_gym and wandb take two
    seconds, which every process that collects all tests would spend.
    """
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
