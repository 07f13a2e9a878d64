"""The real clients, what is installed for each, and how the server is started that each drives."""

from __future__ import annotations

from dataclasses import dataclass

KEY = "sesame"
# What AReaL's clients import; all that it names as required does not install beside each other.
_AREAL = (
    "colorlog",
    "pybase64",
    "ray==2.57.0",
    "torchdata",
    "tenacity",
    "flask",
    "lark",
    "numba",
    "orjson",
    "einops",
    "aiofiles",
    "openai",
    "fastapi",
    "uvicorn",
    "pebble",
    "prettytable",
    "python-dotenv",
    "tensorboardx",
    "anthropic",
    "swanlab",
    "trackio",
    "math-verify",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """`script` runs in the client's environment, as SCRIPT URL MODEL_DIRECTORY ROOT.

    tests: run there by pytest instead of a script, without a server.
    requirements: what pip installs into it. alone: the same without their own requirements; "." is
        the project.
    is_layered: whether it also has the packages of the environment that runs `make test-doors`.
        Without requirements it is that environment.
    python: the version of Python, if the client does not run in this one's.
    server: fields of `rollout serve` beside those that all clients share. {root} is a directory
        that both sides see.
    """

    script: str | None = None
    tests: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    is_layered: bool = False
    python: str | None = None
    server: tuple[str, ...] = ()


_KEYED = (f"api_key={KEY}",)
_FILES = ("checkpoint_roots={root}",)
CLIENTS = {
    "openai3": Client(script="openai_client.py", requirements=("openai>=3,<4",), server=_KEYED),
    "openai2": Client(script="openai_client.py", requirements=("openai>=2,<3",), server=_KEYED),
    "litellm": Client(
        script="litellm_client.py", requirements=("litellm", "openai<3"), server=_KEYED
    ),
    "lm_eval": Client(
        script="lm_eval_client.py",
        requirements=("lm-eval[api,hf]",),
        is_layered=True,
        server=_KEYED,
    ),
    "verifiers": Client(
        script="verifiers_client.py",
        requirements=("verifiers==0.4.0", "renderers[transformers]==0.1.12"),
        server=_KEYED,
    ),
    "verifiers_classes": Client(
        tests=("tests/trainer_hooks/environments/test_verifiers.py",),
        # The job's omegaconf needs this version of antlr4, which pip cannot see in the layer below.
        requirements=("verifiers[rg]>=0.3,<0.4", "antlr4-python3-runtime==4.9.*"),
        is_layered=True,
    ),
    "verifiers_v1": Client(
        tests=("tests/trainer_hooks/environments/test_verifiers_v1.py",),
        requirements=("verifiers==0.4.0", "antlr4-python3-runtime==4.9.*"),
        is_layered=True,
    ),
    "openenv": Client(
        tests=("tests/trainer_hooks/environments/test_openenv.py",),
        requirements=("openenv",),
        is_layered=True,
    ),
    "ray": Client(
        tests=("tests/launch", "tests/contracts/test_launchers.py"),
        requirements=("ray==2.60.0",),
        is_layered=True,
    ),
    "prime_rl": Client(
        script="prime_rl_requests.py",
        requirements=("httpx", "safetensors", "numpy", "prometheus-client"),
        server=_FILES,
    ),
    "skyrl": Client(
        script="skyrl_client.py",
        requirements=(
            *("aiohttp", "cloudpathlib", "fsspec", "loguru", "numpy", "orjson", "pybase64"),
            *("pydantic", "rich"),
        ),
        alone=("skyrl==0.4.0",),
        python="3.12",
        server=_FILES,
    ),
    "trl": Client(
        script="trl_trainer.py", is_layered=True, server=(*_FILES, "weight_transfer_backend=gloo")
    ),
    "areal": Client(
        script="areal_trainer.py",
        requirements=_AREAL,
        alone=("areal==1.0.4",),
        is_layered=True,
    ),
    "verl": Client(
        script="verl_client.py",
        requirements=(
            *("verl==0.9.1", "ray==2.57.0", "tensordict<=0.10"),
            *("cachetools", "fastapi", "orjson", "uvicorn"),  # imported, and not named as required
        ),
        alone=(".",),
        is_layered=True,
    ),
}
