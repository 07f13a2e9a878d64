"""The sglang protocol: generate, aborts, pauses, memory, and updates over a gloo group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout import LLM, DynamicInferenceRequest, SamplingParams, ServeConfig
from tests.apis.fleets import directory
from tests.serve.served import CONFIG, Answer, Served, served_directory
from tests.serve.test_vllm_updates import served_version, tensors_of
from tests.serve.trainer import Trainer, announced, packed
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed
PROMPT = prompt_of(9)
SAMPLING = {"temperature": 0.7, "max_new_tokens": 6, "sampling_seed": 5}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def served(roots: Path) -> Iterator[Served]:
    config = ServeConfig(
        port=0,
        checkpoint_roots=(str(roots),),
        weight_transfer_timeout_s=20.0,
        max_n=16,
        max_samples=24,
    )
    server = served_directory(config)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def in_process() -> Iterator[LLM]:
    with LLM(directory(), None, CONFIG) as llm:
        yield llm


def generated(served: Served, **body: Any) -> Any:
    answer = served.post("/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING} | body)
    assert answer.status == 200, answer.body
    return answer.json()


def params(**changes: Any) -> SamplingParams:
    fields = {
        "temperature": 0.7,
        "num_tokens_to_generate": 6,
        "seed": 5,
        "return_log_probs": True,
        "logprobs_mode": "temperature",
    }
    return SamplingParams(**(fields | changes))


def rows(log_probs: Any, ids: Any) -> list[list[Any]]:
    return [[float(lp), i, None] for lp, i in zip(log_probs, ids, strict=True)]


# ---- generate; before any update, so that both have the same weights


def test_tokens_and_log_probs_are_those_of_the_engine_at_its_temperature(
    served: Served, in_process: LLM
) -> None:
    request = in_process.generate(PROMPT, params(skip_prompt_log_probs=False, top_n_logprobs=2))
    assert isinstance(request, DynamicInferenceRequest)
    reply = generated(served, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, rid="a")
    assert reply["output_ids"] == list(request.generated_tokens)
    meta = reply["meta_info"]
    expected = rows(request.generated_log_probs, request.generated_tokens)
    assert meta["output_token_logprobs"] == expected
    top = [[[lp, i, None] for i, lp in each.items()] for each in request.generated_top_n_logprobs]
    assert meta["output_top_logprobs"] == top
    prompt = [[None, PROMPT[0], None], *rows(request.prompt_log_probs[:8], PROMPT[1:])]
    assert meta["input_token_logprobs"] == prompt
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("a", 9, 6)
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    raw = in_process.generate(PROMPT, params(logprobs_mode="raw"))
    assert isinstance(raw, DynamicInferenceRequest)
    assert expected != rows(raw.generated_log_probs, raw.generated_tokens)


def test_logprob_start_len_cuts_input_token_logprobs(served: Served) -> None:
    whole = generated(served, return_logprob=True, logprob_start_len=0)["meta_info"]
    part = generated(served, return_logprob=True, logprob_start_len=4)["meta_info"]
    none = generated(served, return_logprob=True)["meta_info"]
    without = generated(served)["meta_info"]
    assert len(whole["input_token_logprobs"]) == len(PROMPT)
    assert part["input_token_logprobs"] == whole["input_token_logprobs"][4:]
    assert none["input_token_logprobs"] == []
    assert none["output_token_logprobs"] == whole["output_token_logprobs"]
    assert "output_token_logprobs" not in without


def test_a_batch_of_generate_gets_a_list_by_prompt(served: Served, in_process: LLM) -> None:
    prompts = [prompt_of(5), prompt_of(11)]
    expected = in_process.generate(prompts, params(), n=2)
    assert isinstance(expected, list)
    replies = generated(served, input_ids=prompts, sampling_params=SAMPLING | {"n": 2})
    assert [r["output_ids"] for r in replies] == [list(r.generated_tokens) for r in expected]
    own = [SAMPLING | {"max_new_tokens": 2}, SAMPLING]
    replies = generated(served, input_ids=prompts, sampling_params=own, rid=["x", "y"])
    assert [len(reply["output_ids"]) for reply in replies] == [2, 6]
    assert [reply["meta_info"]["id"] for reply in replies] == ["x", "y"]


@pytest.mark.parametrize("stream", [False, True])
def test_max_new_tokens_of_0_scores_the_prompt(served: Served, stream: bool) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    whole = generated(served, **asked)["meta_info"]
    sampling = SAMPLING | {"max_new_tokens": 0, "n": 2}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream, **asked}
    if stream:
        replies = served.events("/generate", body)
    else:
        replies = generated(served, **body)
    assert len(replies) == 2, "one event for each sample"
    for reply in replies:
        meta = reply["meta_info"]
        assert (reply["text"], reply["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert (meta["output_token_logprobs"], meta["output_top_logprobs"]) == ([], [])
        assert meta["weight_versions"] == []
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert meta[name] == whole[name]


def test_max_new_tokens_may_differ_in_a_batch(served: Served) -> None:
    each = [SAMPLING | {"max_new_tokens": 0}, SAMPLING]
    replies = generated(served, input_ids=[PROMPT, PROMPT], sampling_params=each)
    assert [len(reply["output_ids"]) for reply in replies] == [0, 6]


def test_max_new_tokens_of_0_may_stop_at_once(served: Served) -> None:
    first = generated(served)["output_ids"][0]
    sampling = SAMPLING | {"max_new_tokens": 0, "stop_token_ids": [first]}
    meta = generated(served, sampling_params=sampling)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_streamed_generate_is_cumulative(served: Served) -> None:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
    events = served.events("/generate", body | {"stream": True})
    whole = generated(served, return_logprob=True)
    *early, last = events
    assert last["output_ids"] == whole["output_ids"]
    log_probs = whole["meta_info"]["output_token_logprobs"]
    assert last["meta_info"]["output_token_logprobs"] == log_probs
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert early, "tokens come before the end"
    for event in early:
        num_tokens = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:num_tokens]
        assert event["meta_info"]["completion_tokens"] == num_tokens
        assert event["meta_info"]["finish_reason"] is None
        assert len(event["meta_info"]["output_token_logprobs"]) == num_tokens


def test_stop_token_ids_are_the_matched_reason(served: Served) -> None:
    ids = generated(served)["output_ids"]
    reply = generated(served, sampling_params=SAMPLING | {"stop_token_ids": [ids[2]]})
    end = ids.index(ids[2]) + 1
    assert reply["output_ids"] == ids[:end]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[2]}


@pytest.mark.parametrize(
    ("body", "because"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 2], "sampling_params": {"n": 17}}, "n=17"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 16}, {"n": 9}]}, "25 samples"),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 511}}, "maximum context"),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens=-1"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "=3"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}}, "=1"),
        ({"input_ids": [1, 2], "sampling_params": {"min_new_tokens": -1}}, "min_new_tokens=-1"),
        ({"input_ids": [1, 2], "sampling_params": {"regex": "a*"}}, "regex"),
        ({"input_ids": [1, 2], "lora_path": "x"}, "lora_path"),
        ({"input_ids": "a"}, "input_ids"),
        ({"text": "a"}, "tokenizer"),
    ],
)
def test_generate_refuses_bad_requests_in_sglangs_form(
    served: Served, body: dict[str, Any], because: str
) -> None:
    answer = served.post("/generate", body)
    assert answer.status == 400
    assert because in answer.json()["error"]["message"]


# ---- pauses


class Asked:
    """A request to /generate from another thread."""

    def __init__(self, served: Served, num_tokens: int = 400, **body: Any) -> None:
        self._answers: list[Answer] = []
        sampling = {"max_new_tokens": num_tokens, "sampling_seed": 1}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True} | body
        self._thread = threading.Thread(
            target=lambda: self._answers.append(served.post("/generate", body))
        )
        self._thread.start()

    @property
    def is_answered(self) -> bool:
        return bool(self._answers)

    def reply(self) -> Any:
        self._thread.join()
        assert self._answers[0].status == 200
        return self._answers[0].json()


def running(served: Served) -> Asked:
    """A request whose engine has made steps for it."""
    before = served.do(served.llm.stats()).num_decode_tokens
    asked = Asked(served)
    while served.do(served.llm.stats()).num_decode_tokens < before + 2:
        assert not asked.is_answered
    return asked


def test_pause_generation_abort_answers_and_new_requests_wait(
    served: Served,
) -> None:
    asked = running(served)
    assert served.post("/pause_generation").json()["status"] == "ok"
    reply = asked.reply()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["meta_info"]["finish_reason"]["message"] == "Abort in decoding"
    num_tokens = len(reply["output_ids"])
    assert 0 < num_tokens < 400
    assert len(reply["meta_info"]["output_token_logprobs"]) == num_tokens
    later = Asked(served, num_tokens=3)
    assert served.call("GET", "/flush_cache").status == 200
    served.post("/continue_generation", {})
    assert later.reply()["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_continue_generation_resumes_requests_unchanged(served: Served, mode: str) -> None:
    undisturbed = Asked(served).reply()["output_ids"]
    asked = running(served)
    recomputed = served.do(served.llm.stats()).num_recomputed_requests
    assert served.post("/pause_generation", {"mode": mode}).status == 200
    loads = served.get("/v1/loads?include=core").json()["loads"]
    assert loads[0]["num_running_reqs"] + loads[0]["num_waiting_reqs"] == 1
    flushed = served.post("/flush_cache").status
    assert flushed == (400 if mode == "in_place" else 200)
    assert served.post("/continue_generation").json()["status"] == "ok"
    assert asked.reply()["output_ids"] == undisturbed
    retracted = served.do(served.llm.stats()).num_recomputed_requests - recomputed
    assert retracted == (mode == "retract")


def test_abort_request_aborts_by_rid(served: Served) -> None:
    served.post("/pause_generation", {"mode": "in_place"})
    one, other = Asked(served, num_tokens=4, rid="one"), Asked(served, num_tokens=4, rid="other")
    while served.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] < 2:
        pass
    assert served.post("/abort_request", {"rid": "one"}).status == 200
    reason = one.reply()["meta_info"]["finish_reason"]
    assert (reason["type"], reason["message"]) == ("abort", "Abort before prefill")
    assert not other.is_answered
    served.post("/continue_generation")
    assert other.reply()["meta_info"]["finish_reason"]["type"] == "length"
    assert served.post("/abort_request", {}).json()["success"] is False


def test_release_memory_occupation_releases_parts(served: Served) -> None:
    before = generated(served)["output_ids"]
    answer = served.post("/release_memory_occupation", {"tags": None})
    assert (answer.status, answer.json()) == (200, None)
    waiting = Asked(served, num_tokens=2)
    assert served.post("/resume_memory_occupation", {"tags": ["weights"]}).status == 200
    assert not waiting.is_answered
    assert served.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status == 200
    assert waiting.reply()["meta_info"]["completion_tokens"] == 2
    assert generated(served)["output_ids"] == before
    assert served.post("/release_memory_occupation", {"tags": ["disk"]}).status == 400


# ---- updates


@pytest.fixture(scope="module")
def trainer(served: Served) -> Iterator[Trainer]:
    trainer = Trainer()
    try:
        trainer.begin_join("slime-pp_0")
        body = {
            "master_address": "127.0.0.1",
            "master_port": str(trainer.port),  # as AReaL writes it
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "slime-pp_0",
            "backend": "gloo",
        }
        assert served.post("/init_weights_update_group", body).json()["success"]
        assert trainer.end() == ""
        yield trainer
    finally:
        trainer.close()


def send(served: Served, trainer: Trainer, tensors: dict[str, Any], **body: Any) -> Answer:
    info = announced(tensors)
    is_flat = body.get("load_format") == "flattened_bucket"
    trainer.begin_broadcast([packed([*tensors.values()])] if is_flat else [*tensors.values()])
    answer = served.post(
        "/update_weights_from_distributed",
        {
            "names": info["names"],
            "dtypes": info["dtype_names"],
            "shapes": info["shapes"],
            "group_name": "slime-pp_0",
            "flush_cache": True,
        }
        | body,
    )
    assert trainer.end() == ""
    return answer


def test_continue_generation_serves_tensors_of_the_pause(served: Served, trainer: Trainer) -> None:
    """A request that was frozen meanwhile says which weights sampled which token."""
    asked, before = running(served), served_version(served)
    served.post("/pause_generation", {"mode": "in_place"})
    tensors = list(tensors_of(1).items())
    assert send(served, trainer, dict(tensors[:9]), weight_version="step 1").json()["success"]
    flat = {"load_format": "flattened_bucket", "weight_version": "step 1"}
    assert send(served, trainer, dict(tensors[9:]), **flat).json()["success"]
    assert served_version(served) == before, "not before generation goes on"
    assert served.post("/continue_generation").status == 200
    meta = asked.reply()["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == (str(before), "step 1")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 400)
    assert meta["weight_version"] == "step 1"
    assert served.get("/get_weight_version").json() == {"weight_version": "step 1"}
    with LLM(directory(), None, CONFIG) as llm:
        llm.pause()
        llm.update_weights(tensors)
        llm.unpause()
        expected = llm.generate(PROMPT, params())
    assert isinstance(expected, DynamicInferenceRequest)
    assert generated(served)["output_ids"] == list(expected.generated_tokens)


def test_end_weight_update_refuses_a_partial_update(served: Served, trainer: Trainer) -> None:
    before = served_version(served)
    one = {"model.norm.weight": torch.ones(48)}
    answer = send(served, trainer, one)
    assert answer.status == 400
    assert "no update is open" in answer.json()["message"]
    served.post("/pause_generation")
    assert send(served, trainer, one).status == 200
    answer = served.post("/continue_generation")
    assert (answer.status, answer.json()["success"]) == (400, False)
    assert "lacks 24" in answer.json()["message"]
    assert served_version(served) == before
    served.post("/continue_generation")
    served.post("/begin_weight_update")
    assert send(served, trainer, tensors_of(2)).status == 200
    assert served.post("/end_weight_update", {"weight_version": "two"}).json()["success"]
    assert served_version(served) == before + 1
    assert generated(served)["meta_info"]["weight_version"] == "two"


def test_update_weights_from_disk_serves_the_directory(served: Served, roots: Path) -> None:
    save_file(tensors_of(3), roots / "model.safetensors")
    body = {"model_path": str(roots), "weight_version": "disk"}
    answer = served.post("/update_weights_from_disk", body)
    assert answer.json() == {
        "success": True,
        "message": "the weights are updated",
        "num_paused_requests": 0,
    }
    assert served.get("/model_info").json()["weight_version"] == "disk"
    answer = served.post("/update_weights_from_disk", {"model_path": "/etc"})
    assert (answer.status, answer.json()["success"]) == (400, False)
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        info = served.get(path).json()
        assert info["model_path"] == str(roots), "the checkpoint that was loaded last"
        assert info["tokenizer_path"] == directory()
    assert served.post("/update_weight_version", {"new_version": "same"}).json()["success"]
    assert generated(served)["meta_info"]["weight_versions"] == [
        {"version": "same", "start": 0, "end": 6}
    ]


def test_init_weights_update_group_refuses_impossible_groups(served: Served) -> None:
    body = {"master_address": "127.0.0.1", "master_port": "x", "world_size": 2}
    assert served.post("/init_weights_update_group", body).status == 400
    gloo = body | {"backend": "gloo"}
    assert served.post("/init_weights_update_group", gloo).status == 400
    answer = served.post("/destroy_weights_update_group", {"group_name": "unknown"})
    assert (answer.status, answer.json()["success"]) == (400, False)


def test_server_info_has_keys_of_vllm_and_sglang(served: Served) -> None:
    info = served.get("/server_info").json()
    assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32"
    assert info["vllm_config"]["model_config"]["max_model_len"] == 512
    assert info["vllm_config"]["weight_transfer_config"] is None
    assert (info["tp_size"], info["pp_size"], info["ep_size"]) == (1, 1, 1)
    assert info["disaggregation_mode"] == "null"
    assert served.get("/get_server_info").json() == info
    (worker,) = served.get("/workers").json()["workers"]
    assert worker["url"] == served.url
