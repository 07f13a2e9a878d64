"""vLLM's families in GET /metrics, compared with the requests and replies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout import AsyncLLM, ServeConfig
from rollout.control.reports import EngineStats
from rollout.control.state import EngineState
from rollout.serve.metrics import VllmFamilies
from rollout.telemetry import RankUse
from tests.apis.fleets import directory, weights
from tests.serve.served import CONFIG, Answer, Served
from tests.tiny_models import pool_gb, prompt_of, tiny_engine, tiny_model

pytestmark = pytest.mark.distributed

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS = 24, 8, 4
NAME = "tiny"
# Fewer blocks than the rows want in the end, and no reserve: some requests are preempted.
CROWDED = CONFIG.replace(
    buffer_size_gb=pool_gb(tiny_model("qwen3"), NUM_BLOCKS, BLOCK_SIZE),
    max_requests=NUM_ROWS,
    max_sequence_length=NUM_BLOCKS * BLOCK_SIZE,
    schedule_conservativeness=0.0,
    paused_buffer_size_gb=0.0,
    enable_prefix_caching=True,
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module", name="served")
def crowded_server() -> Iterator[Served]:
    config = ServeConfig(port=0, served_model_name=NAME)
    server = Served(lambda: AsyncLLM(directory(), None, CROWDED), config)
    try:
        yield server
    finally:
        server.close()


class Metrics:
    """The families of one text, read by Prometheus' own parser."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.samples: Samples = {}
        for family in text_string_to_metric_families(text):
            if not family.name.startswith("vllm:"):
                continue
            self.types[family.name] = family.type
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert (sample.name, labels) not in self.samples
                self.samples[sample.name, labels] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """The value of `vllm:NAME` of engine 0."""
        labels = {"engine": "0", "model_name": NAME} | labels
        return self.samples[f"vllm:{name}", tuple(sorted(labels.items()))]

    def count(self, name: str) -> float:
        """Return the number of latencies in a histogram. Its last bucket has the same number."""
        number = self(f"{name}_count")
        assert number == self(f"{name}_bucket", le="+Inf")
        return number


def metrics(served: Served) -> Metrics:
    answer = served.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return Metrics(answer.body.decode())


class Asked:
    """A completion from another thread."""

    def __init__(self, served: Served, **body: Any) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(served.post("/v1/completions", body))
        )
        self._thread.start()

    @property
    def is_answered(self) -> bool:
        return bool(self._answers)

    def choices(self) -> Any:
        self._thread.join()
        answer = self._answers[0]
        assert answer.status == 200, answer.body
        return answer.json()["choices"]


def body_of(num_prompt: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt_of(num_prompt),
        "max_tokens": num_tokens,
        "seed": num_prompt,
        "ignore_eos": True,
        "return_token_ids": True,
        "request_id": "asked",
    } | fields


def test_metrics_count_requests_and_latencies(served: Served) -> None:
    before = metrics(served)
    stop = served.post("/v1/completions", body_of(7, 6)).json()["choices"][0]["token_ids"][2]
    bodies = [
        *(body_of(10 + i, 70) for i in range(6)),  # 4 rows of 80 tokens want 40 of 24 blocks
        body_of(9, 12, n=3),
        body_of(7, 6, stop_token_ids=[stop]),
        body_of(11, 5, prompt=[prompt_of(11), prompt_of(13)], n=2),
    ]
    asked = [Asked(served, **body) for body in bodies]
    answered = [choice for each in asked for choice in each.choices()]
    assert served.post("/v1/completions", body_of(500, 1)).status == 400
    assert served.post("/pause?mode=keep").status == 200
    unbegun = Asked(served, **body_of(6, 2))
    while metrics(served)("num_requests_waiting") == 0:
        pass
    assert served.post("/abort_requests", {"request_ids": ["asked"]}).status == 200
    (choice,) = unbegun.choices()
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "abort")
    assert served.post("/resume").status == 200
    long = Asked(served, **body_of(5, NUM_BLOCKS * BLOCK_SIZE - 5))
    while not long.is_answered and metrics(served)("num_requests_running") == 0:
        pass
    assert served.post("/abort_requests", {"request_ids": ["asked"]}).status == 200
    (cut,) = long.choices()
    after = metrics(served)

    def more(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    num_first = 6  # of the request that found the token to stop at
    num_generated = num_first + sum(len(c["token_ids"]) for c in [*answered, cut])
    assert more("generation_tokens_total") == num_generated
    prompts = [7, *range(10, 16), 9, 9, 9, 7, 11, 11, 13, 13]
    has_begun = len(cut["token_ids"]) > 0  # usually; the reply does not say where it was aborted
    assert more("prompt_tokens_total") == sum(prompts) + 5 * has_begun
    reasons = Counter(choice["finish_reason"] for choice in [*answered, choice, cut])
    reasons["length"] += 1  # of the request that found the token to stop at
    for reason in ("stop", "length", "abort", "error"):
        assert more("request_success_total", finished_reason=reason) == reasons[reason]
    assert (reasons["stop"], reasons["error"]) == (1, 0)
    num_begun = len(prompts) + has_begun
    latencies = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    counts = [after.count(name) - before.count(name) for name in latencies]
    assert counts == [num_begun, num_generated - num_begun]
    name = "e2e_request_latency_seconds"
    num_ended = reasons["stop"] + reasons["length"]
    assert after.count(name) - before.count(name) == num_ended, "without those aborted"
    sums = [more(f"{each}_sum") for each in (*latencies, name)]
    assert 0 < sums[2] <= sums[0] + sums[1], "the time of a request is that of its tokens"
    assert more("num_preemptions_total") > 0, "the pool was too small"
    assert more("prefix_cache_queries_total") >= sum(prompts) - 9 * 2 - 11 - 13
    assert 0 <= more("prefix_cache_hits_total") < more("prefix_cache_queries_total")
    assert after("num_requests_running") == after("num_requests_waiting") == 0
    stats = served.do(served.llm.stats())
    assert after("num_preemptions_total") == stats.num_evictions
    assert after("generation_tokens_total") == stats.num_generated_tokens


def test_metrics_count_queued_requests_as_waiting(served: Served) -> None:
    num_asked = NUM_ROWS + 8 + 3  # rows, those that an engine holds ahead, and some for the fleet
    assert served.post("/pause?mode=keep").status == 200
    asked = [Asked(served, **body_of(4, 2, request_id=None)) for _ in range(num_asked)]
    while (now := metrics(served))("num_requests_waiting") < num_asked:
        pass
    assert now("num_requests_running") == 0
    assert now("num_requests_waiting") == num_asked
    assert now("num_requests_waiting_by_reason", reason="capacity") == num_asked
    assert now("num_requests_waiting_by_reason", reason="deferred") == 0
    assert served.post("/resume").status == 200
    for each in asked:
        each.choices()
    assert metrics(served)("num_requests_waiting") == 0


def test_kv_cache_usage_perc_counts_blocks_of_requests(served: Served) -> None:
    now = metrics(served)
    assert now("kv_cache_usage_perc") == 0.0, "cached blocks without a user are free"
    info = {"block_size": "8", "num_gpu_blocks": "24", "kv_cache_size_tokens": "192"}
    labels = tuple(sorted({"engine": "0", **info}.items()))
    assert now.samples["vllm:cache_config_info", labels] == 1
    asked = Asked(served, **body_of(4, 100))
    assert served.post("/pause?mode=keep").status == 200  # wherever it is
    stats = served.do(served.llm.stats())
    assert metrics(served)("kv_cache_usage_perc") == stats.num_blocks_used / NUM_BLOCKS
    assert served.post("/resume").status == 200
    asked.choices()
    used = families(stats_with(num_blocks_used=6, num_blocks_total=24, num_blocks_indexed=20))
    assert used("kv_cache_usage_perc") == 0.25


@pytest.mark.parametrize(
    ("path", "states"),
    [
        ("/sleep?level=0&mode=keep", (0, 0, 0)),
        ("/sleep?level=1", (0, 1, 0)),
        ("/release_kv_cache_memory", (0, 0, 0)),
        ("/pause", (1, 0, 0)),
        ("/sleep?level=2", (0, 0, 1)),  # the last one: the weights are gone
    ],
)
def test_engine_sleep_state_reports_released_weights(
    served: Served, path: str, states: tuple[int, ...]
) -> None:
    def now() -> tuple[float, ...]:
        found = metrics(served)
        names = ("awake", "weights_offloaded", "discard_all")
        return tuple(found("engine_sleep_state", sleep_state=name) for name in names)

    assert now() == (1, 0, 0)
    assert served.post(path).status == 200
    assert now() == states
    assert bool(states[0]) is not served.get("/is_sleeping").json()["is_sleeping"]
    assert served.post("/wake_up").status == 200
    assert served.post("/resume").status == 200
    assert now() == (1, 0, 0)
    if path.endswith("level=2"):
        served.do(served.llm.update_weights(weights()))


# What prime-rl's concurrency controller and its panels take from /metrics: by engine, the gauges
# and counters of these names, and the capacity from the labels of the last. It reads families of
# type counter, gauge and histogram alone, and sums over all labels but `engine` and `reason`.
PRIME_RL = {
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:cache_config_info": "gauge",
}


def test_metrics_have_every_family_that_prime_rl_reads(served: Served) -> None:
    now = metrics(served)
    assert {name: now.types.get(name) for name in PRIME_RL} == PRIME_RL
    assert {"counter", "gauge", "histogram"} == set(now.types.values())
    engines = {dict(labels)["engine"] for _, labels in now.samples}
    assert engines == {"0"}, "every sample is of an engine"
    names = {name for name, _ in now.samples}
    assert {f"{name}_total" for name, kind in PRIME_RL.items() if kind == "counter"} <= names
    (info,) = [dict(labels) for name, labels in now.samples if name == "vllm:cache_config_info"]
    assert int(info["kv_cache_size_tokens"]) == int(info["num_gpu_blocks"]) * int(
        info["block_size"]
    )


# ---- several engines


def families(*engines: EngineStats, num_queued: int = 0, sleeps: bool = False) -> Metrics:
    registry = CollectorRegistry()
    registry.register(
        VllmFamilies(
            model_name=NAME,
            engines=dict(enumerate(engines)),
            num_queued=num_queued,
            sleeps=sleeps,
        )
    )
    return Metrics(generate_latest(registry).decode())


def stats_with(**changes: Any) -> EngineStats:
    return replace(tiny_engine(tiny_model()).stats(), **changes)


@pytest.mark.parametrize("num_queued", range(4))
def test_requests_without_an_engine_wait_in_equal_parts(num_queued: int) -> None:
    engines = [
        stats_with(num_running=5, num_waiting=3, num_without_room=2, num_paused=1),
        stats_with(num_running=7),
        stats_with(state=EngineState.PAUSED, num_waiting=4, num_without_room=1),
    ]
    now = families(*engines, num_queued=num_queued)
    running, waiting = (
        [now(f"num_requests_{name}", engine=str(rank)) for rank in range(3)]
        for name in ("running", "waiting")
    )
    assert running == [6, 7, 0], "one of the three has come since the last step"
    here = [own - base for own, base in zip(waiting, (3, 0, 4), strict=True)]
    assert sum(here) == num_queued
    assert max(here) - min(here) <= 1


def test_each_engine_has_its_own_counters() -> None:
    engines = [stats_with(num_generated_tokens=3), stats_with(num_generated_tokens=8)]
    now = families(*engines)
    assert [now("generation_tokens_total", engine=str(i)) for i in (0, 1)] == [3, 8]


def test_without_engines_families_have_no_samples() -> None:
    now = families(num_queued=2)
    assert set(PRIME_RL) <= set(now.types)
    assert now.samples == {}


def test_weights_of_one_rank_that_are_there_are_not_discarded() -> None:
    use = RankUse(
        kv_bytes=0,
        weights_bytes=0,
        kv_on_host_bytes=0,
        weights_on_host_bytes=0,
        lora_base_bytes=0,
        rss_bytes=0,
        cpu_seconds=0.0,
        wait_seconds=0.0,
    )
    ranks = (use, replace(use, rank=1, weights_bytes=64))
    now = families(stats_with(state=EngineState.SUSPENDED, ranks=ranks))
    assert now("engine_sleep_state", sleep_state="discard_all") == 0
