"""What lies above the engine, over vLLM: LLM, weight pushes, producer, doctor, server, commands."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, DynamicInferenceRequest, EngineState, SamplingParams, ServeConfig
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.cli.main import main
from tests.contracts.vllm_engines import BLOCK_SIZE, HAS_VLLM, SHAPE
from tests.serve.chat_model import TEMPLATE, VOCAB_SIZE, tokenizer
from tests.tiny_models import randomize, tiny_model
from tests.waiting import until
from trainer_hooks import (
    AsyncRolloutProducer,
    WeightSync,
    collate_rollouts,
    generation_phase,
    token_logprobs,
)
from trainer_hooks.doctor import diagnose

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4  # between a log-prob of vLLM and the policy's
MAX_LENGTH = 128
OPTIONS = {"num_gpu_blocks_override": 40}
FIELDS: dict[str, Any] = {
    "engine": "vllm",
    "max_sequence_length": MAX_LENGTH,
    "max_requests": 8,
    "block_size_tokens": BLOCK_SIZE,
    "dtype": "float32",
    "device": "cpu",
    "seed": 0,
}
LETTERS = tuple(tokenizer().encode("abcdefghijklmnopqrstuvwxyz").ids)
PARAMS = SamplingParams(
    num_tokens_to_generate=12,
    termination_id=-1,
    return_log_probs=True,
    logprobs_mode="temperature",
)
PROMPTS = ["Why is the sky blue?", "One, two,", "Vier und fünf"]


def saved_policy(directory: Path, *, is_tied: bool = False) -> Any:
    """A trainer's model, and `directory` with its weights and a tokenizer."""
    changes = SHAPE | {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": is_tied}
    policy = tiny_model("qwen3", seed=5, **changes)
    policy.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return policy


def copy_of(policy: Any) -> Any:
    older = type(policy)(policy.config).eval()
    older.load_state_dict(policy.state_dict())
    return older


def vllm_llm(directory: Path, **engine_options: Any) -> LLM:
    return LLM(
        directory,
        engine_options=OPTIONS | engine_options,
        materialize_only_last_token_logits=False,
        **FIELDS,
    )


@torch.no_grad()
def logprobs_of(policy: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs [T, V] of the token after each position."""
    return policy(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


def gap_to(policy: Any, requests: Sequence[DynamicInferenceRequest], version: int) -> float:
    """The largest gap between the log-probs of the collated requests and the policy's."""
    rows = collate_rollouts(requests, [0.0] * len(requests), version)
    with torch.no_grad():
        mine_BT = token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT)
    gaps_BT = (mine_BT - rows.behaviour_logprobs_BT).abs()
    assert int(rows.mask_BT.sum()) == sum(len(r.generated_tokens) for r in requests) > 0
    return float(gaps_BT[rows.mask_BT].max())


@pytest.mark.timeout(900)
def test_llm_generates_and_weight_sync_pushes_over_vllm(tmp_path: Path) -> None:
    policy = saved_policy(tmp_path)
    with vllm_llm(tmp_path) as llm:
        requests = llm.generate(PROMPTS, PARAMS, n=3)
        assert [len(r.generated_tokens) for r in requests] == [12] * 9
        assert len({tuple(r.generated_tokens) for r in requests}) == 9, "samples differ"
        for index, request in enumerate(requests):
            assert list(request.prompt_tokens) == llm.tokenizer.encode(PROMPTS[index // 3])
            assert request.generated_text == llm.tokenizer.decode(request.generated_tokens)
        assert gap_to(policy, requests, 0) < CLOSE
        check_stop_and_scores(llm, policy)
        check_control(llm, policy)


def check_stop_and_scores(llm: LLM, policy: Any) -> None:
    """Stop strings, the most likely tokens, and the prompt's log-probs."""
    greedy = replace(PARAMS, temperature=0.0, allowed_token_ids=LETTERS)
    whole = llm.generate(PROMPTS[0], greedy)
    word = whole.generated_text[4:6]
    end = whole.generated_text.index(word)
    stopped = llm.generate(PROMPTS[0], replace(greedy, stop_words=[word]))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert stopped.generated_text == whole.generated_text[:end]

    wanted = replace(PARAMS, top_n_logprobs=3, skip_prompt_log_probs=False)
    request = llm.generate(PROMPTS[1], wanted)
    tokens = [*map(int, request.prompt_tokens), *request.generated_tokens]
    rows_TV = logprobs_of(policy, tokens)
    num_prompt = len(request.prompt_tokens)
    expected = rows_TV[range(num_prompt - 1), tokens[1:num_prompt]]
    assert torch.allclose(torch.tensor(request.prompt_log_probs), expected, atol=CLOSE)
    rows_TV = rows_TV[num_prompt - 1 : -1]
    for top, row_V in zip(request.generated_top_n_logprobs, rows_TV, strict=True):
        best = row_V.topk(3)
        assert [*top] == best.indices.tolist()
        assert [*top.values()] == pytest.approx(best.values.tolist(), abs=CLOSE)


def check_control(llm: LLM, policy: Any) -> None:
    """Requests are aborted, or continue through a suspend and pushes under the new weights."""
    older, sync = copy_of(policy), WeightSync(llm)
    ids = llm.submit(PROMPTS, replace(PARAMS, num_tokens_to_generate=40))
    for _ in range(6):
        llm.engine.step()
    (aborted,) = llm.abort(ids[:1])
    assert aborted.requests[0].finish_reason == "abort"
    assert 0 < len(aborted.requests[0].generated_tokens) < 40
    llm.pause()
    assert llm.suspend("recompute").num_requests_requeued == 2
    assert llm.state is EngineState.SUSPENDED
    randomize(policy, seed=6)
    assert sync.push(policy).version == 1
    assert llm.resume().num_requests_recomputed == 2
    llm.unpause()
    requests = [group.requests[0] for group in llm.collect()]
    for request in requests:
        assert {*request.policy_versions.tolist()} == {0, 1}
        assert {version for *_, version in request.kv_spans} == {1}, "all KV was computed again"
    batch = collate_rollouts(requests, [0.0, 1.0], 1)
    sound = diagnose(batch, policy, requests, older_models={0: older})
    assert [finding.evidence for finding in sound.findings] == []
    assert (sound.verdict, sound.num_known_tokens) == ("sound", 80)
    assert sound.unexplained_rms < CLOSE < sound.gap_rms

    randomize(policy, seed=7)
    llm.submit(PROMPTS, PARAMS, n=2)
    with generation_phase(llm, sync, policy) as phase:
        groups = llm.collect(3)
    assert phase.update_report is not None
    assert phase.update_report.version == llm.weights_version == 2
    assert llm.state is EngineState.SUSPENDED
    assert gap_to(policy, [r for group in groups for r in group.requests], 2) < CLOSE


@pytest.mark.timeout(900)
def test_producer_and_doctor_over_vllm_with_tied_embeddings(tmp_path: Path) -> None:
    """The log-probs are of the temperature with which a trainer divides its logits."""
    policy = saved_policy(tmp_path, is_tied=True)
    params = replace(PARAMS, temperature=0.7)
    with vllm_llm(tmp_path, logprobs_mode="processed_logprobs") as llm:
        llm.submit(PROMPTS, params, n=2)
        for _ in range(5):
            llm.engine.step()
        older = copy_of(policy)
        randomize(policy, seed=8)
        WeightSync(llm, in_flight=True).push(policy)
        requests = [request for group in llm.collect() for request in group.requests]
        assert all({*r.policy_versions.tolist()} == {0, 1} for r in requests)
        batch = collate_rollouts(requests, [0.0] * 6, 1, temperature=0.7)
        models: dict[str, Any] = {"model": policy, "older_models": {0: older}}
        sound = diagnose(batch, sources=requests, temperature=0.7, **models)
        assert (sound.verdict, list(sound.findings)) == ("sound", [])
        assert sound.num_known_tokens == sound.num_tokens == 72
        fault = diagnose(batch, sources=requests, temperature=1.0, **models)
        assert [finding.name for finding in fault.findings] == ["temperature"]
        asyncio.run(check_producer(llm, policy, params))


async def check_producer(llm: LLM, policy: Any, params: SamplingParams) -> None:
    async with ThreadedLLM(llm) as threaded:
        sync = WeightSync(threaded, in_flight=True)
        prompts = [[token] for token in range(8)]
        async with AsyncRolloutProducer(
            threaded,
            prompts,
            lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
            2,
            3,
            1,
            sampling_params=params,
        ) as producer:
            for seed in range(3):
                batch = await anext(producer)
                rows = batch.rollouts
                assert rows.mask_BT.sum() == 6 * 12
                assert 0 <= int(rows.policy_lag_BT.min()) <= int(rows.policy_lag_BT.max()) <= 1
                firsts = rows.tokens_BT[:, 1].float()
                assert torch.equal(rows.rewards_B, firsts)
                randomize(policy, seed=10 + seed)
                report = await sync.apush(policy)
                assert report.version == llm.weights_version == rows.train_version + 1


@pytest.mark.timeout(900)
def test_weight_sync_pushes_a_peft_model_over_vllm(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    policy = saved_policy(tmp_path)
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    adapted = peft.get_peft_model(policy, settings).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    with vllm_llm(tmp_path) as llm:
        assert WeightSync(llm, in_flight=True).push(adapted).version == 1
        requests = llm.generate(PROMPTS, PARAMS, n=2)
        assert gap_to(adapted, requests, 1) < CLOSE
        with adapted.disable_adapter():
            assert gap_to(adapted, requests, 1) > 100 * CLOSE, "the adapter is served"


class Client:
    """A client of the server of an LLM."""

    def __init__(self, llm: LLM) -> None:
        assert llm.serving_address is not None
        host, port = llm.serving_address
        self.url = f"http://{host}:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=120) as reply:
            return reply.read()

    def post(self, path: str, body: Any = None) -> Any:
        sent = json.dumps({} if body is None else body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, sent, headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)


@pytest.mark.timeout(900)
def test_server_over_vllm_has_the_routes_of_trainers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = saved_policy(tmp_path)
    with vllm_llm(tmp_path) as llm:
        llm.serve(ServeConfig(port=0, served_model_name="tiny"), blocking=False)
        client = Client(llm)
        check_generation(client, policy)
        check_update_while_paused(client, llm, policy)
        stats = llm.stats()
        assert stats.num_finished >= 3
        name = 'vllm:generation_tokens_total{engine="0",model_name="tiny"}'
        assert f"{name} {stats.num_sampled_tokens}" in client.get("/metrics").decode()
        assert main(["top", client.url, "count=1", "--json"]) == 0
        (engine,) = json.loads(capsys.readouterr().out)["engines"]
        assert (engine["state"], engine["weights_version"]) == ("RUNNING", 1)
        assert engine["num_finished"] == stats.num_finished
        assert engine["num_blocks_total"] == OPTIONS["num_gpu_blocks_override"] - 1


def check_generation(client: Client, policy: Any) -> None:
    body = {"prompt": [3, 1, 4], "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
    (choice,) = client.post("/v1/completions", body | {"ignore_eos": True})["choices"]
    tokens = [3, 1, 4, *choice["token_ids"]]
    rows_TV = logprobs_of(policy, tokens)
    expected = rows_TV[range(2, 11), tokens[3:]].tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=CLOSE)

    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "ignore_eos": True}
    reply = client.post("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2})
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"] == 9
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])


def check_update_while_paused(client: Client, llm: LLM, policy: Any) -> None:
    """vLLM's routes freeze a request, which continues under weights that are pushed meanwhile."""
    replies: list[Any] = []
    sampling = {"max_tokens": 100, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": [3, 1, 4], "sampling_params": sampling}

    def ask() -> None:
        replies.append(client.post("/inference/v1/generate", body))

    def runs_or_ended(thread: threading.Thread, num_before: int) -> bool:
        return not thread.is_alive() or llm.stats().num_sampled_tokens > num_before

    while True:
        num_tokens = llm.stats().num_sampled_tokens
        (thread := threading.Thread(target=ask)).start()
        until(partial(runs_or_ended, thread, num_tokens), "the request runs")
        client.post("/pause?mode=keep")
        if llm.stats().num_running:
            break
        client.post("/resume")  # it ended before the pause
        thread.join()
        assert replies.pop(), "the request did not fail"
    assert json.loads(client.get("/is_paused")) == {"is_paused": True}
    randomize(policy, seed=6)
    assert WeightSync(llm).push(policy).version == 1
    assert not replies
    client.post("/resume")
    thread.join()
    (choice,) = replies[0]["choices"]
    assert len(choice["token_ids"]) == 100
    first, second = choice["weight_versions"]
    assert (first["version"], first["start"]) == ("0", 0)
    assert second == {"version": "1", "start": first["end"], "end": 100}


@pytest.mark.timeout(900)
def test_rollout_generate_over_vllm_prints_an_answer(tmp_path: Path) -> None:
    saved_policy(tmp_path)
    fields = FIELDS | {"engine_options": json.dumps(OPTIONS)}
    settings = [f"{name}={value}" for name, value in fields.items()]
    settings += ["num_tokens_to_generate=5", "ignore_eos=true"]
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "generate", str(tmp_path), *settings, "--logprobs"],
        cwd=ROOT,
        input="Why is the sky blue?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, done.stdout.splitlines())
    assert isinstance(row["text"], str)
    assert len(row["log_probs"]) == 5
    assert max(row["log_probs"]) < 0
