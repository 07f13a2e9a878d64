"""VllmExecutor: the weights in vLLM's workers; updates are verified before vLLM is touched.

`rollout_vllm.engine` makes it; Engine and VllmSuspension use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import UniProcExecutor

from rollout.errors import EngineStateError, WeightUpdateError
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
from rollout_vllm.adapters import BaseWeights, check_targets, merged_weights
from rollout_vllm.live_module import LiveModule
from rollout_vllm.ranks import require_workers
from rollout_vllm.reload import drop_partial_load, repair_reload
from rollout_vllm.stamps import StampingScheduler
from rollout_vllm.transfer_receiver import AnnouncedWeights, WeightReceiver
from rollout_vllm.verified import VerifiedWeights, check_names, save_tensors

_SHARED_MEMORY = Path("/dev/shm")  # where vLLM's worker processes read an update
_OWNER = "model's directory or of its module"  # whose names an update may have


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


class VllmExecutor(VerifiedWeights):
    """Implements `Executor` and `ServingWeights` over vLLM's workers.

    An update is checked against the names and shapes of the checkpoint's tensors, and hashed, while
    the old weights are served. The commit lets each worker load it in place. vLLM cannot take a
    load back: if one fails, `has_values` is False, no step runs, and a full update repairs it.

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
        super().__init__(directory, reject_non_finite=reject_non_finite)
        self._core, self._keeps_base = core, keeps_base
        self._scheduler: StampingScheduler = core.scheduler
        self.receiver = WeightReceiver(core)
        self._base: BaseWeights | None = None  # copies; the checkpoint is not copied
        self._num_commits = 0
        model = core.vllm_config.model_config
        is_tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
        self._tied_size = model.get_vocab_size() if is_tied else None
        self.is_resident = True
        self._live = LiveModule(directory)
        self._fault_of_reload = "".join({*core.collective_rpc(repair_reload)})
        self._set(version)

    def _set(self, version: int) -> None:
        self.version = self._scheduler.version = version
        self._core.set_weight_version(str(version))

    # ---- the weights that are served

    def require_values(self, what: str) -> None:
        if not self.has_values:
            raise EngineStateError(
                f"cannot {what}: the weights were discarded, or an update failed halfway; commit a "
                "full update"
            )

    def require_resident(self, what: str) -> None:
        if not self.is_resident:
            raise EngineStateError(f"cannot {what}: the weights are released; resume first")

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
        check_names(announced, self._shapes, "model's directory")
        if not announced.is_finite:
            self._reject_non_finite("a tensor of the push")
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
        shapes = self._live.shapes if is_live else self._shapes
        tensors = self._read(given, shapes, check, _OWNER)
        fingerprints = self._hashed(tensors, check)
        if source_checksum:
            check_checksum(fingerprints, source_checksum)
        if is_live:
            with blaming("splitting the tensors as the model's directory does"):
                split = self._live.to_checkpoint(tensors)
                tensors = self._read(split, self._shapes, check, _OWNER)
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
        self._set_served(fingerprints)
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

    # ---- ranks

    @property
    def num_base_bytes(self) -> int:
        return 0 if self._base is None else self._base.num_bytes

    def _kv_bytes(self) -> int:
        return sum(t.size for t in self._scheduler.kv_cache_config.kv_cache_tensors)

    def check_ranks(self) -> None:
        require_workers(self._core.model_executor)

    def close(self) -> None:
        if not self._is_closed:
            self._core.shutdown()
            self._is_closed = True


@contextmanager
def _file_of(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a directory with the tensors in shared memory, which worker processes map: tensors are
    neither pickled nor copied for each. Raises WeightUpdateError if it cannot be written."""
    with ExitStack() as stack:
        try:
            made = TemporaryDirectory(prefix="rollout-vllm-", dir=_SHARED_MEMORY)
            directory = stack.enter_context(made)
            save_tensors(tensors, Path(directory))
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(
                f"the update cannot be written to {_SHARED_MEMORY}, where vLLM's worker processes "
                f"read it: {error}; the serving weights are kept. Make it larger, such as by "
                "docker's --shm-size"
            ) from error
        yield directory
