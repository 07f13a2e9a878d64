"""Weight transports by name: creates the trainer's transport, and fetches pushes for an engine.

`rollout.apis.weight_push` calls `transport_of`. `rollout.apis.engine_process` creates a
WeightFetcher, which the engine's agent (`rollout.coordinator.agent`) calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType

from msgspec import structs
from torch import Tensor

from rollout.addresses import LOOPBACK
from rollout.config import ENGINE_PACKAGES
from rollout.errors import ConfigError, WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import WeightsSource
from rollout.weights.transports.base import WeightTransport
from rollout.weights.transports.collective import (
    CollectiveReceiver,
    CollectiveTransport,
    CudaIpcTransport,
)
from rollout.weights.transports.delta import DeltaTransport, WeightMirror
from rollout.weights.transports.directory import DirectoryTransport, fetch_directory
from rollout.weights.transports.shared import SharedTransport, fetch_shared
from rollout.weights.update import NamedTensors

_DELTA = "delta+"
_FORMS = ("shared", "directory:PATH", "collective", "collective:HOST", "cuda_ipc")
Fetch = Callable[[WeightsSource], NamedTensors]


def transport_of(
    named: str | WeightTransport | None,
    *,
    reject_non_finite: bool,
    own_host: Callable[[], str] = lambda: LOOPBACK,
    engine: str | None = None,
) -> WeightTransport:
    """Return the transport with the name `named`. A WeightTransport is returned itself.

    Names are "shared" (the default if `named` is None), "directory:PATH", "collective",
    "collective:HOST" and "cuda_ipc". All names except "shared" can have the prefix "delta+".
    "ENGINE:NAME" is a transport of the package with this engine, such as "vllm:nccl". `engine` is
    the name of the fleet's engines; None if it is unknown. `own_host` returns the host at which
    engines reach this machine, for a transport that needs one and names none. Raises ConfigError
    for any other name, for a transport of another engine, and if the transport cannot be created.
    """
    if named is None:
        named = "shared"
    if not isinstance(named, str):
        return named
    changes_only = named.startswith(_DELTA)
    kind, _, argument = named.removeprefix(_DELTA).partition(":")
    if kind == "shared" and not argument and not changes_only:
        return SharedTransport(reject_non_finite=reject_non_finite)
    carrier: DirectoryTransport | CollectiveTransport
    # A DeltaTransport checks the values itself.
    checks = reject_non_finite and not changes_only
    if kind == "directory" and argument:
        carrier = DirectoryTransport(argument, reject_non_finite=checks)
    elif kind == "cuda_ipc" and not argument:
        carrier = CudaIpcTransport(reject_non_finite=checks)
    elif kind == "collective":
        carrier = CollectiveTransport(argument or own_host(), reject_non_finite=checks)
    else:
        if not changes_only:
            of_package = _package_transport(kind, argument, engine)
            if of_package is not None:
                return of_package(argument, own_host=own_host, reject_non_finite=reject_non_finite)
        raise ConfigError(
            f"weight_transport={named!r} is not supported; use {', '.join(_FORMS)}; all but the "
            f"first may have the prefix {_DELTA!r}. With engine='vllm': vllm:gloo, vllm:nccl, "
            "vllm:ipc"
        )
    if changes_only:
        return DeltaTransport(carrier, reject_non_finite=reject_non_finite)
    return carrier


def _package_transport(
    kind: str, argument: str, engine: str | None
) -> Callable[..., WeightTransport] | None:
    """Return `make_weight_transport` of the package whose engine is called `kind`; None if there is
    no such package. Raises ConfigError if the fleet's engines are others."""
    points = {point.name: point for point in entry_points(group=ENGINE_PACKAGES)}
    if kind not in points:
        return None
    if engine not in (None, kind):
        raise ConfigError(
            f"weight_transport='{kind}:{argument}' needs engines that receive it: engine={kind!r}, "
            f"not {engine!r}; use {', '.join(_FORMS)}"
        )
    module = import_module(points[kind].module)
    make: Callable[..., WeightTransport] | None = getattr(module, "make_weight_transport", None)
    return make


class WeightFetcher:
    """Fetches the tensors of WeightsSources for one engine. Keeps connections, and for deltas a
    copy of the tensors."""

    def __init__(self, of_engine: Mapping[str, Fetch] = MappingProxyType({})) -> None:
        """`of_engine` has the engine's own `weight_fetchers`."""
        receiver = CollectiveReceiver()
        self._of_engine = of_engine
        self._by_kind: Mapping[str, Callable[[WeightsSource], dict[str, Tensor]]] = {
            SharedTransport.kind: fetch_shared,
            DirectoryTransport.kind: fetch_directory,
            CollectiveTransport.kind: receiver.fetch,
            CudaIpcTransport.kind: receiver.fetch,
        }
        self._mirror = WeightMirror(self._fetch)

    def __call__(self, source: WeightsSource) -> NamedTensors:
        """Return the tensors of `source`, or its adapter. The next call can change them. Raises
        WeightUpdateError if they cannot be fetched or do not match `source`."""
        if (fetch := self._of_engine.get(source.kind)) is not None:
            return fetch(source)
        tensors = self._fetch(source) if source.builds_on is None else self._mirror.fetch(source)
        if source.lora is None:
            return tensors
        return LoraAdapter(tensors=tensors, **structs.asdict(source.lora))

    def _fetch(self, source: WeightsSource) -> dict[str, Tensor]:
        fetch = self._by_kind.get(source.kind)
        if fetch is None:
            raise WeightUpdateError(
                f"weights of kind {source.kind!r} cannot be fetched by this engine; supported "
                f"kinds: {', '.join(sorted({*self._by_kind, *self._of_engine}))}"
            )
        return fetch(source)
