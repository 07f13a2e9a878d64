"""The names users import, and the parameters they pass."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import subprocess
import sys
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rollout
import rollout.apis
import rollout.models
import rollout.requests
import trainer_hooks
import trainer_hooks.environments
import trainer_hooks.losses
import trainer_hooks.rewards
import trainer_hooks.train
from rollout import SamplingParams
from rollout.apis.arguments import FLEET_DEFAULTS
from tests.apis.fleets import directory
from tests.pinned_api import ATTRIBUTES, KEYWORDS, NAMES, PARAMETERS

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
PINNED = [(module, name) for module, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), PINNED)
def test_a_pinned_name_can_be_imported(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)
    assert name in getattr(import_module(module), "__all__", [name])


def found(path: str) -> Any:
    """Return an object by its dotted name, which begins with a module of NAMES."""
    module = max((m for m in NAMES if path.startswith(f"{m}.")), key=len)
    return attrgetter(path.removeprefix(f"{module}."))(import_module(module))


def parameters_of(path: str) -> dict[str, str]:
    """Return each parameter as it is pinned: its name, with its default if it has one."""
    parameters = inspect.signature(found(path)).parameters
    return {name: _pinned(name, each.default) for name, each in parameters.items()}


def _pinned(name: str, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return name
    shown = default.value if isinstance(default, Enum) else default
    return f"{name}={shown!r}".replace(" ", "")


def agrees(pinned: str, parameter: str) -> bool:
    """Return whether a parameter has the pinned name, and the pinned default if there is one."""
    return pinned == (parameter if "=" in pinned else parameter.partition("=")[0])


@pytest.mark.parametrize("path", PARAMETERS)
def test_pinned_parameters_keep_their_names_order_and_defaults(path: str) -> None:
    pinned, parameters = PARAMETERS[path].split(), list(parameters_of(path).values())
    assert len(parameters) >= len(pinned)
    pairs = zip(pinned, parameters, strict=False)
    assert [pair for pair in pairs if not agrees(*pair)] == []


@pytest.mark.parametrize("path", KEYWORDS)
def test_pinned_keywords_keep_their_names_and_defaults(path: str) -> None:
    parameters = parameters_of(path)
    wrong = {}
    for pinned in KEYWORDS[path].split():
        parameter = parameters.get(pinned.partition("=")[0], "missing")
        if not agrees(pinned, parameter):
            wrong[pinned] = parameter
    assert wrong == {}


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_pinned_attributes_are_there(path: str) -> None:
    kind = found(path)
    fields = {field.name for field in dataclasses.fields(kind)} if is_dataclass(kind) else set()
    names = fields | set(dir(kind)) | set(getattr(kind, "__annotations__", ()))
    assert set(ATTRIBUTES[path].split()) - names == set()


def test_the_version_is_the_changelogs_last_or_the_development_version_after_it() -> None:
    headings = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", CHANGELOG.read_text(), flags=re.M)
    versions = [tuple(map(int, heading)) for heading in headings]
    assert versions == sorted(set(versions), reverse=True)
    major, minor, patch = versions[0]
    expected = {f"{major}.{minor}.{patch}", f"{major}.{minor + 1}.0.dev0"}
    assert rollout.__version__ in expected


def test_all_lists_exactly_what_exists() -> None:
    assert len(rollout.__all__) == len(set(rollout.__all__))
    assert [name for name in rollout.__all__ if not hasattr(rollout, name)] == []


def test_sampling_params_have_the_pinned_fields_and_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.0,
        "min_p": 0.0,
        "num_tokens_to_generate": None,
        "num_tokens_total": None,
        "termination_id": None,
        "stop_words": None,
        "ignore_eos": False,
        "seed": None,
        "return_log_probs": False,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": 0,
        "logprobs_mode": "raw",
        "add_BOS": False,
        "detokenize_stop_sequence": False,
        "return_prompt_tokens": True,
        "streaming": False,
        "streaming_interval": 1,
        "stop_token_ids": None,
        "min_tokens": 0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_ranks": False,
        "cache_salt": None,
    }


def test_every_public_class_and_function_says_what_it_is() -> None:
    undocumented = [name for name in rollout.__all__ if not inspect.getdoc(getattr(rollout, name))]
    assert undocumented == []


@pytest.mark.parametrize(
    "package",
    [
        *(rollout, rollout.apis, rollout.models, rollout.requests),
        *(trainer_hooks, trainer_hooks.environments, trainer_hooks.losses, trainer_hooks.rewards),
        trainer_hooks.train,
    ],
)
def test_a_stub_names_what_its_package_loads_when_asked(package: ModuleType) -> None:
    stub = ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    named = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(named) == package.__all__
    for name, home in named.items():
        assert getattr(package, name) is getattr(import_module(str(home)), name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing


_ERRORS_RAISED = re.compile(r"\b(\w+Error)\b")


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM", "InferenceClient"])
def test_errors_that_methods_say_they_raise_can_be_imported_from_rollout(name: str) -> None:
    kind = getattr(rollout, name)
    members = [kind, kind.__init__, *(each for n, each in vars(kind).items() if n[0] != "_")]
    told = {
        error for each in members for error in _ERRORS_RAISED.findall(inspect.getdoc(each) or "")
    }
    assert told, "the docstrings name some"
    builtin = {error for error in told if hasattr(builtins, error)}
    assert told - builtin - set(rollout.__all__) == set()


_IMPORT_LLM = """
import sys
from rollout import LLM
UNUSED = ("aiohttp", "jinja2", "prometheus_client", "rich", "zmq")
loaded = [name for name in UNUSED if name in sys.modules]
assert not loaded, f"import: {loaded}"
with LLM(sys.argv[1], buffer_size_gb=0.02, num_threads=1) as llm:
    assert llm.generate([1, 2, 3]).generated_tokens
loaded = [name for name in UNUSED if name in sys.modules]
assert not loaded, f"generate: {loaded}"
"""


def test_an_llm_that_opens_no_socket_loads_no_library_of_sockets() -> None:
    program = [sys.executable, "-c", _IMPORT_LLM, directory()]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_fleet_keywords_of_llm_are_those_of_async_llm() -> None:
    own = inspect.signature(rollout.LLM).parameters
    of_fleet = {
        name: parameter.default
        for name, parameter in inspect.signature(rollout.AsyncLLM).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in own
    }
    assert of_fleet == FLEET_DEFAULTS
