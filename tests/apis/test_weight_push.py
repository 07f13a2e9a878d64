"""update_weights, suspend and resume of another thread while `generate` steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rollout import LLM, EngineState, EngineStateError, InferenceConfig, SamplingParams
from tests.tiny_models import MAX_LENGTH, prompt_of, tiny_model

PARAMS = SamplingParams(num_tokens_to_generate=150, seed=3, return_log_probs=True)
CONFIG = InferenceConfig(block_size_tokens=8, max_sequence_length=MAX_LENGTH, buffer_size_gb=0.01)
NUM_PUSHES = 5


def test_update_weights_of_another_thread_while_generate_steps() -> None:
    model, errors = tiny_model(), []
    source = dict(model.named_parameters())
    with LLM(model, inference_config=CONFIG) as llm:
        expected = llm.generate(prompt_of(9), PARAMS).generated_tokens
        has_begun = threading.Event()

        def push() -> None:
            try:
                has_begun.wait(10)
                for _ in range(NUM_PUSHES):
                    llm.update_weights(source, in_flight=True)
            except BaseException as error:  # a thread's error would go unseen
                errors.append(error)

        pusher = threading.Thread(target=push)
        pusher.start()
        has_begun.set()
        request = llm.generate(prompt_of(9), PARAMS)
        while pusher.is_alive():
            request = llm.generate(prompt_of(9), PARAMS)
            assert request.generated_tokens == expected
        pusher.join(10)
        assert not errors
        assert llm.weights_version == NUM_PUSHES
        assert request.generated_tokens == expected
        assert request.policy_versions.tolist() == sorted(request.policy_versions.tolist())


def test_refused_update_weights_of_another_thread_leaves_generate_alone() -> None:
    model, errors = tiny_model(), []
    with LLM(model, inference_config=CONFIG) as llm:
        expected = llm.generate(prompt_of(9), PARAMS).generated_tokens

        def push() -> None:
            try:
                llm.update_weights({}, in_flight=True)
            except Exception as error:
                errors.append(error)

        pusher = threading.Thread(target=push)
        pusher.start()
        assert llm.generate(prompt_of(9), PARAMS).generated_tokens == expected
        pusher.join(10)
        assert [type(error).__name__ for error in errors] == ["WeightUpdateError"]
        assert llm.weights_version == 0


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", ["device", "reserved"])
@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
@pytest.mark.parametrize("discard", [False, True])
def test_suspend_and_resume_weights_in_stages(
    kind: str, order: tuple[str, str], discard: bool
) -> None:
    model: Any = tiny_model()
    config = InferenceConfig(
        block_size_tokens=8, max_sequence_length=MAX_LENGTH, buffer_size_gb=0.01, memory_kind=kind
    )
    with LLM(model, inference_config=config) as llm:
        expected = llm.generate(prompt_of(30), PARAMS).generated_tokens
        llm.submit(prompt_of(30), PARAMS)
        for _ in range(5):
            llm.engine.step()
        llm.pause()
        num_bytes = llm.engine.memory_status().resident_bytes["weights"]
        report = llm.suspend("offload", ("kv_cache", "weights"), discard_weights=discard)
        assert report.released_by_owner["weights"] == num_bytes
        assert report.released_by_owner["kv_cache"] > 0
        assert report.bytes_on_host >= (0 if discard else num_bytes)
        assert set(report.kept_by_owner.values()) == {0}
        first = llm.resume(only=order[0])
        assert llm.state is EngineState.SUSPENDED
        assert first.restored_by_owner[order[1]] == 0
        second = llm.resume(only=order[1])
        assert llm.state is EngineState.PAUSED
        restored = {"weights": first, "kv_cache": second}
        if order[0] == "kv_cache":
            restored = {"weights": second, "kv_cache": first}
        weights = restored["weights"].restored_by_owner["weights"]
        assert weights == (0 if discard else num_bytes)
        if discard:
            with pytest.raises(EngineStateError, match="commit a full update first"):
                llm.unpause()
            llm.update_weights(dict(model.named_parameters()))
        llm.unpause()
        (group,) = llm.collect()
        assert group.requests[0].generated_tokens == expected
        assert llm.generate(prompt_of(30), PARAMS).generated_tokens == expected
