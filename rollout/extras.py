"""extra_needed: names the extra to install when an optional package is missing.

Used by `rollout` (LLM, serving, text, `rollout.cli`) and `trainer_hooks` around imports of packages
that are not base dependencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.errors import ConfigError

# Extra of pyproject.toml -> the command that installs its packages. On PyPI another project has
# the name of this distribution, so no command contains it.
INSTALL = {
    "figure": "pip install matplotlib (extra 'figure')",
    "hf": "pip install transformers jinja2 (extra 'hf')",
    "serve": "pip install aiohttp prometheus-client rich (extra 'serve')",
    "train": "pip install hydra-core 'omegaconf<2.4' rich transformers (extra 'train')",
}
_OWN = ("rollout", "trainer_hooks")


@contextmanager
def extra_needed(extra: str, what: str) -> Iterator[None]:
    """Raise ConfigError if an import in the block fails because a package of `extra` is missing.
    The message begins with `what`, the feature that needs the package. A missing module of
    `rollout` or `trainer_hooks` is a bug, so its error is raised unchanged."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN:
            raise
        install = INSTALL.get(extra, f"install the extra {extra!r}")
        raise ConfigError(f"{what} needs the package {package}: {install}") from error
