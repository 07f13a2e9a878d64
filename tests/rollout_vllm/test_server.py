"""engine="vllm-server" beside a real vLLM server: versions, updates, faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout import EngineStateError, InferenceConfig, SamplingParams, WeightUpdateError
from rollout.engine.engine import Engine
from rollout.errors import LockstepError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout_vllm.server.client import VllmServer
from tests.contracts.vllm_engines import HAS_VLLM, directory_of, vllm_model, vllm_weights
from tests.rollout_vllm.replay import Replay
from tests.rollout_vllm.vllm_server import ServerProcess, vllm_server

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

pytestmark = pytest.mark.timeout(1800)
NUM_NEW = 300
PARAMS = SamplingParams(
    num_tokens_to_generate=NUM_NEW, return_log_probs=True, termination_id=-1, seed=7
)
GREEDY = SamplingParams(
    num_tokens_to_generate=NUM_NEW, return_log_probs=True, termination_id=-1, temperature=0.0
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with vllm_server(tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    with_server = engine_beside(server)
    yield with_server
    with_server.shutdown()


def engine_beside(server: ServerProcess, **fields: Any) -> Engine:
    from rollout_vllm.server.engine import make_engine

    fields = {"engine_options": {"url": server.url}, "seed": 0, **fields}
    config = InferenceConfig(engine="vllm-server", **fields)
    return make_engine(directory_of(), config)


def client_of(engine: Engine) -> VllmServer:
    client: VllmServer = engine._executor._server
    return client


def progress(engine: Engine) -> dict[int, int]:
    """Return the number of tokens of each request whose record was not returned yet."""
    ids = engine.request_ids()
    return {i: engine.get_record(i).merge().num_generated_tokens for i in ids}


def run_until(engine: Engine, num_tokens: int) -> list[DynamicInferenceRequestRecord]:
    """Step until a request has so many tokens, or all have ended."""
    records: list[DynamicInferenceRequestRecord] = []
    while engine.has_unfinished_requests() and max(progress(engine).values()) < num_tokens:
        records += engine.step()
        engine.check_integrity(may_be_in_flight=True)
    return records


def hold(
    engine: Engine, *params: SamplingParams
) -> tuple[list[int], list[DynamicInferenceRequestRecord]]:
    """Pause the server while a request of each `params` runs, and take the tokens until then.
    Returns the requests' ids, and records of requests that the server ended earlier."""
    records: list[DynamicInferenceRequestRecord] = []
    for _ in range(50):
        ids = [engine.add_request([5 + i] * 40, each) for i, each in enumerate(params)]
        records += run_until(engine, 5)
        client_of(engine).call("POST", "/pause?mode=keep")
        num_idle = 0
        while num_idle < 10:  # tokens that are on their way
            before = progress(engine)
            records += engine.step()
            num_idle = num_idle + 1 if progress(engine) == before else 0
        if all(0 < progress(engine).get(i, 0) < NUM_NEW for i in ids):
            return ids, records
        client_of(engine).call("POST", "/resume")  # the server was quicker
        records += run_until(engine, NUM_NEW + 1)
    raise AssertionError("the server has ended all requests first")


def resume(engine: Engine) -> None:
    client_of(engine).call("POST", "/resume")


def test_tokens_of_a_vllm_server_are_of_their_recorded_versions(server: ServerProcess) -> None:
    """With the bound 0 all KV is as new as its token's policy, so that each log-prob is known."""
    engine = engine_beside(server, max_kv_staleness_versions=0)
    replay = Replay(lambda version: vllm_model(seed=version))
    try:
        ids, records = hold(engine, GREEDY, PARAMS, GREEDY)
        engine.update_weights(vllm_weights(1), 1, in_flight=True)
        more, ended = hold(engine, PARAMS)
        records += ended
        engine.update_weights(vllm_weights(2), 2, in_flight=True)
        records += run_until(engine, NUM_NEW + 1)
        assert {*ids, *more} <= {record.request_id for record in records}
        for record in records:
            replay.check(record)
            request = record.merge()
            assert request.num_generated_tokens == NUM_NEW
            assert request.kv_versions_are_bounds
            assert request.policy_versions.tolist() == list(request.context_kv_version_min)
        versions = {r.request_id: set(r.merge().policy_versions.tolist()) for r in records}
        assert all(versions[i] >= {0, 1} for i in ids)
        assert all(versions[i] == {1, 2} for i in more)
        assert replay.num_tokens == len(records) * NUM_NEW
        print(f"worst log-prob gap {replay.worst_gap:.1e}")
        assert replay.worst_gap < 1e-4
    finally:
        engine.shutdown()


def test_max_kv_staleness_versions_bounds_kv_of_a_vllm_server(server: ServerProcess) -> None:
    engine = engine_beside(server, max_kv_staleness_versions=1)
    try:
        records = []
        for version in (1, 2, 3):
            records += hold(engine, GREEDY)[1]
            engine.update_weights(vllm_weights(version), version, in_flight=True)
        records += run_until(engine, NUM_NEW + 1)
        ages = [
            policy - oldest
            for request in (record.merge() for record in records)
            for policy, oldest in zip(
                request.policy_versions.tolist(), request.context_kv_version_min, strict=True
            )
        ]
        assert len(ages) == len(records) * NUM_NEW
        assert max(ages) == 1
    finally:
        engine.shutdown()


def test_stage_weights_refuses_a_bad_update_before_the_vllm_server_is_touched(
    engine: Engine,
) -> None:
    name = "model.norm.weight"
    good = vllm_weights(1)
    bad = {
        "lacks 1 of": {n: t for n, t in good.items() if n != name},
        "holds NaN": {**good, name: torch.full_like(good[name], torch.nan)},
        "has shape": {**good, name: good[name][:3]},
    }
    label = client_of(engine).call("GET", "/weight_info")
    for message, tensors in bad.items():
        with pytest.raises(WeightUpdateError, match=message):
            engine.update_weights(tensors, in_flight=True)
    assert engine.weights_version == 0
    assert client_of(engine).call("GET", "/weight_info") == label


def test_load_that_fails_pauses_the_vllm_server_until_a_full_update(engine: Engine) -> None:
    (held,), _ = hold(engine, GREEDY)
    staged: Any = engine.stage_weights(vllm_weights(1))
    shutil.rmtree(staged.directory)
    with pytest.raises(WeightUpdateError, match="stays paused until a full update"):
        engine.commit_weights(staged, in_flight=True)
    assert client_of(engine).call("GET", "/is_paused") == {"is_paused": True}
    with pytest.raises(EngineStateError, match="cannot step"):
        engine.step()
    engine.update_weights(vllm_weights(1), 1, in_flight=True)
    (record,) = run_until(engine, NUM_NEW + 1)
    assert record.request_id == held
    assert set(record.merge().policy_versions.tolist()) == {0, 1}


def test_requests_fail_if_somebody_else_updates_the_vllm_server(engine: Engine) -> None:
    hold(engine, GREEDY)
    client_of(engine).call("POST", "/update_weight_version", {"new_version": "other"})
    resume(engine)
    (record,) = run_until(engine, NUM_NEW + 1)
    assert record.current.failed()
    with pytest.raises(LockstepError, match="somebody else has updated it"):
        engine.check_ranks()


def test_step_raises_when_the_vllm_server_hangs(server: ServerProcess) -> None:
    engine = engine_beside(server, engine_options={"url": server.url, "timeout_s": 30})
    try:
        hold(engine, GREEDY)
        os.killpg(server.process.pid, signal.SIGSTOP)
        with pytest.raises(LockstepError, match="no answer within 30 s"):
            run_until(engine, NUM_NEW + 1)
        assert engine.has_unfinished_requests()  # so that another engine continues them
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
        resume(engine)
        engine.shutdown()


def test_abort_request_ends_a_request_of_a_vllm_server(engine: Engine) -> None:
    (aborted, kept), _ = hold(engine, GREEDY, GREEDY)
    assert engine.abort_request(aborted).current.finish_reason == "abort"
    resume(engine)
    (record,) = run_until(engine, NUM_NEW + 1)
    assert record.request_id == kept
    assert record.current.succeeded()


def test_stop_token_ids_and_top_n_follow_the_vllm_server(engine: Engine) -> None:
    engine.add_request([9] * 20, GREEDY)
    (whole,) = run_until(engine, NUM_NEW + 1)
    tokens = whole.merge().generated_tokens
    stop = tokens[30]
    params = SamplingParams(
        num_tokens_to_generate=NUM_NEW,
        temperature=0.0,
        stop_token_ids=(stop,),
        top_n_logprobs=2,
        return_log_probs=True,
        termination_id=-1,
    )
    engine.add_request([9] * 20, params)
    (record,) = run_until(engine, NUM_NEW + 1)
    request = record.merge()
    assert request.generated_tokens == tokens[: tokens.index(stop) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert request.generated_top_n_logprobs is not None
    for token, top in zip(tokens, request.generated_top_n_logprobs, strict=False):
        assert top is not None
        assert [token, len(top)] == [next(iter(top)), 2]  # greedy: the first one is sampled
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_suspend_recompute_continues_requests_of_a_vllm_server(engine: Engine) -> None:
    hold(engine, GREEDY)
    engine.pause()
    assert engine.suspend("recompute").num_requests_requeued == 1
    engine.resume()
    engine.unpause()
    resume(engine)
    (record,) = run_until(engine, NUM_NEW + 1)
    assert record.merge().num_generated_tokens == NUM_NEW
    assert len(record.requests) == 2


def test_explain_says_that_kv_versions_of_a_vllm_server_are_bounds(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout.cli.main import main
    from rollout_vllm.server.engine import make_engine

    monkeypatch.setattr("rollout.apis.spmd.make_engine", make_engine)
    options = json.dumps({"url": server.url})
    words = [f"model={directory_of()}", "engine=vllm-server", f"engine_options={options}"]
    assert main(["explain", *words, "max_kv_staleness_versions=2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    promises = {fact["name"]: fact["value"] for fact in shown["promises"]}
    assert promises["KV versions"] == "bounds, not exact: KV is at most 2 versions old"
