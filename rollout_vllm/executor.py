"""VllmExecutor: the weights in vLLM's workers; updates are verified before vLLM is touched.

`rollout_vllm.engine` makes it; Engine and VllmSuspension use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import Tensor
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import UniProcExecutor

from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.models.checkpoints.reader import WEIGHTS_FILE, Checkpoint
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.telemetry import RankUse
from rollout.weights.fingerprints import fingerprint_on
from rollout.weights.lora import LoraAdapter
from rollout.weights.update import (
    Fingerprint,
    NamedTensors,
    blaming,
    by_name,
    check_checksum,
    checksum_of,
)
from rollout.weights.version import next_version
from rollout.worker.worker import process_bytes
from rollout_vllm.stamps import StampingScheduler
from rollout_vllm.tied_heads import prepare_tied_heads
from rollout_vllm.transfer_receiver import AnnouncedWeights, WeightReceiver

_SHARED_MEMORY = Path("/dev/shm")  # where vLLM's worker processes read an update


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensors:
    """A verified update: whole tensors by name, and their fingerprints.

    Announced tensors are on the meta device, and arrive during the commit: then the fingerprints
    are empty, and the checksum is the sender's.
    """

    tensors: Mapping[str, Tensor]
    fingerprints: Mapping[str, Fingerprint]
    checksum: str
    started_at: float
    seconds: float


class VllmExecutor:
    """Implements `Executor` and `ServingWeights` over vLLM's workers.

    An update is checked against the names and shapes of the checkpoint's tensors, and hashed, while
    the old weights are served. The commit lets each worker load it in place. vLLM cannot take a
    load back: if one fails, `has_values` is False, no step runs, and a full update repairs it.

    Checksums cover the tensors in the checkpoint's format, before vLLM fuses or quantises them.
    """

    def __init__(
        self, core: EngineCore, directory: Path, version: int, *, reject_non_finite: bool
    ) -> None:
        self._core, self._rejects = core, reject_non_finite
        self._scheduler: StampingScheduler = core.scheduler
        self.receiver = WeightReceiver(core)
        # Its tensors are served until the first update.
        self._checkpoint: Checkpoint | None = Checkpoint.open(directory)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._checkpoint.items()}
        self._are_floats = {name: t.is_floating_point() for name, t in self._checkpoint.items()}
        self._fingerprints: Mapping[str, Fingerprint] = {}
        self.has_values = self.is_finite = True
        self.is_resident, self._is_closed = True, False
        self._set(version)

    def _set(self, version: int) -> None:
        self.version = self._scheduler.version = version
        self._core.set_weight_version(str(version))

    # ---- the weights that are served

    @property
    def weights(self) -> VllmExecutor:
        return self

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def require_values(self, what: str) -> None:
        if not self.has_values:
            raise EngineStateError(
                f"cannot {what}: the weights were discarded, or an update failed halfway; commit a "
                "full update"
            )

    def require_resident(self, what: str) -> None:
        if not self.is_resident:
            raise EngineStateError(f"cannot {what}: the weights are released; resume first")

    def data_ptrs(self) -> dict[str, int]:
        return {}  # vLLM fuses the tensors

    # ---- updates

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedTensors:
        start = time.perf_counter()
        if self._core.vllm_config.model_config.get_num_experts():
            raise WeightUpdateError(
                "engine='vllm' does not update mixtures of experts: vLLM's reload was seen to "
                "leave wrong experts on a CPU. Start a new engine from the new weights"
            )
        if isinstance(named_tensors, LoraAdapter):
            raise WeightUpdateError(
                "engine='vllm' takes whole weights only; push merged_tensors(model) of "
                "trainer_hooks.weight_sync in place of the adapter"
            )
        if isinstance(named_tensors, AnnouncedWeights):
            return self._staged_announcement(named_tensors, source_checksum, start)
        given = by_name(named_tensors)
        self._check_names(given)
        tensors: dict[str, Tensor] = {}
        with blaming() as blame:
            for name in sorted(given):  # gathering is a collective, in one order on all ranks
                check()
                blame.culprit = f"reading {name!r}"
                self._check_form(name, given[name])
                tensors[name] = full_tensor(given[name]).detach()
        fingerprints = dict(_fingerprints(tensors.items(), check))
        for name, (_, num_bad) in fingerprints.items():
            if num_bad and self._rejects:
                raise WeightUpdateError(
                    f"{name!r} holds NaN or infinity; the serving weights are kept. "
                    "reject_non_finite_weights=False accepts it"
                )
        if source_checksum:
            check_checksum(fingerprints, source_checksum)
        return StagedTensors(
            tensors=tensors,
            fingerprints=fingerprints,
            checksum=checksum_of(fingerprints),
            started_at=start,
            seconds=time.perf_counter() - start,
        )

    def _staged_announcement(
        self, announced: AnnouncedWeights, checksum: str, start: float
    ) -> StagedTensors:
        """Verify names, shapes and dtypes of tensors whose values the sender has checked."""
        self._check_names(announced)
        for name, tensor in announced.items():
            self._check_shape(name, tensor)
        return StagedTensors(
            tensors=announced,
            fingerprints={},
            checksum=checksum,
            started_at=start,
            seconds=time.perf_counter() - start,
        )

    def _check_names(self, given: Mapping[str, Tensor]) -> None:
        for kind, names in (
            ("lacks", self._shapes.keys() - given.keys()),
            ("has the unknown", given.keys() - self._shapes.keys()),
        ):
            if names:
                listed = ", ".join(repr(name) for name in sorted(names)[:3])
                raise WeightUpdateError(
                    f"the update {kind} {len(names)} of the checkpoint's tensors ({listed}); send "
                    "all tensors under the names of the model's directory"
                )

    def _check_form(self, name: str, tensor: Tensor) -> None:
        if reason := refusal(tensor):
            raise WeightUpdateError(f"{name!r} {reason}")
        self._check_shape(name, tensor)

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self._shapes[name]:
            raise WeightUpdateError(
                f"{name!r} has shape {list(tensor.shape)}, but the model's is "
                f"{list(self._shapes[name])}"
            )
        if tensor.is_floating_point() != self._are_floats[name]:
            kind = "a floating one" if self._are_floats[name] else "of integers"
            raise WeightUpdateError(f"{name!r} has dtype {tensor.dtype}, but the model's is {kind}")

    def commit_weights(self, staged: StagedTensors, version: int | None) -> int:
        version = next_version(self.version, version)
        if isinstance(staged.tensors, AnnouncedWeights):
            self.receiver.join(staged.tensors)  # the last call that may fail without harm
        self.has_values = False
        try:
            fingerprints = self._load(staged)
        except Exception as error:
            raise WeightUpdateError(
                f"vLLM failed to load the update ({type(error).__name__}: {error}); its weights "
                "are mixed, so that no step runs until a full update is committed"
            ) from error
        self.has_values = True
        self.is_finite = not any(num_bad for _, num_bad in fingerprints.values())
        self._fingerprints, self._checkpoint = fingerprints, None
        self._set(version)
        return sum(tensor.nbytes for tensor in staged.tensors.values())

    def _load(self, staged: StagedTensors) -> Mapping[str, Fingerprint]:
        """Let all workers load the tensors in place. Returns the tensors' fingerprints."""
        if isinstance(staged.tensors, AnnouncedWeights):
            fingerprints: Mapping[str, Fingerprint] = self.receiver.receive(staged.tensors)
            if (found := checksum_of(fingerprints)) != staged.checksum:
                raise WeightUpdateError(
                    f"the tensors that arrived have the checksum {found}, not {staged.checksum} as "
                    "announced"
                )
        else:
            self._reload(staged.tensors)
            fingerprints = staged.fingerprints
        self._core.collective_rpc(prepare_tied_heads)
        return fingerprints

    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        if isinstance(self._core.model_executor, UniProcExecutor):
            self._core.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(tensors.items())}
            )
            return
        # Worker processes map one file, so that tensors are neither pickled nor copied for each.
        with TemporaryDirectory(prefix="rollout-vllm-", dir=_SHARED_MEMORY) as directory:
            on_host = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
            save_file(_without_shared_memory(on_host), Path(directory) / WEIGHTS_FILE)
            self._core.collective_rpc("reload_weights", kwargs={"weights_path": directory})

    def set_version(self, version: int) -> None:
        self.require_values("change the version of the weights")
        self._set(next_version(self.version, version))

    # ---- checksums

    def weights_checksum(self) -> str:
        self.require_resident("compute a checksum")
        self.require_values("compute a checksum")
        return checksum_of(self._served_fingerprints())

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        self.require_resident("compute checksums")
        self.require_values("compute checksums")
        found = self._served_fingerprints()
        return {name: f"{found[name][0] % 2**64:016x}" for name in names}

    def _served_fingerprints(self) -> Mapping[str, Fingerprint]:
        if self._checkpoint is not None:
            self._fingerprints = dict(_fingerprints(self._checkpoint.items()))
            self._checkpoint = None
        return self._fingerprints

    # ---- ranks

    def warm_up(self) -> int:
        return 0  # vLLM captures its graphs when it starts

    def rank_uses(self) -> tuple[RankUse, ...]:
        if self._is_closed:
            return ()
        return (
            RankUse(
                kv_bytes=self._kv_bytes(),
                weights_bytes=0,  # vLLM does not report them
                kv_on_host_bytes=0,
                weights_on_host_bytes=0,
                lora_base_bytes=0,
                rss_bytes=process_bytes(),
                cpu_seconds=time.process_time(),
                wait_seconds=0.0,
            ),
        )

    def _kv_bytes(self) -> int:
        return sum(t.size for t in self._scheduler.kv_cache_config.kv_cache_tensors)

    def kv_data_ptrs(self) -> dict[str, int]:
        return {}

    def check_ranks(self) -> None:
        self._core.model_executor.check_health()

    def close(self) -> None:
        if not self._is_closed:
            self._core.shutdown()
            self._is_closed = True


def _fingerprints(
    tensors: Iterable[tuple[str, Tensor]], check: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Fingerprint]]:
    """Yield the fingerprint of each tensor in its own dtype."""
    hash_on = cache(fingerprint_on)
    with blaming() as blame:
        for name, tensor in tensors:
            check()
            blame.culprit = f"checking {name!r}"
            found = hash_on(tensor.device)(tensor, hashed_dtype(tensor.dtype))
            hashed, num_bad = found.tolist()
            yield name, (hashed, num_bad)


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with a copy of each that shares memory with one before it."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return separate
