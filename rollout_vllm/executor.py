"""VllmExecutor: the weights in vLLM's workers; updates are verified before vLLM is touched.

`rollout_vllm.engine` makes it; Engine and VllmSuspension use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
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
from rollout.weights.lora_merge import gathered
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
from rollout_vllm.adapters import BaseWeights, check_targets, merged_weights
from rollout_vllm.live_module import LiveModule
from rollout_vllm.ranks import require_workers
from rollout_vllm.reload import drop_partial_load, repair_reload
from rollout_vllm.stamps import StampingScheduler
from rollout_vllm.transfer_receiver import AnnouncedWeights, WeightReceiver

_SHARED_MEMORY = Path("/dev/shm")  # where vLLM's worker processes read an update


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensors:
    """A verified update: whole tensors by name, and their fingerprints.

    Announced tensors are on the meta device, and arrive during the commit: then the fingerprints
    are empty, and the checksum is the sender's.

    base: the weights below an adapter, or below the next one; None if they are not kept. follows:
    for an adapter on the served base, the number of commits before it was staged; None otherwise.
    """

    tensors: Mapping[str, Tensor]
    fingerprints: Mapping[str, Fingerprint]
    base: BaseWeights | None
    follows: int | None
    checksum: str
    started_at: float
    seconds: float


class VllmExecutor:
    """Implements `Executor` and `ServingWeights` over vLLM's workers.

    An update is checked against the names and shapes of the checkpoint's tensors, and hashed, while
    the old weights are served. The commit lets each worker load it in place. vLLM cannot take a
    load back: if one fails, `has_values` is False, no step runs, and a full update repairs it.

    Checksums cover the tensors in the checkpoint's format, before vLLM fuses or quantises them.

    An adapter is merged into its base: the checkpoint, or the last full update if `keeps_base`, or
    the base that comes with it. All weights are loaded again.
    """

    def __init__(
        self,
        core: EngineCore,
        directory: Path,
        version: int,
        *,
        reject_non_finite: bool,
        keeps_base: bool,
    ) -> None:
        self._core, self._rejects, self._keeps_base = core, reject_non_finite, keeps_base
        self._scheduler: StampingScheduler = core.scheduler
        self.receiver = WeightReceiver(core)
        # Its tensors are served until the first update.
        self._checkpoint: Checkpoint | None = Checkpoint.open(directory)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._checkpoint.items()}
        self._are_floats = {name: t.is_floating_point() for name, t in self._checkpoint.items()}
        self._fingerprints: Mapping[str, Fingerprint] = {}
        self._base: BaseWeights | None = None  # copies; the checkpoint is not copied
        self._num_commits = 0
        model = core.vllm_config.model_config
        is_tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
        self._tied_size = model.get_vocab_size() if is_tied else None
        self.has_values = self.is_finite = True
        self.is_resident, self._is_closed = True, False
        self._live = LiveModule(directory)
        self._fault_of_reload = "".join({*core.collective_rpc(repair_reload)})
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
        if self._fault_of_reload:
            raise WeightUpdateError(
                f"engine='vllm' cannot update this model: {self._fault_of_reload}. Start a new "
                "engine from the new weights"
            )
        num_commits, follows = self._num_commits, None
        base: BaseWeights | None
        tensors: Mapping[str, Tensor]
        fingerprints: Mapping[str, Fingerprint]
        if isinstance(named_tensors, LoraAdapter):
            tensors, fingerprints, base = self._adapted(named_tensors, check, source_checksum)
            follows = num_commits if named_tensors.base is None else None
        elif isinstance(named_tensors, AnnouncedWeights):
            tensors, fingerprints, base = self._announced(named_tensors), {}, None
        else:
            tensors, fingerprints = self._whole(named_tensors, check, source_checksum)
            base = BaseWeights.copied(tensors, fingerprints) if self._keeps_base else None
        return StagedTensors(
            tensors=tensors,
            fingerprints=fingerprints,
            base=base,
            follows=follows,
            checksum=checksum_of(fingerprints) if fingerprints else source_checksum,
            started_at=start,
            seconds=time.perf_counter() - start,
        )

    def _announced(self, announced: AnnouncedWeights) -> AnnouncedWeights:
        """Verify names, shapes and dtypes, and that the sender has found no NaN or infinity."""
        _check_names(announced, self._shapes, "model's directory")
        if self._rejects and not announced.is_finite:
            raise WeightUpdateError(
                "a tensor of the push holds NaN or infinity; the serving weights are kept. "
                "reject_non_finite_weights=False accepts it"
            )
        for name, tensor in announced.items():
            self._check_form(name, tensor, self._shapes[name])
        return announced

    def _whole(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str = ""
    ) -> tuple[dict[str, Tensor], dict[str, Fingerprint]]:
        """Return all tensors of a full update as the checkpoint has them, and their fingerprints.
        `source_checksum` covers the tensors as they were given; "" skips the comparison."""
        given = by_name(named_tensors)
        unknown = given.keys() - self._shapes.keys()
        is_live = bool(unknown) and not unknown.isdisjoint(self._live.shapes)
        tensors = self._read(given, self._live.shapes if is_live else self._shapes, check)
        fingerprints = self._hashed(tensors, check)
        if source_checksum:
            check_checksum(fingerprints, source_checksum)
        if is_live:
            with blaming("splitting the tensors as the model's directory does"):
                tensors = self._read(self._live.to_checkpoint(tensors), self._shapes, check)
            fingerprints = self._hashed(tensors, check)
        return tensors, fingerprints

    def _adapted(
        self, adapter: LoraAdapter, check: Callable[[], None], source_checksum: str
    ) -> tuple[dict[str, Tensor], dict[str, Fingerprint], BaseWeights]:
        """Return all weights with the adapter merged in, their fingerprints, and its base."""
        check_targets(adapter.pairs(), self._shapes, self._tied_size)
        with blaming("gathering the adapter"):
            adapter = replace(adapter, tensors=gathered(adapter.tensors))
        own = self._hashed(adapter.tensors, check)
        if source_checksum:
            check_checksum(own, source_checksum)
        if adapter.base is None:
            base = self._served_base()
        else:
            base = BaseWeights.copied(*self._whole(adapter.base, check))
        changed = merged_weights(base.tensors, adapter.pairs(), check)
        fingerprints = {**base.fingerprints, **self._hashed(changed, check)}
        return {**base.tensors, **changed}, fingerprints, base

    def _served_base(self) -> BaseWeights:
        """Return the served weights without their adapter."""
        self.require_values("stage an adapter")
        if self._base is not None:
            return self._base
        if self._checkpoint is None:
            raise WeightUpdateError(
                "the base of this adapter, the last full update, was not kept: make the engine "
                "with engine_options={'enable_lora': True}, or push LoraAdapter(..., base=...) "
                "with all weights"
            )
        fingerprints = self._served_fingerprints()
        tensors = dict(self._checkpoint.items())
        return BaseWeights(tensors=tensors, fingerprints=fingerprints, num_bytes=0)

    def _hashed(
        self, tensors: Mapping[str, Tensor], check: Callable[[], None]
    ) -> dict[str, Fingerprint]:
        """Return the fingerprints of tensors. Raises WeightUpdateError for NaN or infinity."""
        fingerprints = dict(_fingerprints(tensors.items(), check))
        for name, (_, num_bad) in fingerprints.items():
            if num_bad and self._rejects:
                raise WeightUpdateError(
                    f"{name!r} holds NaN or infinity; the serving weights are kept. "
                    "reject_non_finite_weights=False accepts it"
                )
        return fingerprints

    def _read(
        self,
        given: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        check: Callable[[], None],
    ) -> dict[str, Tensor]:
        """Return whole plain tensors, sorted by name. Raises WeightUpdateError unless they have the
        names and shapes in `shapes`."""
        _check_names(given, shapes, "model's directory or of its module")
        tensors: dict[str, Tensor] = {}
        with blaming() as blame:
            for name in sorted(given):  # gathering is a collective, in one order on all ranks
                check()
                blame.culprit = f"reading {name!r}"
                if reason := refusal(given[name]):
                    raise WeightUpdateError(f"{name!r} {reason}")
                self._check_form(name, given[name], shapes[name])
                tensors[name] = full_tensor(given[name]).detach()
        return tensors

    def _check_form(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Raise WeightUpdateError for a wrong shape, and for integers in place of floats."""
        if tuple(tensor.shape) != shape:
            raise WeightUpdateError(
                f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(shape)}"
            )
        if tensor.is_floating_point() != self._are_floats.get(name, tensor.is_floating_point()):
            kind = "a floating one" if self._are_floats[name] else "of integers"
            raise WeightUpdateError(f"{name!r} has dtype {tensor.dtype}, but the model's is {kind}")

    def commit_weights(self, staged: StagedTensors, version: int | None) -> int:
        version = next_version(self.version, version)
        if staged.follows is not None:
            self.require_values("commit an adapter")
            if staged.follows != self._num_commits:
                raise WeightUpdateError(
                    "other weights were committed after this adapter was staged; stage it again"
                )
        with self._loadable(staged) as load:  # the last call that may fail without harm
            has_failed, self.has_values = not self.has_values, False
            self._num_commits += 1
            try:
                if has_failed:
                    self._core.collective_rpc(drop_partial_load)
                fingerprints = load()
            except Exception as error:
                raise WeightUpdateError(
                    f"vLLM failed to load the update ({type(error).__name__}: {error}); its "
                    "weights are mixed, so that no step runs until a full update is committed"
                ) from error
        self.has_values = True
        self.is_finite = not any(num_bad for _, num_bad in fingerprints.values())
        self._fingerprints, self._checkpoint = fingerprints, None
        self._base = staged.base
        self._set(version)
        return sum(tensor.nbytes for tensor in staged.tensors.values())

    @contextmanager
    def _loadable(self, staged: StagedTensors) -> Iterator[Callable[[], Mapping[str, Fingerprint]]]:
        """Bring the tensors to where all workers reach them. Yields the function that lets the
        workers load them in place, and returns the tensors' fingerprints. Raises WeightUpdateError
        if the tensors cannot be brought there."""
        if isinstance(staged.tensors, AnnouncedWeights):
            self.receiver.join(staged.tensors)
            yield partial(self._receive, staged.tensors, staged.checksum)
        elif isinstance(self._core.model_executor, UniProcExecutor):
            tensors = iter(staged.tensors.items())
            yield partial(self._reload, staged, weights_iterator=tensors)
        else:
            with _file_of(staged.tensors) as directory:
                yield partial(self._reload, staged, weights_path=directory)

    def _receive(self, announced: AnnouncedWeights, checksum: str) -> Mapping[str, Fingerprint]:
        fingerprints: Mapping[str, Fingerprint] = self.receiver.receive(announced)
        if (found := checksum_of(fingerprints)) != checksum:
            raise WeightUpdateError(
                f"the tensors that arrived have the checksum {found}, not {checksum} as announced"
            )
        return fingerprints

    def _reload(self, staged: StagedTensors, **source: Any) -> Mapping[str, Fingerprint]:
        self._core.collective_rpc("reload_weights", kwargs=source)
        return staged.fingerprints

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
        if self._checkpoint is not None and not self._fingerprints:
            self._fingerprints = dict(_fingerprints(self._checkpoint.items()))
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
                lora_base_bytes=self.num_base_bytes,
                rss_bytes=process_bytes(),
                cpu_seconds=time.process_time(),
                wait_seconds=0.0,
            ),
        )

    @property
    def num_base_bytes(self) -> int:
        """Bytes of host copies of the weights below adapters."""
        return 0 if self._base is None else self._base.num_bytes

    def _kv_bytes(self) -> int:
        return sum(t.size for t in self._scheduler.kv_cache_config.kv_cache_tensors)

    def kv_data_ptrs(self) -> dict[str, int]:
        return {}

    def check_ranks(self) -> None:
        require_workers(self._core.model_executor)

    def close(self) -> None:
        if not self._is_closed:
            self._core.shutdown()
            self._is_closed = True


def _check_names(
    given: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], owner: str
) -> None:
    """Raise WeightUpdateError unless the tensors have the names in `shapes`. `owner`: whose names
    the update may have, for the error."""
    for kind, names in (
        ("lacks", shapes.keys() - given.keys()),
        ("has the unknown", given.keys() - shapes.keys()),
    ):
        if names:
            listed = ", ".join(repr(name) for name in sorted(names)[:3])
            raise WeightUpdateError(
                f"the update {kind} {len(names)} of the checkpoint's tensors ({listed}); send "
                f"all tensors under the names of the {owner}"
            )


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


@contextmanager
def _file_of(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a directory with the tensors in shared memory, which worker processes map: tensors are
    neither pickled nor copied for each. Raises WeightUpdateError if it cannot be written."""
    with ExitStack() as stack:
        try:
            made = TemporaryDirectory(prefix="rollout-vllm-", dir=_SHARED_MEMORY)
            directory = stack.enter_context(made)
            on_host = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
            save_file(_without_shared_memory(on_host), Path(directory) / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(
                f"the update cannot be written to {_SHARED_MEMORY}, where vLLM's worker processes "
                f"read it: {error}; the serving weights are kept. Make it larger, such as by "
                "docker's --shm-size"
            ) from error
        yield directory


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with a copy of each that shares memory with one before it."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return separate
