"""weight_transport="vllm:gloo": vLLM's own weight transfer as the transport of a push.

One engine in this process. The transport sends in a thread, as an AsyncLLM lets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from rollout import EngineStateError, SamplingParams, WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import WeightsSource
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.sent import read
from tests.contracts.vllm_engines import HAS_VLLM, vllm_engine, vllm_model, vllm_weights
from tests.rollout_vllm.replay import Replay

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from rollout_vllm import transfer_receiver
from rollout_vllm.transfer import KIND, Go
from rollout_vllm.transfer_sender import VllmTransport

pytestmark = pytest.mark.timeout(600)
PARAMS = SamplingParams(num_tokens_to_generate=24, return_log_probs=True, termination_id=-1)
MAX_GAP = 1e-4


class Fleet:
    """An engine, and the transport that sends to it. `models`: the model's seed, by version."""

    def __init__(self) -> None:
        self.engine = vllm_engine()
        self.fetch = WeightFetcher(self.engine.weight_fetchers)
        self.transport = VllmTransport("gloo", late_s=1.0)
        self.models = {0: 0}
        self.replay = Replay(lambda version: vllm_model(seed=self.models[version]))

    def publish(self, weights: Any) -> WeightsSource:
        """The source as the coordinator passes it on to one engine."""
        return structs.replace(self.transport.publish(weights), num_members=1)

    def push(self, seed: int, before_commit: Callable[[], object] = lambda: None) -> None:
        """Push the weights of a seed. `before_commit` runs between the vote and the commit."""
        source = self.publish(vllm_weights(seed))
        push = self.transport._push
        assert push is not None
        sending = threading.Thread(target=self._send, args=(push.source,))
        sending.start()
        try:
            tensors, checksum = self.fetch(source), source.tensors_checksum
            staged = self.engine.stage_weights(tensors, source_checksum=checksum)
            before_commit()
            self.engine.commit_weights(staged, in_flight=True)
            self.transport.commit()
        finally:
            self.transport.roll_back()
            sending.join()
        self.models[self.engine.weights_version] = seed
        assert self.engine.weights_checksum() == source.tensors_checksum

    def _send(self, source: WeightsSource) -> None:
        with suppress(WeightUpdateError):  # the engine has an error, too
            self.transport.send(source)

    def generate(self, during: Callable[[], object] = lambda: None) -> list[int]:
        """Compare a request with transformers, by the versions that its record names. `during` runs
        after some of its steps. Returns the versions of its tokens."""
        engine = self.engine
        engine.add_request([3, 1, 4, 1, 5], PARAMS)
        for _ in range(8):
            engine.step()
        during()
        records = []
        while engine.has_unfinished_requests():
            records += engine.step()
        self.replay.check(records[0])
        assert self.replay.worst_gap <= MAX_GAP
        policy = records[0].requests[-1].policy_spans.to_array()
        return sorted({*policy[5:].tolist()})


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.transport.close()
    made.engine.shutdown()


def test_vllm_gloo_brings_weights_in_flight_and_keeps_its_group(fleet: Fleet) -> None:
    first = fleet.engine.weights_version
    fleet.push(1)
    group = fleet.transport._group
    assert fleet.generate(lambda: fleet.push(2)) == [first + 1, first + 2]
    assert fleet.transport._group == group
    assert fleet.generate() == [first + 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, name: w.pop(name), "lacks 1 of the checkpoint's tensors"),
        (lambda w, name: w.update(extra=w[name]), "has the unknown 1 of the checkpoint's"),
        (lambda w, name: w.update({name: w[name][:-1]}), r"has shape \[.*but the model's is"),
        (lambda w, name: w.update({name: w[name].int()}), r"has dtype torch.int32, but the model"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_engine_votes_no_on_an_announcement_that_does_not_fit(
    fleet: Fleet, change: Callable[[dict[str, Tensor], str], object], message: str
) -> None:
    weights = vllm_weights(1)
    change(weights, sorted(weights)[3])
    source, version = fleet.publish(weights), fleet.engine.weights_version
    with pytest.raises(WeightUpdateError, match=message):
        fleet.engine.stage_weights(fleet.fetch(source), source_checksum=source.tensors_checksum)
    fleet.transport.roll_back()
    assert fleet.generate() == [version]


def unfinite() -> Mapping[str, Tensor]:
    weights = vllm_weights(1)
    weights[sorted(weights)[-1]][0] = torch.nan
    return weights


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (unfinite, "holds NaN or infinity"),
        (lambda: iter(vllm_weights(1).items()), "reads the tensors twice"),
        (lambda: LoraAdapter(tensors={}, rank=1, alpha=1.0), "carries whole weights only"),
    ],
    ids=["nan", "iterator", "adapter"],
)
def test_vllm_transport_announces_only_what_it_can_send(
    fleet: Fleet, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        fleet.transport.publish(make())
    assert fleet.transport._push is None


def test_engine_votes_no_on_nan_that_a_connected_trainer_announces(fleet: Fleet) -> None:
    """AsyncLLM.connect does not know the engines' reject_non_finite_weights."""
    transport = VllmTransport("gloo", reject_non_finite=False)
    source = structs.replace(transport.publish(unfinite()), num_members=1)
    with pytest.raises(WeightUpdateError, match="holds NaN or infinity; the serving weights are"):
        fleet.engine.stage_weights(fleet.fetch(source), source_checksum=source.tensors_checksum)
    transport.close()


def test_push_that_is_rolled_back_before_the_commit_leaves_vllm_untouched(fleet: Fleet) -> None:
    version = fleet.engine.weights_version
    with pytest.raises(WeightUpdateError, match="the push was rolled back"):
        fleet.push(1, fleet.transport.roll_back)
    assert fleet.generate() == [version]


class Breaking(dict[str, Tensor]):
    """Tensors of which one cannot be read, once vLLM knows their shapes. vLLM has a part of a fused
    layer by then."""

    is_known = False

    def items(self) -> Any:
        for pair in super().items():
            if self.is_known and ("k_proj" in pair[0] or "up_proj" in pair[0]):
                raise OSError("the trainer broke")
            yield pair
        self.is_known = True


def test_transfer_that_breaks_midway_stops_the_engine_until_the_next_push(fleet: Fleet) -> None:
    version = fleet.engine.weights_version

    def break_sender() -> None:
        push = fleet.transport._push
        assert push is not None
        push.tensors = Breaking(push.tensors)

    with pytest.raises(WeightUpdateError, match="its weights are mixed, so that no step runs"):
        fleet.push(1, break_sender)
    with pytest.raises(EngineStateError, match="an update failed halfway"):
        fleet.engine.weights_checksum()
    assert fleet.engine.weights_version == version
    fleet.push(2)
    assert fleet.generate() == [version + 1]


def test_tensor_that_changes_after_its_announcement_stops_the_engine(fleet: Fleet) -> None:
    def corrupt() -> None:
        push = fleet.transport._push
        assert push is not None
        next(iter(push.tensors.values())).view(-1)[0] += 1.0

    with pytest.raises(WeightUpdateError, match="tensors that arrived have the checksum"):
        fleet.push(1, corrupt)
    fleet.push(1)
    fleet.generate()


def test_engine_that_joins_later_waits_for_the_next_push(fleet: Fleet) -> None:
    fleet.push(2)
    committed = fleet.transport.committed
    assert committed is not None
    assert not committed.is_kept
    with pytest.raises(WeightUpdateError, match="the next push brings them"):
        fleet.fetch(committed)


def test_engine_without_a_gpu_votes_no_on_a_transfer_between_gpus(fleet: Fleet) -> None:
    source = structs.replace(fleet.publish(vllm_weights(1)), kind=f"{KIND}nccl")
    with pytest.raises(WeightUpdateError, match="sends to GPUs, and this engine has none"):
        fleet.fetch(source)
    fleet.transport.roll_back()


def test_send_ends_if_no_engine_commits() -> None:
    """All engines may die after their votes."""
    transport = VllmTransport("gloo", call_timeout_s=0.5)
    source = transport.publish(vllm_weights(1))
    with pytest.raises(WeightUpdateError, match="no engine has begun to commit within") as caught:
        transport.send(source)
    assert caught.value.is_transient
    transport.close()


def test_send_ends_a_push_that_was_rolled_back_before() -> None:
    """An update may fail before the thread of `send` begins. Engines may wait for it by then."""
    transport = VllmTransport("gloo")
    source = transport.publish(vllm_weights(1))
    transport.roll_back()
    transport.send(source)
    key = f"{source.address.split(' ')[1]}/go"
    assert read(transport._store.get(key), Go).fault == "the push was rolled back"
    transport.close()


def test_sender_that_has_ended_is_noticed_before_the_vote(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_receiver, "_CONNECT_S", 0.5)
    transport = VllmTransport("gloo")
    source = structs.replace(transport.publish(vllm_weights(1)), num_members=1)
    transport.close()
    with pytest.raises(WeightUpdateError, match=r"cannot be reached: .*check that the trainer"):
        fleet.fetch(source)


@pytest.mark.parametrize("is_closed", [True, False])
def test_process_ends_if_the_sender_ends_while_nccl_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    """NCCL cannot be interrupted. A closed store raises RuntimeError; otherwise the sender's end is
    the call after the running one, which counts as begun before the thread watches."""
    has_begun, has_ended = threading.Event(), threading.Event()
    watch: Any = transfer_receiver._watch

    def check(keys: list[str]) -> bool:
        if is_closed:
            raise RuntimeError("no connection")
        return keys == ["1-a/call/4"]

    def watch_late(*arguments: Any) -> None:
        assert has_begun.wait(60)
        watch(*arguments, lambda code: has_ended.set())

    announced: Any = SimpleNamespace(push_id="1-a", num_calls=3, backend="nccl")
    announced.store = SimpleNamespace(check=check)
    monkeypatch.setattr(transfer_receiver, "_WATCH_S", 0.01)
    monkeypatch.setattr(transfer_receiver, "_HANG_S", 0.01)
    monkeypatch.setattr(transfer_receiver, "_watch", watch_late)
    with transfer_receiver._watching(announced):
        announced.num_calls += 1
        has_begun.set()
        assert has_ended.wait(60)
