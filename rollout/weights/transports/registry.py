"""Weight transports by name: creates the trainer's transport, and fetches pushes for an engine.

`rollout.apis.weight_push` calls `transport_of`. `rollout.apis.engine_process` creates a
WeightFetcher, which the engine's agent (`rollout.coordinator.agent`) calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import structs
from torch import Tensor

from rollout.addresses import LOOPBACK
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


def transport_of(
    named: str | WeightTransport | None,
    *,
    reject_non_finite: bool,
    own_host: Callable[[], str] = lambda: LOOPBACK,
) -> WeightTransport:
    """Return the transport with the name `named`. A WeightTransport is returned itself.

    Names are "shared" (the default if `named` is None), "directory:PATH", "collective",
    "collective:HOST" and "cuda_ipc". All names except "shared" can have the prefix "delta+".
    `own_host` returns the host at which engines reach this machine, for "collective" without a
    HOST. Raises ConfigError for any other name, and if the transport cannot be created.
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
        raise ConfigError(
            f"weight_transport={named!r} is not supported; use {', '.join(_FORMS)}; all but the "
            f"first may have the prefix {_DELTA!r}"
        )
    if changes_only:
        return DeltaTransport(carrier, reject_non_finite=reject_non_finite)
    return carrier


class WeightFetcher:
    """Fetches the tensors of WeightsSources for one engine. Keeps connections, and for deltas a
    copy of the tensors."""

    def __init__(self) -> None:
        receiver = CollectiveReceiver()
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
        tensors = self._fetch(source) if source.builds_on is None else self._mirror.fetch(source)
        if source.lora is None:
            return tensors
        return LoraAdapter(tensors=tensors, **structs.asdict(source.lora))

    def _fetch(self, source: WeightsSource) -> dict[str, Tensor]:
        fetch = self._by_kind.get(source.kind)
        if fetch is None:
            raise WeightUpdateError(
                f"weights of kind {source.kind!r} cannot be fetched; supported kinds: "
                f"{', '.join(sorted(self._by_kind))}"
            )
        return fetch(source)
