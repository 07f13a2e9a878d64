"""LLM with `pg_collection`: processes of a trainer that make the same calls are one engine, and
none waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import LLM, AsyncLLM, DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.errors import (
    ConfigError,
    EngineStateError,
    InvalidRequestError,
    LockstepError,
    ModelError,
    RemoteError,
    WeightUpdateError,
)
from rollout.models.checkpoints.loading import build_model
from tests.apis.spmd_ranks import TrainerRanks, trainer_ranks
from tests.engine.random_engines import VOCAB
from tests.tiny_models import BLOCK_SIZE, pool_gb, prompt_of, tiny_model

LOGPROB_TOLERANCE = 1e-4
PROMPTS = [[token % VOCAB for token in prompt_of(length)] for length in (3, 9, 14)]
PARAMS = SamplingParams(num_tokens_to_generate=12, seed=1, temperature=1.0, return_log_probs=True)


@cache
def model_of(index: int) -> Any:
    return tiny_model("qwen3", seed=index, std=0.4, vocab_size=VOCAB)


def weights_of(index: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model_of(index).named_parameters()}


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "block_size_tokens": BLOCK_SIZE,
        "buffer_size_gb": pool_gb(model_of(0), 64, BLOCK_SIZE),
        "dtype": "float32",
        **changes,
    }


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerRanks]:
    """Those of a trainer, for tests that end none of them."""
    with trainer_ranks(tmp_path_factory.mktemp("trainer")) as ranks:
        yield ranks


def make(ranks: TrainerRanks, **changes: Any) -> None:
    model = build_model(deepcopy(model_of(0)))
    assert ranks.make(model, **config_of(**changes)) == [None, None]


@pytest.fixture
def ranks(processes: TrainerRanks) -> Iterator[TrainerRanks]:
    """They have an LLM, which ends with the test."""
    make(processes)
    yield processes
    assert processes.call("shutdown") == [None, None]
    assert processes.call("sum_ranks") == [3, 3]


@pytest.fixture
def mortal_ranks(tmp_path: Path) -> Iterator[TrainerRanks]:
    """Processes of one test, which have an LLM."""
    with trainer_ranks(tmp_path) as ranks:
        make(ranks)
        yield ranks


@contextmanager
def one_process(**changes: Any) -> Iterator[LLM]:
    with LLM(build_model(deepcopy(model_of(0))), **config_of(**changes)) as llm:
        yield llm


def tokens(requests: list[Any]) -> list[list[int]]:
    return [request.generated_tokens for request in requests]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert tokens(found) == tokens(expected)
    for request, other in zip(found, expected, strict=True):
        assert request.policy_spans == other.policy_spans
        assert request.kv_spans == other.kv_spans
        assert torch.allclose(
            torch.as_tensor(request.generated_log_probs),
            torch.as_tensor(other.generated_log_probs),
            rtol=0,
            atol=LOGPROB_TOLERANCE,
        )


# ---- the same calls on all ranks


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_pg_collection_ranks_return_the_results_of_one_process(
    ranks: TrainerRanks, mode: str
) -> None:
    def life(call: Callable[..., list[Any]]) -> list[list[Any]]:
        """What each call has returned on each rank."""
        results = [call("submit", PROMPTS, PARAMS, 2), call("collect", 1)]
        call("pause")
        call("suspend", mode, ("kv_cache", "weights"))
        call("resume", "weights")
        results.append(call("update_weights", weights_of(1)))
        call("resume")
        call("unpause")
        return [*results, call("collect"), call("generate", PROMPTS[0], PARAMS)]

    with one_process() as llm:
        expected = life(lambda method, *given: [getattr(llm, method)(*given)])
        checksum = llm.weights_checksum()
    found = life(ranks.call)
    assert ranks.call("weights_checksum") == [checksum, checksum]
    assert ranks.call("read") == [("running", 1)] * 2
    ids, early, update, late, request = (result[0] for result in expected)
    for rank in range(2):
        own_ids, own_early, own_update, own_late, own_request = (result[rank] for result in found)
        assert own_ids == ids
        for group, other in zip(own_early + own_late, early + late, strict=True):
            assert group.group_id == other.group_id
            assert_alike(group.requests, other.requests)
        assert (own_update.version, own_update.checksum) == (update.version, update.checksum)
        assert_alike([own_request], [request])


def test_pg_collection_update_weights_gathers_sharded_weights(
    ranks: TrainerRanks,
) -> None:
    with one_process() as llm:
        llm.pause()
        checksum = llm.update_weights(weights_of(1)).checksum
    ranks.call("pause")
    reports = ranks.call("push_shards", weights_of(1))
    assert [report.checksum for report in reports] == [checksum, checksum]
    assert ranks.call("read") == [("paused", 1)] * 2


def test_pg_collection_abort_ends_a_group_on_all_ranks(ranks: TrainerRanks) -> None:
    (first, second, third), _ = ranks.call("submit", PROMPTS, PARAMS)
    aborted = ranks.call("abort", [second])
    assert [[group.group_id for group in groups] for groups in aborted] == [[second]] * 2
    assert all(groups[0].requests[0].failed() for groups in aborted)
    collected = ranks.call("collect")
    assert [{group.group_id for group in groups} for groups in collected] == [{first, third}] * 2


def test_pg_collection_of_one_rank_is_an_engine_of_one_process() -> None:
    alone = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    with one_process() as expected, one_process(pg_collection=alone) as llm:
        assert_alike(llm.generate(PROMPTS, PARAMS), expected.generate(PROMPTS, PARAMS))
        assert not llm.engine.has_unfinished_requests()


# ---- errors, after which the ranks go on


def test_pg_collection_raises_an_error_of_rank_0_on_all_ranks(
    ranks: TrainerRanks,
) -> None:
    for refused, kind in (
        (("generate", [[VOCAB + 1]], PARAMS), InvalidRequestError),
        (("update_weights", weights_of(1)), EngineStateError),
        (("set_generation_epoch", 5), EngineStateError),
    ):
        own, received = ranks.call(*refused)
        assert type(own) is type(received) is kind
        assert str(received) == f"rank 0: {own}"
    with one_process() as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    for found in ranks.call("generate", PROMPTS, PARAMS):
        assert_alike(found, expected)


@pytest.mark.parametrize("failing", [0, 1])
def test_pg_collection_update_weights_that_fails_on_one_rank_changes_nothing(
    ranks: TrainerRanks, failing: int
) -> None:
    before = ranks.call("weights_checksum")
    ranks.call("pause")
    errors = ranks.call("push_or_fail", weights_of(1), failing, "raise")
    for error in errors:
        assert isinstance(error, WeightUpdateError)
        assert "the trainer's disk is gone" in str(error)
    assert f"rank {failing}: " in str(errors[1])
    assert ranks.call("weights_checksum") == before
    reports = ranks.call("update_weights", weights_of(1))
    assert [report.version for report in reports] == [1, 1]
    ranks.call("unpause")
    for requests in ranks.call("generate", PROMPTS, PARAMS):  # no step had to be run again
        assert not any(e.type.name == "ERROR_TRANSIENT" for r in requests for e in r.events)


def test_pg_collection_refuses_different_methods_and_arguments(
    ranks: TrainerRanks,
) -> None:
    for error in ranks.call_each([("generate", PROMPTS, PARAMS), ("pause",)]):
        assert isinstance(error, EngineStateError)
        assert "rank 0 called generate, rank 1 called pause" in str(error)
    others = [*PROMPTS[:2], PROMPTS[2][:-1]]
    for error in ranks.call_each([("generate", PROMPTS, PARAMS), ("generate", others, PARAMS)]):
        assert isinstance(error, EngineStateError)
        assert "ranks 0 and 1 have called generate with different prompts" in str(error)
    first, second = ranks.call("generate", PROMPTS, PARAMS)
    assert tokens(first) == tokens(second)
    assert all(tokens(first))


# ---- a rank that ends


def test_pg_collection_call_of_rank_0_names_a_killed_rank(mortal_ranks: TrainerRanks) -> None:
    own, killed = mortal_ranks.ranks
    mortal_ranks.call("pause")
    for rank in mortal_ranks.ranks:
        rank.begin("push_or_fail", weights_of(1), 1, "exit")
    error = own.end()
    assert isinstance(error, LockstepError)
    assert f"rank 1 (process {killed.pid}) has ended" in str(error)
    error = own.call("generate", PROMPTS, PARAMS)
    assert isinstance(error, LockstepError)
    assert "create a new engine" in str(error)
    assert own.call("shutdown") is None


def test_pg_collection_call_of_other_ranks_ends_with_a_killed_rank_0(
    mortal_ranks: TrainerRanks,
) -> None:
    lead, other = mortal_ranks.ranks
    other.begin("generate", PROMPTS, PARAMS)
    os.kill(lead.pid, signal.SIGKILL)
    for error in (other.end(), other.call("generate", PROMPTS, PARAMS)):
        assert isinstance(error, LockstepError)
        assert "rank 0 has ended" in str(error)
    assert other.call("shutdown") is None


def test_pg_collection_interrupted_rank_ends_the_engine_for_all(ranks: TrainerRanks) -> None:
    ranks.call("pause")
    own, interrupted = ranks.call("push_or_fail", weights_of(1), 1, "interrupt")
    assert isinstance(own, LockstepError)
    assert "it raised KeyboardInterrupt()" in str(own)
    assert isinstance(interrupted, RemoteError)
    for error in ranks.call("resume"):
        assert isinstance(error, LockstepError)
        assert "create a new engine" in str(error)


@pytest.mark.parametrize("stopped", [0, 1])
def test_pg_collection_stopped_rank_ends_the_engine_at_the_deadline(
    ranks: TrainerRanks, stopped: int
) -> None:
    ranks.call("hurry", 1.0)
    waiting = ranks.ranks[1 - stopped]
    os.kill(ranks.ranks[stopped].pid, signal.SIGSTOP)
    try:
        error = waiting.call("generate", PROMPTS, PARAMS)
    finally:
        os.kill(ranks.ranks[stopped].pid, signal.SIGCONT)
    assert isinstance(error, LockstepError)
    assert f"rank {stopped} " in str(error)
    assert "1 s" in str(error)
    for each in ranks.call("generate", PROMPTS, PARAMS):
        assert isinstance(each, LockstepError)


@pytest.mark.parametrize("first", [0, 1])
def test_pg_collection_shutdown_of_one_rank_ends_calls_of_the_other(
    ranks: TrainerRanks, first: int
) -> None:
    calls: list[Any] = [("generate", PROMPTS, PARAMS)] * 2
    calls[first] = ("shutdown",)
    answers = ranks.call_each(calls)
    assert answers[first] is None
    assert isinstance(answers[1 - first], LockstepError)
    assert "shut" in str(answers[1 - first])


# ---- the start


def test_pg_collection_llm_that_fails_on_one_rank_fails_on_all(processes: TrainerRanks) -> None:
    model = build_model(deepcopy(model_of(0)))
    for error in processes.make(model, {"max_requests": 3}, **config_of()):
        assert isinstance(error, ConfigError)
        assert "max_requests=None on rank 0" in str(error)
        assert "3 on rank 1" in str(error)


def test_pg_collection_refuses_a_model_that_ranks_cannot_divide(
    processes: TrainerRanks,
) -> None:
    model = tiny_model("qwen3", vocab_size=VOCAB, num_attention_heads=3, num_key_value_heads=3)
    for error in processes.make(build_model(model), **config_of()):
        assert isinstance(error, ModelError)
        assert "tensor_parallel_size=2" in str(error)


def test_pg_collection_needs_an_llm_on_every_rank() -> None:
    of_two = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    model = build_model(deepcopy(model_of(0)))
    with pytest.raises(ConfigError, match="needs an LLM, whose methods all 2 ranks call"):
        DynamicInferenceEngine.from_model(model, InferenceConfig(pg_collection=of_two))
    with pytest.raises(ConfigError, match="pg_collection needs LLM without a coordinator"):
        AsyncLLM(model, pg_collection=of_two)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 contradicts the 2 ranks"):
        LLM(model, pg_collection=of_two, tensor_parallel_size=3)
