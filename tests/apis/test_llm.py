"""LLM over an engine of this process: shapes of results, submitted groups, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from rollout import (
    LLM,
    DynamicInferenceRequest,
    EngineState,
    EngineStateError,
    InferenceConfig,
    InvalidRequestError,
    SamplingParams,
)
from tests.tiny_models import BLOCK_SIZE, VOCAB_SIZE, pool_gb, prompt_of, tiny_model

PARAMS = SamplingParams(num_tokens_to_generate=6, seed=3)


@cache
def model() -> Any:
    return tiny_model(seed=8)


def llm_of(hf_model: Any = None, **config: Any) -> LLM:
    fields = {"block_size_tokens": BLOCK_SIZE, "buffer_size_gb": pool_gb(model(), 200)} | config
    return LLM(hf_model or model(), inference_config=InferenceConfig(**fields))


def prompts_of(requests: list[DynamicInferenceRequest]) -> list[list[int]]:
    return [request.prompt_tokens.tolist() for request in requests]


# ---- generate


def test_generate_submit_and_collect_of_nothing_return_nothing() -> None:
    llm = llm_of()
    assert llm.generate([]) == llm.generate([], n=3) == llm.generate([], []) == []
    assert llm.submit([]) == llm.collect() == llm.collect(3) == llm.abort([]) == []


@pytest.mark.parametrize("prompt", [[4, 5], (4, 5), torch.tensor([4, 5])], ids=str)
def test_generate_of_one_prompt_returns_one_request(prompt: Any) -> None:
    request = llm_of().generate(prompt, PARAMS)
    assert isinstance(request, DynamicInferenceRequest)
    assert request.prompt_tokens.tolist() == [4, 5]
    assert request.generated_length == len(request.generated_tokens) == 6


def test_generate_returns_a_batch_in_input_order() -> None:
    prompts = [prompt_of(n) for n in (30, 1, 8)]
    params = [SamplingParams(num_tokens_to_generate=n, seed=n) for n in (9, 1, 4)]
    requests = llm_of().generate(prompts, params)
    assert prompts_of(requests) == prompts
    assert [request.generated_length for request in requests] == [9, 1, 4]
    assert [request.sampling_params.num_tokens_to_generate for request in requests] == [9, 1, 4]
    assert prompts_of(llm_of().generate(torch.tensor([[1, 2], [3, 4]]), PARAMS)) == [[1, 2], [3, 4]]


def test_generate_returns_n_samples_flat_and_prompt_major() -> None:
    prompts = [[1, 2], [3, 4, 5]]
    requests = llm_of().generate(prompts, PARAMS, n=3)
    assert prompts_of(requests) == [[1, 2]] * 3 + [[3, 4, 5]] * 3
    assert len({tuple(request.generated_tokens) for request in requests}) == 6
    single = llm_of().generate([1, 2], PARAMS, n=3)
    assert [r.generated_tokens for r in single] == [r.generated_tokens for r in requests[:3]]
    assert isinstance(llm_of().generate([[1, 2]], PARAMS), list)


@pytest.mark.parametrize(
    ("prompts", "params", "n", "message"),
    [
        ([[1], []], PARAMS, 1, "empty"),
        ([[1], [VOCAB_SIZE]], PARAMS, 1, f"{VOCAB_SIZE}"),
        ([[1]], PARAMS, 0, "n=0"),
        ([[1], [2]], [PARAMS], 1, "1 sampling_params for 2 prompts"),
        (["text"], PARAMS, 1, "tokenizer"),
        ([[1], 5], PARAMS, 1, r"prompts\[1\]=5"),
        ([[1]], SamplingParams(streaming=True), 1, "streaming"),
    ],
)
def test_generate_and_submit_refuse_a_bad_batch(
    prompts: Any, params: Any, n: int, message: str
) -> None:
    llm = llm_of()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params, n=n)
    with pytest.raises(InvalidRequestError, match=message):
        llm.submit(prompts, params, n=n)
    assert not llm.engine.has_unfinished_requests()
    assert llm.collect() == []


def test_return_prompt_tokens_false_leaves_only_the_generated_positions() -> None:
    params = SamplingParams(num_tokens_to_generate=5, return_prompt_tokens=False, seed=1)
    request = llm_of().generate([1, 2, 3], params)
    assert len(request.prompt_tokens) == 0
    assert len(request.policy_staleness) == len(request.kv_cache_staleness) == 5
    assert len(request.policy_versions) == len(request.context_kv_version_min) == 5


def test_progress_shows_a_bar_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    llm_of().generate([[1], [2]], PARAMS, n=2, progress=True)
    assert "4/4" in capsys.readouterr().out
    llm_of().generate([[1]], PARAMS)
    assert capsys.readouterr().out == ""


# ---- submit and collect


def test_collect_returns_groups_once_in_order_of_completion() -> None:
    llm = llm_of()
    lengths = (9, 3, 6)
    params = [SamplingParams(num_tokens_to_generate=n, seed=n) for n in lengths]
    ids = llm.submit([[1], [2], [3]], params, n=2)
    groups = [*llm.collect(2), *llm.collect(5)]
    assert [group.group_id for group in groups] == [ids[1], ids[2], ids[0]]
    assert [len(group.requests) for group in groups] == [2, 2, 2]
    assert llm.collect() == llm.collect(0) == []


def test_submit_with_a_higher_priority_goes_first() -> None:
    llm = llm_of(max_requests=1)
    (low,) = llm.submit([[1]], PARAMS, priority=-1)
    (usual,) = llm.submit([[2]], PARAMS)
    (high,) = llm.submit([[3]], PARAMS, priority=7)
    assert [group.group_id for group in llm.collect()] == [high, usual, low]


def test_generate_does_not_take_what_submit_queued() -> None:
    llm = llm_of()
    ids = llm.submit([[1], [2]], SamplingParams(num_tokens_to_generate=2))
    assert llm.generate([3], PARAMS).prompt_tokens.tolist() == [3]
    assert [group.group_id for group in llm.collect(timeout_s=0)] == ids


def pause(llm: LLM) -> None:
    pauser = threading.Thread(target=llm.engine.pause)
    pauser.start()
    pauser.join()


def interrupt(llm: LLM) -> None:
    raise KeyboardInterrupt


def fail(llm: LLM) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("event", "error"),
    [(pause, EngineStateError), (interrupt, KeyboardInterrupt), (fail, ZeroDivisionError)],
)
def test_generate_that_raises_leaves_only_submitted_groups(
    event: Callable[[LLM], None], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its groups have ended then, one with the records of a step that nobody got."""
    llm = llm_of()
    lengths = (1, 2, 6)
    params = [SamplingParams(num_tokens_to_generate=n, seed=n) for n in lengths]
    (mine,) = llm.submit([9], SamplingParams(num_tokens_to_generate=12, seed=1), n=2)
    step, num_steps = llm.engine.step, 0

    def eventful_step() -> Any:
        nonlocal num_steps
        num_steps += 1
        records = step()
        if num_steps == 2:
            event(llm)
        return records

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", eventful_step)
        with pytest.raises(error):
            llm.generate([[1], [2], [3]], params, n=2)
    assert llm.stats().num_running + llm.stats().num_waiting == 2
    llm.unpause()
    (group,) = llm.collect(num_groups=1)
    assert group.group_id == mine
    assert [request.generated_length for request in group.requests] == [12, 12]
    assert not llm.engine.has_unfinished_requests()
    assert llm.generate([4], PARAMS).generated_length == 6


def test_generate_of_a_second_thread_is_refused_until_the_first_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, refused, aborted = llm_of(), [], []
    step, (other,) = llm.engine.step, llm.submit([9], PARAMS)

    def call_all() -> None:
        for call in (
            lambda: llm.generate([4], PARAMS),
            lambda: llm.submit([4], PARAMS),
            llm.collect,
        ):
            with pytest.raises(
                EngineStateError, match=r"cannot (\w+) while another.*AsyncLLM"
            ) as e:
                call()
            refused.append(str(e.value).split()[1])

    def step_with_a_visitor() -> Any:
        if not refused:
            visitor = threading.Thread(target=call_all)
            visitor.start()
            visitor.join()
            aborted.extend(llm.abort([other]))
            assert len(llm.generate([6], PARAMS).generated_tokens) > 0  # of the same thread
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", step_with_a_visitor)
        mine = llm.generate([3], PARAMS)
    assert mine.prompt_tokens.tolist() == [3]
    assert refused == ["generate", "submit", "collect"]
    assert [group.group_id for group in aborted] == [other]
    later = threading.Thread(target=lambda: refused.append(llm.generate([5], PARAMS).status.name))
    later.start()
    later.join()
    assert refused[-1] == "COMPLETED"


def test_collect_returns_finished_groups_after_timeout_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = llm_of(tiny_model(max_position_embeddings=2000), max_sequence_length=2000)
    step = llm.engine.step

    def slow_step() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    short, _ = llm.submit(
        [[1], [2]], [PARAMS, SamplingParams(num_tokens_to_generate=1900, ignore_eos=True)]
    )
    groups = llm.collect(timeout_s=0.3)
    assert [group.group_id for group in groups] in ([], [short])
    assert llm.engine.has_unfinished_requests()


def test_collect_of_a_negative_num_groups_is_refused() -> None:
    llm = llm_of()
    llm.submit([[1], [2]], PARAMS)
    with pytest.raises(InvalidRequestError, match="num_groups=-1"):
        llm.collect(-1)
    assert len(llm.collect()) == 2


def test_abort_ends_whole_groups_or_refuses_an_unknown_one_before() -> None:
    llm = llm_of()
    first, second = llm.submit([[1], [2]], PARAMS, n=2)
    llm.engine.step()
    with pytest.raises(EngineStateError, match="group 77"):
        llm.abort([first, 77])
    assert llm.stats().num_failed == 0
    (group,) = llm.abort([first, first])
    assert {request.finish_reason for request in group.requests} == {"abort"}
    assert [len(request.generated_tokens) for request in group.requests] == [1, 1]
    assert [group.group_id for group in llm.collect()] == [second]
    with pytest.raises(EngineStateError, match=f"group {first}"):
        llm.abort([first])


def test_collect_raises_if_a_request_was_aborted_at_the_engine() -> None:
    llm = llm_of()
    (group_id,) = llm.submit([[1]], PARAMS)
    llm.engine.abort_request(group_id)
    with pytest.raises(EngineStateError, match=r"llm\.abort"):
        llm.collect()


def test_collect_of_unfinished_groups_needs_a_running_engine() -> None:
    llm = llm_of()
    llm.submit([[1]], PARAMS)
    llm.pause()
    with pytest.raises(EngineStateError, match="PAUSED"):
        llm.collect()
    llm.unpause()
    assert len(llm.collect()) == 1
    llm.pause()
    assert llm.generate([]) == llm.collect() == []


# ---- the end


def test_llm_context_stops_the_engine_after_an_exception() -> None:
    llm = llm_of()

    def fail_while_suspended() -> None:
        with llm:
            llm.submit([[1]], PARAMS)
            llm.pause()
            llm.suspend("offload")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_while_suspended()
    assert llm.state is EngineState.STOPPED
    llm.shutdown()
    with pytest.raises(EngineStateError, match="STOPPED"):
        llm.generate([[1]])
    assert llm.engine.kv_data_ptrs() == {}


def test_warm_up_captures_nothing_on_a_cpu() -> None:
    with llm_of() as llm:
        assert llm.warm_up() == 0
        assert len(llm.generate([1, 2, 3], PARAMS).generated_tokens) == 6
        assert llm.stats().num_graph_captures == 0
