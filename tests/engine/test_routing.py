"""Recorded `routing_indices` are the choices of the model's own routers.

Shape letters: B rows, T positions, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch

from rollout import ConfigError, DynamicInferenceRequest, SamplingParams
from rollout.coordinator.protocol.packed import pack_record, unpack_record
from rollout.requests.record import DynamicInferenceRequestRecord
from tests.inspected_engine import running_ahead
from tests.tiny_mixtures import MIXTURES, corrections_of, own_routing, perturb_routers, tiny_mixture
from tests.tiny_models import (
    drain,
    generate_all,
    prompt_of,
    suspend_and_resume,
    tiny_engine,
    tiny_model,
    tokens_of,
)
from trainer_hooks import collate_rollouts, token_logprobs
from trainer_hooks.losses.replay_routing import replay_routing

FAMILIES = tuple(MIXTURES)
# Between the best of the experts left out and the worst chosen, a smaller gap may be rounding.
MAX_ROUNDED_ROWS = 0.005
PARAMS = SamplingParams(
    num_tokens_to_generate=24, seed=3, return_log_probs=True, logprobs_mode="temperature"
)


def as_sets(routing: torch.Tensor) -> torch.Tensor:
    """Experts in the order of their ids."""
    return routing.sort(dim=-1).values


def assert_is_of_model(model: Any, requests: Sequence[DynamicInferenceRequest]) -> None:
    """Rows are the model's own choice for the whole text, but for those that rounding explains."""
    num_rows = num_others = 0
    for request in requests:
        tokens_BT = torch.tensor([tokens_of(request)])
        routing = request.routing_indices
        assert routing is not None
        expected = own_routing(model, tokens_BT)[0, :-1]
        assert routing.shape == expected.shape
        is_equal = (as_sets(routing) == as_sets(expected)).all(dim=-1)
        num_rows, num_others = num_rows + is_equal.numel(), num_others + int((~is_equal).sum())
    assert num_others <= MAX_ROUNDED_ROWS * num_rows, f"{num_others} of {num_rows} rows differ"


@pytest.mark.drawn(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_tokens": 16, "change_backend": running_ahead},
        {"num_blocks": 12, "max_requests": 4, "enable_prefix_caching": True},
    ],
    ids=["whole", "in chunks, running ahead", "evictions and prefix hits"],
)
def test_routing_indices_are_the_choices_of_the_trainers_routers(
    family: str, config: dict[str, Any]
) -> None:
    model = tiny_mixture(family)
    jobs = [(prompt_of(length)[:length], PARAMS) for length in (1, 7, 30, 45)]
    jobs += [([*prompt_of(30), 5], PARAMS), (prompt_of(30), PARAMS)]
    engine = tiny_engine(model, record_routing=True, **config)
    finished = generate_all(engine, jobs)
    assert_is_of_model(model, finished)
    if "num_blocks" in config:
        assert engine.stats().num_evictions > 0
        assert engine.stats().num_prefix_hit_tokens > 0


def test_routing_indices_of_a_group_share_the_rows_of_the_prompt() -> None:
    model = tiny_mixture()
    engine = tiny_engine(model, record_routing=True)
    params = [SamplingParams(num_tokens_to_generate=9, seed=i) for i in range(4)]
    engine.add_group(prompt_of(13), params)
    finished = drain(engine)
    assert_is_of_model(model, list(finished.values()))
    of_prompt = [request.routing_indices[:12] for request in finished.values()]
    assert all(torch.equal(rows, of_prompt[0]) for rows in of_prompt)


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_routing_indices_of_old_tokens_stay_after_an_update(mode: str) -> None:
    """Rows of tokens sampled before an update are those of the weights that sampled them."""
    old, new = tiny_mixture(), tiny_mixture()
    perturb_routers(new, 1.0)
    engine = tiny_engine(old, record_routing=True)
    request_id = engine.add_request(prompt_of(11), PARAMS)
    for _ in range(10):
        engine.step()
    engine.pause()
    engine.suspend(mode)
    engine.resume()
    engine.update_weights(new)
    engine.unpause()
    request = drain(engine)[request_id]
    assert request.policy_versions.tolist() == [0] * 10 + [1] * 14
    # Token 9 was drawn from position 11 + 9 - 1, the last that the old weights computed.
    tokens_BT = torch.tensor([tokens_of(request)])
    by_old = as_sets(own_routing(old, tokens_BT)[0, :20])
    assert torch.equal(as_sets(request.routing_indices[:20]), by_old)
    by_new = as_sets(own_routing(new, tokens_BT)[0, :-1])
    assert not torch.equal(by_new[:20], by_old)
    if mode == "recompute":  # else the first layer alone is a function of the token
        assert torch.equal(as_sets(request.routing_indices[20:]), by_new[20:])


def test_routing_indices_of_running_and_aborted_requests_are_returned() -> None:
    model = tiny_mixture()
    engine = tiny_engine(model, record_routing=True, max_tokens=8)
    request_id = engine.add_request(prompt_of(20), PARAMS)
    engine.step()
    begun = engine.get_record(request_id).merge()
    assert (begun.routing_indices[:8] >= 0).all(), "a chunk of the prompt"
    assert (begun.routing_indices[8:] == -1).all()
    for _ in range(5):
        engine.step()
    going_on = engine.get_record(request_id).merge()
    assert len(going_on.generated_tokens) == 4
    assert_is_of_model(model, [going_on])
    aborted = engine.abort_request(request_id).merge()
    assert torch.equal(aborted.routing_indices, going_on.routing_indices)


def test_routing_survives_the_wire() -> None:
    model = tiny_mixture()
    engine = tiny_engine(model, record_routing=True)
    request_id = engine.add_request(prompt_of(5), PARAMS)
    engine.step()
    suspend_and_resume(engine, "recompute")
    records = [record for _ in range(PARAMS.num_tokens_to_generate) for record in engine.step()]
    (record,) = records
    assert record.request_id == request_id
    assert len(record.requests) == 2
    routing = record.merge().routing_indices
    assert routing.dtype == torch.int16
    plain = msgpack.unpackb(msgpack.packb(record.serialize()))
    for restored in (
        DynamicInferenceRequestRecord.deserialize(plain),
        unpack_record(pack_record(record)),
    ):
        assert torch.equal(restored.merge().routing_indices, routing)


def test_routing_indices_are_none_without_record_routing() -> None:
    (request,) = generate_all(tiny_engine(tiny_mixture()), [(prompt_of(5), PARAMS)])
    assert request.routing_indices is None


def test_stats_report_routing_bytes() -> None:
    engine = tiny_engine(tiny_mixture(), record_routing=True)
    num_slots = (engine.build.sizes.num_blocks + 1) * engine.build.sizes.block_size
    num_bytes = num_slots * 2 * 2  # a byte for each layer and expert of a token
    assert engine.stats().routing_bytes == engine.memory_status().routing_bytes == num_bytes
    assert tiny_engine(tiny_mixture()).stats().routing_bytes == 0


def test_record_routing_changes_no_token() -> None:
    model, jobs = tiny_mixture(), [(prompt_of(length), PARAMS) for length in (5, 20, 33)]
    plain = generate_all(tiny_engine(model), jobs)
    recorded = generate_all(tiny_engine(model, record_routing=True), jobs)
    assert [r.generated_tokens for r in recorded] == [r.generated_tokens for r in plain]


def test_record_routing_is_refused_for_a_dense_model() -> None:
    with pytest.raises(ConfigError, match="record_routing=True with a 'qwen3' model without exp"):
        tiny_engine(tiny_model("qwen3"), record_routing=True)


# ---- from the engine to the trainer


def logprob_gap(model: Any, batch: Any, routing_BTLK: torch.Tensor | None) -> float:
    """The largest difference between the engine's log-probs and the trainer's."""

    def forward() -> torch.Tensor:
        return token_logprobs(model(input_ids=batch.tokens_BT).logits, batch.tokens_BT)

    with torch.no_grad():
        if routing_BTLK is None:
            logprobs_BT = forward()
        else:
            with replay_routing(model, routing_BTLK):
                logprobs_BT = forward()
    difference_BT = (logprobs_BT - batch.behaviour_logprobs_BT).abs()
    return float(difference_BT[batch.mask_BT].max())


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_closes_the_gap_of_a_trainer_whose_routers_choose_others(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a router with a correction, which only chooses, nothing is left of the gap. Where the
    weights that choose are those that weigh, too, what is left is their own small change.
    """
    model, trainer = tiny_mixture(family), tiny_mixture(family)
    engine = tiny_engine(model, record_routing=True, max_tokens=24)
    jobs = [(prompt_of(length), PARAMS) for length in (3, 18, 40, 41, 42, 43)]
    batch = collate_rollouts(
        generate_all(engine, jobs), [1.0] * len(jobs), train_version=0, routing=True
    )
    exact = logprob_gap(trainer, batch, batch.routing_BTLK)
    chooses_only = bool(corrections_of(trainer))
    perturb_routers(trainer, 0.1 if chooses_only else 0.003)
    without, with_replay = (
        logprob_gap(trainer, batch, routing) for routing in (None, batch.routing_BTLK)
    )
    with capsys.disabled():
        print(
            f"\n{family}: largest gap of log-probs {exact:.1e} with the same routers; with "
            f"perturbed ones {without:.3f} without replay, {with_replay:.1e} with it"
        )
    assert exact < 1e-4
    assert with_replay < (1e-4 if chooses_only else without / 4)
