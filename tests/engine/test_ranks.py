"""An engine of several rank processes gives the results of one process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from rollout import EngineState, SamplingParams
from rollout.control.reports import WeightChecksums
from rollout.errors import ConfigError, LockstepError, ModelError, RemoteError, WeightUpdateError
from rollout.models.checkpoints.loading import build_model
from rollout.parallel.channel import LeadChannel
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.tensor_parallel import start as ranks
from rollout.tensor_parallel.executor import TensorParallelExecutor
from rollout.tensor_parallel.follower import Follower
from rollout.worker.loading import LoadedModel, load_model
from tests.engine.inboxes import Command, random_config, random_inbox
from tests.engine.random_engines import VOCAB
from tests.engine.trace import trace_decisions
from tests.fakes import values_of
from tests.inspected_engine import InspectedEngine
from tests.lora_adapters import random_adapter
from tests.run_seed import run_seed
from tests.tiny_mixtures import MIXTURES
from tests.tiny_models import (
    BLOCK_SIZE,
    IS_LONG,
    drain,
    pool_gb,
    prompt_of,
    tiny_engine,
    tiny_model,
)

NUM_SCHEDULES = 50 if IS_LONG else 3
LOGPROB_TOLERANCE = 1e-4
PROJECTION = "model.layers.0.mlp.down_proj"
# Heads that are cut and heads that all ranks have, experts, a norm over all heads, a tied head.
FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {"num_key_value_heads": 1}),
    ("qwen3_moe", MIXTURES["qwen3_moe"]),
    ("olmo2", {"tie_word_embeddings": True}),
)


@cache
def model_of(family: int, index: int) -> Any:
    name, changes = FAMILIES[family]
    return tiny_model(name, seed=index, std=0.4, vocab_size=VOCAB, **changes)


@contextmanager
def engine_of(model: Any, size: int = 2, **config: Any) -> Iterator[InspectedEngine]:
    blocks = config.pop("num_blocks", 64), config.get("block_size_tokens", BLOCK_SIZE)
    # To read a model of transformers, another process would have to import that.
    engine = tiny_engine(
        build_model(deepcopy(model)),
        tensor_parallel_size=size,
        num_threads=1,
        buffer_size_gb=pool_gb(model, *blocks),
        **config,
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def executor_of(engine: InspectedEngine) -> TensorParallelExecutor:
    assert isinstance(engine.executor, TensorParallelExecutor)
    return engine.executor


# ---- two ranks equal one


def live(
    family: int, size: int, config: dict[str, Any], inbox: list[Command]
) -> tuple[dict[int, DynamicInferenceRequest], list[object], WeightChecksums]:
    """What an engine makes of the whole inbox: its requests, its plans, and its weights at the
    end."""
    with engine_of(model_of(family, 0), size, **config) as engine:
        decisions = trace_decisions(engine)
        ended = [record for command in inbox for record in command(engine)]
        assert engine.state is EngineState.RUNNING
        finished = {record.request_id: record.merge() for record in ended} | drain(engine)
        plans = [values_of(d.schedule.plan) for d in decisions if d.schedule.plan is not None]
        return finished, plans, engine.weight_checksums()


@pytest.mark.parametrize("number", range(NUM_SCHEDULES))
def test_two_ranks_equal_one_over_random_schedules(number: int) -> None:
    rng = random.Random(run_seed() + number)
    family = number % len(FAMILIES)
    config = random_config(rng)
    inbox = random_inbox(
        rng, lambda index: dict(model_of(family, index).named_parameters()), length=16
    )
    expected, plans_of_one, checksums_of_one = live(family, 1, config, inbox)
    if model_of(family, 0).config.num_key_value_heads == 1:
        config["num_blocks"] *= 2  # each rank has a copy of the only head
    found, plans, checksums = live(family, 2, config, inbox)
    assert checksums == checksums_of_one
    assert plans == plans_of_one
    assert found.keys() == expected.keys()
    for request_id, request in found.items():
        other = expected[request_id]
        assert request.generated_tokens == other.generated_tokens
        assert request.policy_spans == other.policy_spans
        assert request.kv_spans == other.kv_spans
        assert request.finish_reason == other.finish_reason
        if request.generated_tokens:
            given, wanted = request.generated_log_probs, other.generated_log_probs
            assert torch.allclose(
                torch.as_tensor(given), torch.as_tensor(wanted), rtol=0, atol=LOGPROB_TOLERANCE
            )


def test_num_blocks_is_limited_by_the_rank_with_the_least_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_more_room(*arguments: Any) -> LoadedModel:
        loaded = load_model(*arguments)
        return replace(loaded, sizes=replace(loaded.sizes, num_blocks=loaded.sizes.num_blocks + 88))

    monkeypatch.setattr(ranks, "load_model", with_more_room)
    with engine_of(model_of(0, 0), num_blocks=64) as engine:
        # The head that both ranks have lies twice in the memory of 64 blocks.
        assert engine.build.sizes.num_blocks == engine.kv.num_blocks < 88


@pytest.mark.parametrize("size", [3, 2**70])
def test_tensor_parallel_size_that_does_not_fit_is_refused_before_a_process_starts(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ChildProcess", None)
    refused = pytest.raises((ModelError, ConfigError), match=f"_size={size}")
    with refused, engine_of(model_of(0, 0), size):
        pass


def test_stats_ranks_have_their_numbers_and_add_up() -> None:
    adapter = random_adapter(dict(model_of(0, 0).named_parameters()), [PROJECTION])
    with engine_of(model_of(0, 0), 1) as alone:
        alone.update_weights(adapter, in_flight=True)
        (whole,) = alone.stats().ranks
    with engine_of(model_of(0, 0)) as engine:
        add_requests(engine)
        engine.step()
        engine.update_weights(adapter, in_flight=True)
        engine.pause()
        engine.suspend("offload")
        stats, memory = engine.stats(), engine.memory_status()
        assert [use.rank for use in stats.ranks] == [0, 1]
        assert all(use.rss_bytes > 0 < use.cpu_seconds for use in stats.ranks)
        assert sum(use.wait_seconds for use in stats.ranks) > 0
        assert stats.lora_base_bytes == memory.lora_base_bytes == whole.lora_base_bytes > 0
        metrics = stats.as_metrics()
        for name, expected in (
            ("weights_bytes", memory.resident_bytes["weights"]),
            ("kv_bytes", memory.resident_bytes["kv_cache"]),
            ("kv_on_host_bytes", memory.bytes_on_host["kv_cache"]),
            ("lora_base_bytes", memory.lora_base_bytes),
        ):
            of_ranks = [getattr(use, name) for use in stats.ranks]
            assert sum(of_ranks) == metrics[f"engine/{name}"] == expected
            assert [metrics[f"engine/rank_0.{rank}/{name}"] for rank in (0, 1)] == of_ranks
        assert memory.bytes_on_host["kv_cache"] > 0
        engine.resume()
    assert whole.rank == 0
    assert engine.stats().ranks == ()  # the others have ended


# ---- a rank that fails, alone


PARAMS = SamplingParams(num_tokens_to_generate=12, seed=1, temperature=1.0, return_log_probs=True)


def expected_tokens() -> list[list[int]]:
    with engine_of(model_of(0, 0), 1) as engine:
        return tokens_of_all(engine)


def tokens_of_all(engine: InspectedEngine) -> list[list[int]]:
    add_requests(engine)
    return [request.generated_tokens for _, request in sorted(drain(engine).items())]


def add_requests(engine: InspectedEngine) -> None:
    for length in (3, 9, 14):
        engine.add_request([token % VOCAB for token in prompt_of(length)], PARAMS)


def change_command(
    channel: LeadChannel, command: Callable[..., Any], change: Callable[..., tuple[Any, ...]]
) -> list[Any]:
    """The next `command` reaches the other rank with changed arguments. Returns a list that then
    has it."""
    send, changed = channel.send, list[Any]()

    def send_changed(sent: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if sent is command and not changed:
            changed.append(sent)
            arguments = change(*arguments)
        return send(sent, *arguments, **named)

    channel.send = send_changed  # type: ignore[method-assign, assignment]
    return changed


def test_a_forward_pass_that_fails_on_rank_0_alone_is_run_again() -> None:
    with engine_of(model_of(0, 0)) as engine:
        add_requests(engine)
        engine.step()
        failures = [ZeroDivisionError("only here")]

        def fail_once(*_: Any) -> None:
            if failures:
                raise failures.pop()

        engine.build.model.register_forward_pre_hook(fail_once)
        found = [request.generated_tokens for _, request in sorted(drain(engine).items())]
        assert not failures
        assert engine.stats().num_failed_steps == 1
    assert found == expected_tokens()


def test_a_forward_pass_that_fails_on_another_rank_alone_is_run_again() -> None:
    with engine_of(model_of(0, 0)) as engine:
        changed = change_command(
            executor_of(engine)._channel,
            Follower.run_step,
            lambda plan: (replace(plan, rows=plan.rows + 1_000_000),),
        )
        found = tokens_of_all(engine)
        assert changed
        assert engine.stats().num_failed_steps == 1
    assert found == expected_tokens()


def test_a_rank_that_draws_other_tokens_ends_the_engine() -> None:
    with engine_of(model_of(0, 0)) as engine:
        add_requests(engine)
        engine.step()
        change_command(
            executor_of(engine)._channel,
            Follower.run_step,
            lambda plan: (replace(plan, sample_positions=plan.sample_positions + 99),),
        )
        with pytest.raises(LockstepError, match="rank 1 drew other tokens than rank 0"):
            drain(engine)


def test_update_weights_refused_by_one_rank_changes_no_rank() -> None:
    with engine_of(model_of(0, 0)) as engine:
        before = engine.weights_checksum()
        change_command(
            executor_of(engine)._staging,
            Follower.stage,
            lambda key, source, *others: (key, replace(source, address="/proc/0/fd/0"), *others),
        )
        with pytest.raises(WeightUpdateError, match=r"rank 1: .*cannot be opened"):
            engine.update_weights(model_of(0, 1), in_flight=True)
        assert engine.weights_checksum() == before
        assert engine.weights_version == 0
        engine.update_weights(model_of(0, 1), in_flight=True)
        assert engine.weights_version == 1
        assert engine.weights_checksum() != before


def test_commit_weights_that_fails_on_another_rank_is_rolled_back_on_all() -> None:
    with engine_of(model_of(0, 0)) as engine:
        add_requests(engine)
        engine.step()
        before = engine.weights_checksum()
        staged = engine.stage_weights(model_of(0, 1))
        change_command(
            executor_of(engine)._channel,
            Follower.commit_staged,
            lambda key, version: (key + 99, version),
        )
        with pytest.raises(RemoteError, match="KeyError: rank 1"):
            engine.commit_weights(staged, in_flight=True)
        assert engine.weights_version == 0
        assert engine.weights_checksum() == before
        engine.commit_weights(staged, in_flight=True)
        assert engine.weights_version == 1
        assert engine.weights_checksum() == staged.checksum != before
        assert len(drain(engine)) == 3


def test_commit_weights_that_fails_on_rank_0_is_rolled_back_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of(model_of(0, 0)) as engine:
        before = engine.weights_checksum()
        staged = engine.stage_weights(model_of(0, 1))
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> int:
                raise WeightUpdateError("no room")

            patch.setattr(engine.build.weights, "commit", fail)
            with pytest.raises(WeightUpdateError, match="no room"):
                engine.commit_weights(staged, in_flight=True)
        assert engine.weights_checksum() == before
        engine.commit_weights(staged, in_flight=True)
        assert engine.weights_checksum() == staged.checksum


# ---- a rank that ends


def test_a_killed_rank_ends_the_engine_and_no_request_is_lost() -> None:
    with engine_of(model_of(0, 0)) as engine:
        add_requests(engine)
        engine.step()
        (pid,) = executor_of(engine).pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LockstepError, match=rf"rank 1 \(process {pid}\) has ended"):
            drain(engine)
        for call in (
            engine.step,
            engine.weights_checksum,
            engine.memory_status,
        ):
            with pytest.raises(LockstepError, match="create a new engine"):
                call()
        with pytest.raises(LockstepError):
            engine.update_weights(model_of(0, 1), in_flight=True)
        left = [engine.get_record(request_id) for request_id in engine.request_ids()]
        assert len(left) == 3
        assert not any(record.current.failed() for record in left)


def test_a_rank_that_is_stopped_ends_the_engine_at_the_deadline() -> None:
    with engine_of(model_of(0, 0), tensor_parallel_timeout_s=4.0) as engine:
        add_requests(engine)
        engine.step()
        (pid,) = executor_of(engine).pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LockstepError, match=r"\b4 s"):
            drain(engine)
        with pytest.raises(ProcessLookupError):  # nor is it left behind
            os.kill(pid, 0)


def test_check_ranks_names_a_rank_killed_while_idle() -> None:
    with engine_of(model_of(0, 0)) as engine:
        engine.check_ranks()
        (pid,) = executor_of(engine).pids
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(LockstepError, match="has ended"):
            engine.check_ranks()
        engine.shutdown()
        engine.check_ranks()  # no rank is missed after a shutdown


def test_set_generation_epoch_refuses_a_version_before_it_asks_the_ranks() -> None:
    with engine_of(model_of(0, 0)) as engine:
        engine.pause()
        (pid,) = executor_of(engine).pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WeightUpdateError, match="above the current version 0"):
            engine.set_generation_epoch(0)
        assert engine.weights_version == 0
        with pytest.raises(LockstepError, match="has ended"):
            engine.set_generation_epoch(1)


def test_shutdown_ends_all_ranks() -> None:
    with engine_of(model_of(0, 0)) as engine:
        add_requests(engine)
        engine.step()
        (pid,) = executor_of(engine).pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
