"""extra_needed: turns a missing optional package into an error that names the extra it is in.

Used wherever the package `rollout` or `trainer_hooks` imports what its base dependencies lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.errors import ConfigError

# Extra of pyproject.toml -> the command that installs its packages. The name of this distribution
# belongs to somebody else on PyPI, so no command has it.
INSTALL = {
    "figure": "pip install matplotlib (extra 'figure')",
    "hf": "pip install transformers jinja2 (extra 'hf')",
    "serve": "pip install aiohttp prometheus-client rich (extra 'serve')",
    "train": "pip install hydra-core 'omegaconf<2.4' rich transformers (extra 'train')",
}
_OWN = ("rollout", "trainer_hooks")


@contextmanager
def extra_needed(extra: str, what: str) -> Iterator[None]:
    """Raise ConfigError if an import inside fails because a package of `extra` is missing.

    `what` needs the package, and begins the message. A missing module of ours is a bug: its error
    is left as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN:
            raise
        install = INSTALL.get(extra, f"install the extra {extra!r}")
        raise ConfigError(f"{what} needs the package {package}: {install}") from error
