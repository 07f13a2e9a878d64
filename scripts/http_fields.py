"""List the request fields of vLLM, SGLang and the openai package, and which are served here.

    python scripts/http_fields.py peers          # writes tests/serve/peer_keys.json
    python scripts/http_fields.py peers --check  # exits with 1 if the packages have other fields
    python scripts/http_fields.py page           # writes docs/reference/http-fields.md

Run by hand. Tests compare the page and the list with the structs of requests. `peers` downloads
the released packages from PyPI into a temporary folder. It parses their sources and never runs
them.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollout.serve import fields
from rollout.serve.app import routes_of
from rollout.serve.config import PROTOCOLS
from rollout.serve.fields import Fields, Neutral, Refused

_ROOT = Path(__file__).parents[1]
PEER_KEYS = _ROOT / "tests" / "serve" / "peer_keys.json"
PAGE = _ROOT / "docs" / "reference" / "http-fields.md"
_INDEX = "https://pypi.org/simple/{name}/"
_JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A released package.

    `file`: name of its source distribution on PyPI, or else of a wheel.
    `root`: folder of the package's sources inside that file.
    """

    name: str
    version: str
    file: str
    root: str


PACKAGES = (
    Package(name="vllm", version="0.33.0", file="vllm-0.33.0.tar.gz", root="vllm-0.33.0/vllm"),
    Package(
        name="sglang",
        version="0.5.23",
        file="sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl",
        root="sglang/srt",
    ),
    Package(
        name="openai",
        version="3.57.0",
        file="openai-3.57.0.tar.gz",
        root="openai-3.57.0/src/openai/types",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place in a package that declares the fields of a request.

    `route`: method and path. ` ?` after them means the query, a name means a nested object.
    `classes`: classes whose fields are the request's.
    `function`: handler whose body parameters are the request's fields. For a `?` route the
    query parameters are its fields.
    """

    route: str
    package: str
    file: str
    classes: tuple[str, ...] = ()
    function: str | None = None


_VLLM = "entrypoints/"
_COMPLETION, _CHAT = "POST /v1/completions", "POST /v1/chat/completions"
_TOKENS = "POST /inference/v1/generate"
_SG_OPENAI, _SG_STRUCTS = "entrypoints/openai/protocol.py", "managers/io_struct.py"
_OPENAI_PARAMS = (
    "CompletionCreateParamsBase",
    "CompletionCreateParamsNonStreaming",
    "CompletionCreateParamsStreaming",
)
_OPENAI_STREAM = "chat/chat_completion_stream_options_param.py"


def _vllm(route: str, file: str, *classes: str, function: str | None = None) -> Source:
    return Source(route=route, package="vllm", file=file, classes=classes, function=function)


def _sglang(route: str, *classes: str, file: str = _SG_STRUCTS) -> Source:
    return Source(route=route, package="sglang", file=file, classes=classes)


def _openai(route: str, file: str, *classes: str) -> Source:
    return Source(route=route, package="openai", file=file, classes=classes)


_ONLINE = _VLLM + "rl/online/api_router.py"
_TRANSFER = "distributed/weight_transfer/"
SOURCES = (
    _vllm(_COMPLETION, _VLLM + "openai/completion/protocol.py", "CompletionRequest"),
    _vllm(_CHAT, _VLLM + "openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    _vllm(_TOKENS, _VLLM + "scale_out/token_in_token_out/protocol.py", "GenerateRequest"),
    _vllm(f"{_TOKENS} sampling_params", "sampling_params.py", "SamplingParams"),
    *(
        _vllm(f"{route} stream_options", _VLLM + "generate/base/protocol.py", "StreamOptions")
        for route in (_COMPLETION, _CHAT, _TOKENS)
    ),
    _vllm(
        "POST /tokenize",
        _VLLM + "serve/tokenize/protocol.py",
        "TokenizeCompletionRequest",
        "TokenizeChatRequest",
    ),
    _vllm("POST /detokenize", _VLLM + "serve/tokenize/protocol.py", "DetokenizeRequest"),
    _vllm("POST /pause ?", _ONLINE, function="pause_generation"),
    _vllm("POST /abort_requests", _ONLINE, function="abort_requests"),
    _vllm(
        "POST /inference/v1/abort_requests",
        _VLLM + "scale_out/token_in_token_out/api_router.py",
        function="abort_requests",
    ),
    _vllm("POST /init_weight_transfer_engine", _ONLINE, function="init_weight_transfer_engine"),
    _vllm(
        "POST /init_weight_transfer_engine init_info",
        _TRANSFER + "nccl_common.py",
        "NCCLWeightTransferInitInfo",
    ),
    _vllm("POST /update_weights", _ONLINE, function="update_weights"),
    _vllm(
        "POST /update_weights update_info",
        _TRANSFER + "nccl_engine.py",
        "NCCLWeightTransferUpdateInfo",
    ),
    _vllm("POST /finish_weight_update", _ONLINE, function="finish_weight_update"),
    _vllm("POST /update_weight_version", _ONLINE, function="update_weight_version"),
    _vllm("POST /weight_checker", _ONLINE, function="weight_checker"),
    _vllm("GET /get_world_size ?", _ONLINE, function="get_world_size"),
    _vllm("POST /sleep ?", _VLLM + "serve/dev/sleep/api_router.py", function="sleep"),
    _vllm("POST /wake_up ?", _VLLM + "serve/dev/sleep/api_router.py", function="wake_up"),
    _vllm(
        "POST /reset_prefix_cache ?",
        _VLLM + "serve/dev/cache/api_router.py",
        function="reset_prefix_cache",
    ),
    _vllm(
        "GET /server_info ?",
        _VLLM + "serve/dev/server_info/api_router.py",
        function="show_server_info",
    ),
    _sglang(_COMPLETION, "CompletionRequest", file=_SG_OPENAI),
    _sglang(_CHAT, "ChatCompletionRequest", file=_SG_OPENAI),
    _sglang(f"{_COMPLETION} stream_options", "StreamOptions", file=_SG_OPENAI),
    _sglang(f"{_CHAT} stream_options", "StreamOptions", file=_SG_OPENAI),
    _sglang("POST /tokenize", "TokenizeRequest", file=_SG_OPENAI),
    _sglang("POST /detokenize", "DetokenizeRequest", file=_SG_OPENAI),
    _sglang("POST /generate", "GenerateReqInput"),
    _sglang("POST /generate sampling_params", "SamplingParams", file="sampling/sampling_params.py"),
    _sglang("POST /abort_request", "AbortReq"),
    _sglang("POST /pause_generation", "PauseGenerationReqInput"),
    _sglang("POST /continue_generation", "ContinueGenerationReqInput"),
    _sglang("POST /release_memory_occupation", "ReleaseMemoryOccupationReqInput"),
    _sglang("POST /resume_memory_occupation", "ResumeMemoryOccupationReqInput"),
    _sglang("POST /update_weights_from_disk", "UpdateWeightFromDiskReqInput"),
    _sglang("POST /init_weights_update_group", "InitWeightsUpdateGroupReqInput"),
    _sglang("POST /destroy_weights_update_group", "DestroyWeightsUpdateGroupReqInput"),
    _sglang("POST /update_weights_from_distributed", "UpdateWeightsFromDistributedReqInput"),
    _sglang("POST /begin_weight_update", "BeginWeightUpdateReqInput"),
    _sglang("POST /end_weight_update", "EndWeightUpdateReqInput"),
    _sglang("POST /update_weight_version", "UpdateWeightVersionReqInput"),
    Source(
        route="POST /flush_cache ?",
        package="sglang",
        file="entrypoints/http_server.py",
        function="flush_cache",
    ),
    Source(
        route="GET /v1/loads ?",
        package="sglang",
        file="entrypoints/v1_loads.py",
        function="get_loads",
    ),
    _openai(_COMPLETION, "completion_create_params.py", *_OPENAI_PARAMS),
    _openai(_CHAT, "chat/completion_create_params.py", *_OPENAI_PARAMS),
    _openai(f"{_COMPLETION} stream_options", _OPENAI_STREAM, "ChatCompletionStreamOptionsParam"),
    _openai(f"{_CHAT} stream_options", _OPENAI_STREAM, "ChatCompletionStreamOptionsParam"),
)
# Package, file and constant with the names that the server removes from a body before it reads the
# fields.
_REMOVED = ("vllm", _VLLM + "serve/engine/protocol.py", "_REMOVED_GUIDED_FIELDS")


Status = Neutral | Refused | None

# ---- reading sources


def keys_of(tree: ast.Module, source: Source) -> set[str]:
    """Return the keys of `source`. Raises LookupError if it has none and is not in _EMPTY."""
    keys = set()
    for name in source.classes:
        keys |= _fields(tree, name)
    if source.function is not None:
        keys |= _parameters(tree, source.function, of_query=source.route.endswith("?"))
    if not keys and source.route not in _EMPTY:
        raise LookupError(f"{source.package}: {source.file} has no keys of {source.route}")
    return keys


# Requests whose body has no fields.
_EMPTY = ("POST /end_weight_update",)
# Classes with fields that only messages inside a server have.
_INTERNAL_BASES = ("BaseReq",)


def _fields(tree: ast.Module, name: str) -> set[str]:
    """Return the public fields and aliases of a class. Raises LookupError without such a class."""
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if not found:
        raise LookupError(f"there is no class {name}")
    (node,) = found
    keys = set()
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id not in _INTERNAL_BASES and _has(tree, base.id):
            keys |= _fields(tree, base.id)
    for entry in node.body:
        if isinstance(entry, ast.FunctionDef):
            keys |= set(_read_before(entry))
        elif isinstance(entry, ast.AnnAssign) and "ClassVar" not in ast.unparse(entry.annotation):
            keys |= {ast.unparse(entry.target), *_aliases(entry.value)}
    return {key for key in keys if not key.startswith("_")}


def _read_before(method: ast.FunctionDef) -> Iterator[str]:
    """Yield the keys that a pydantic validator with mode='before' reads from the body."""
    if not any("mode='before'" in ast.unparse(each) for each in method.decorator_list):
        return
    for call in ast.walk(method):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("values.get", "data.get"):
            (key, *_) = call.args
            if isinstance(key, ast.Constant):
                yield str(key.value)


def _has(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body)


def _aliases(value: ast.expr | None) -> Iterator[str]:
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg in ("alias", "validation_alias"):
            for part in ast.walk(keyword.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _parameters(tree: ast.Module, name: str, *, of_query: bool) -> set[str]:
    """Return the parameters that a FastAPI handler gets from the query or the body."""
    # They are declared, or read by the handler's code.
    (node,) = (
        each
        for each in tree.body
        if isinstance(each, ast.AsyncFunctionDef | ast.FunctionDef) and each.name == name
    )
    keys = set()
    arguments = node.args.args
    defaults = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
    for argument, default in zip(arguments, defaults, strict=True):
        declared = ast.unparse(argument.annotation) if argument.annotation else ""
        declared += "" if default is None else f" = {ast.unparse(default)}"
        if "Depends(" in declared or declared.startswith("Request"):
            continue
        if of_query != ("Body(" in declared):
            keys.add(argument.arg)
    reader = "getlist" if of_query else "get"
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = ast.unparse(call.func.value)
            is_read = call.func.attr == reader and owner.endswith(
                "query_params" if of_query else "body"
            )
            if is_read and isinstance(call.args[0], ast.Constant):
                keys.add(str(call.args[0].value))
    return keys


def _constants(tree: ast.Module, name: str) -> set[str]:
    """Return the strings of the module's constant `name`. Raises LookupError without it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            parts = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            return {str(part.value) for part in parts}
    raise LookupError(f"there is no {name}")


# ---- packages


def _download(package: Package, folder: Path) -> Path:
    request = urllib.request.Request(_INDEX.format(name=package.name), headers=_JSON)
    with urllib.request.urlopen(request, timeout=120) as answer:
        files = {each["filename"]: each["url"] for each in json.load(answer)["files"]}
    path = folder / package.file
    urllib.request.urlretrieve(files[package.file], path)
    return path


def _texts(path: Path, names: set[str]) -> dict[str, str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name).decode() for name in names}
    texts = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if str(PurePosixPath(member.name)) in names and (file := archive.extractfile(member)):
                texts[member.name] = file.read().decode()
    return texts


def peer_keys(folder: Path) -> dict[str, object]:
    """Return the contents of peer_keys.json: which packages have each key of each request.

    Downloads packages that `folder` lacks.
    """
    keys: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for package in PACKAGES:
        path = folder / package.file
        path = path if path.is_file() else _download(package, folder)
        sources = [source for source in SOURCES if source.package == package.name]
        files = {source.file for source in sources}
        if package.name == _REMOVED[0]:
            files.add(_REMOVED[1])
        texts = _texts(path, {f"{package.root}/{file}" for file in files})
        trees = {file: ast.parse(texts[f"{package.root}/{file}"]) for file in files}
        for source in sources:
            found = keys_of(trees[source.file], source)
            if package.name == _REMOVED[0] and source.route in (_COMPLETION, _CHAT):
                found |= _constants(trees[_REMOVED[1]], _REMOVED[2])
            for key in found:
                if package.name not in (known := keys[source.route][key]):
                    known.append(package.name)
    return {
        "packages": {package.name: package.version for package in PACKAGES},
        "keys": {
            route: {key: sorted(known) for key, known in sorted(of_route.items())}
            for route, of_route in sorted(keys.items())
        },
    }


# ---- the page


def page() -> str:
    """Return the text of docs/reference/http-fields.md, from peer_keys.json and our structs."""
    peers = json.loads(PEER_KEYS.read_text(encoding="utf-8"))
    names = [f"{name} {version}" for name, version in peers["packages"].items()]
    counts, sections = [], []
    for place, struct in _places().items():
        statuses = fields.statuses(struct)
        kinds = [type(status) for status in statuses.values()]
        of_peers = len(peers["keys"].get(place, ()))
        numbers = (of_peers, *map(kinds.count, (type(None), fields.Neutral, fields.Refused)))
        counts.append(f"| {_title(place)} | {' | '.join(map(str, numbers))} |")
        sections += ["", f"## {_title(place)}", "", *_section(statuses)]
    return "\n".join(
        [*_INTRODUCTION.format(peers=", ".join(names)).splitlines(), *counts, *sections, ""]
    )


_INTRODUCTION = """\
# Fields of HTTP requests

Each field that {peers} have is one of these:

- **Served.** It does here what it does there.
- **Neutral.** It may be sent with any value and changes nothing, for the reason that is given.
- **Refused.** It is answered by 400 with its name and the remedy. Values that ask for nothing may
  be sent: null, and false and empty ones, or in place of those the values that are given.

A misspelled field is refused, and the answer names the nearest one: a `temprature` that is dropped
would be a run at another temperature. Any other field that is not listed here is ignored where it
asks for text or tokens, so that later versions of clients are served; the server's log names it
once. Operations on the engines refuse it. `GET /openapi.json` has all fields with their types.

`scripts/http_fields.py` makes this page from the structs that decode requests. It makes the list of
the fields of other servers and clients from their released packages. A test compares the two.

| request | fields elsewhere | served | neutral | refused |
|---|---|---|---|---|
"""


def _places() -> dict[str, type[Fields]]:
    """Return the structs of bodies, nested objects and queries, with keys like `Source.route`."""
    found: dict[str, type[Fields]] = {}
    for route in routes_of(PROTOCOLS):
        start = f"{route.method} {route.path}"
        for place, struct in ((start, route.body), (f"{start} ?", route.query)):
            if struct is not None and struct.__struct_fields__:
                found.setdefault(place, struct)
                for name, inner in fields.nested(struct).items():
                    found.setdefault(f"{place} {name}", inner)
    return found


def _title(place: str) -> str:
    method, path, *inner = place.split()
    return f"{method} {path}" + "".join(", query" if name == "?" else f", {name}" for name in inner)


def _section(statuses: dict[str, Status]) -> Iterator[str]:
    served = [f"`{name}`" for name, status in statuses.items() if status is None]
    yield f"Served: {', '.join(served)}." if served else "No field is served."
    by_status: defaultdict[str, list[str]] = defaultdict(list)
    for name, status in statuses.items():
        if status is not None:
            by_status[_about(status)].append(f"`{name}`")
    if by_status:
        yield from ("", "| field | what becomes of it |", "|---|---|")
    for about, names in by_status.items():
        yield f"| {', '.join(names)} | {about} |"


def _about(status: Neutral | Refused) -> str:
    if isinstance(status, Neutral):
        return f"neutral: {status.reason}"
    unless = " or ".join(f"`{json.dumps(value)}`" for value in status.unless)
    return f"refused{unless and f' unless {unless}'}: {status.remedy}"


def main() -> int:
    """Write or compare the page or the list. Returns the exit status: 1 if `--check` differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("peers", "page"))
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--folder", type=Path, help="folder of the packages, kept between calls")
    given = parser.parse_args()
    if given.what == "page":
        path, text = PAGE, page()
    else:
        with tempfile.TemporaryDirectory() as folder:
            keys = peer_keys(given.folder or Path(folder))
        path, text = PEER_KEYS, json.dumps(keys, indent=1) + "\n"
    if not given.check:
        path.write_text(text, encoding="utf-8")
        return 0
    is_same = path.is_file() and text == path.read_text(encoding="utf-8")
    print(f"{path} is {'up to date' if is_same else 'out of date: run this without --check'}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
