"""rollout_verl over fakes of verl's registries: settings, the server's methods, the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import LLM, ConfigError, InvalidRequestError, SamplingParams
from rollout.errors import RolloutError, WeightUpdateError
from rollout.models.checkpoints.reader import Checkpoint
from rollout.step.seeds import mix_seed, system_seed
from tests.apis.fleets import directory, weights
from tests.rollout_verl.fake_verl import VERL_FIELDS, RolloutMode, fake_verl, rollout_config
from tests.tiny_mixtures import tiny_mixture


@pytest.fixture
def verl() -> Iterator[SimpleNamespace]:
    with fake_verl() as verl:
        yield verl


GREEDY = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}


def test_the_import_registers_the_replica_and_the_adapter(verl: SimpleNamespace) -> None:
    import_module("rollout_verl.plugin")
    assert verl.registry["rollout"]().__name__ == "EngineReplica"
    module, _, name = verl.adapters["rollout", "async"].rpartition(".")
    assert getattr(import_module(module), name).__name__ == "ServerAdapter"


def test_sampling_parameters_of_verl_become_ours(verl: SimpleNamespace) -> None:
    settings = import_module("rollout_verl.settings")
    config = rollout_config()
    given = {**GREEDY, "logprobs": True, "max_tokens": 7, "stop_token_ids": [3], "n": 1}
    assert settings.sampling_params_of(given, config, 10) == SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=7,
        stop_token_ids=[3],
        return_log_probs=True,
        logprobs_mode="processed",
    )
    for given, num_prompt, num_tokens in (
        ({}, 10, 450),
        ({}, 100, 380),
        ({"max_new_tokens": 9}, 10, 9),
        ({"max_tokens": 10**6}, 10, 470),
    ):
        params = settings.sampling_params_of(given, config, num_prompt)
        assert (params.num_tokens_to_generate, params.top_k, params.top_p) == (num_tokens, 0, 0.0)
    with pytest.raises(InvalidRequestError, match="leaves no room"):
        settings.sampling_params_of({}, config, 480)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"top_k": 5, "top_p": 0.9}, {"top_k": 5, "top_p": 0.9}),
        ({"top_k": None, "top_p": None, "stop": None, "logprobs": None}, {}),
        ({"logit_bias": {3: 1.0}}, {"logit_bias": {3: 1.0}}),
        ({"allowed_token_ids": [3]}, {"allowed_token_ids": [3]}),
        ({"stop": ["a"], "include_stop_str_in_output": True}, {"stop_words": ["a"]}),
        ({"n": 1, "best_of": 1, "prompt_logprobs": None}, {}),
    ],
)
def test_each_sampling_parameter_of_verl_is_followed(
    given: dict[str, Any], changes: dict[str, Any], verl: SimpleNamespace
) -> None:
    sampling_params_of = import_module("rollout_verl.settings").sampling_params_of
    plain = sampling_params_of({}, rollout_config(), 10)
    assert sampling_params_of(given, rollout_config(), 10) == replace(plain, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", 4), ("best_of", 2), ("do_sample", False), ("prompt_logprobs", 1)],
        *[("structured_outputs", {"regex": "a"}), ("bad_words", ["a"]), ("extra_args", {"a": 1})],
        *[("truncate_prompt_tokens", 4), ("guided_json", {}), ("top_kk", 3)],
    ],
)
def test_sampling_parameters_that_no_engine_follows_are_refused_by_name(
    name: str, value: Any, verl: SimpleNamespace
) -> None:
    settings = import_module("rollout_verl.settings")
    with pytest.raises(InvalidRequestError, match=f"sampling parameter {name}=.* is not supported"):
        settings.sampling_params_of({name: value}, rollout_config(), 5)


def test_the_tables_have_every_field_of_verls_rollout_config_once(verl: SimpleNamespace) -> None:
    fields = import_module("rollout_verl.fields")
    tables = [fields.USED, frozenset(fields.REFUSED), *fields.NO_EFFECT.values()]
    assert sum(map(len, tables)) == len(frozenset().union(*tables)), "a field is in one table"
    assert frozenset().union(*tables) == set(VERL_FIELDS)


def test_the_defaults_of_verls_rollout_config_are_accepted(verl: SimpleNamespace) -> None:
    fields = import_module("rollout_verl.fields")
    fields.check_config(SimpleNamespace(**(VERL_FIELDS | {"engine_kwargs": {"vllm": {}}})))


# Values that check_config refuses by rules beyond its tables.
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"disaggregation": SimpleNamespace(enabled=True)}, r"disaggregation\.enabled=True"),
    ({"mtp": SimpleNamespace(enable=True, enable_rollout=True)}, r"mtp\.enable_rollout=True"),
    ({"qat": {"enable": True}}, r"qat\.enable=True"),
    (
        {"engine_kwargs": {"vllm": {"block_size": 32}}},
        r"engine_kwargs\.vllm is for another backend",
    ),
]
REFUSED_VALUES: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "expert_parallel_size": 2,
    "moe_tensor_parallel_size": 2,
    "gpu_memory_utilization": 0.8,
    "standalone_gpu_memory_utilization": 0.8,
    "cudagraph_capture_sizes": [1, 2],
    "quantization": "fp8",
    "quantization_config_file": "config.json",
    "limit_images": 4,
    "over_sample_rate": 0.2,
    "load_format": "gguf",
    "scheduling_policy": "lpm",
}


def test_every_refused_field_of_verls_rollout_config_is_named_with_a_remedy(
    verl: SimpleNamespace,
) -> None:
    fields = import_module("rollout_verl.fields")
    assert set(REFUSED_VALUES) == set(fields.REFUSED)
    changes: list[tuple[dict[str, Any], str]] = [
        ({name: value, "engine_kwargs": {}}, rf"rollout\.{name}=.* is not supported: \w")
        for name, value in REFUSED_VALUES.items()
    ]
    for change, message in changes + PARTS:
        with pytest.raises(ConfigError, match=message):
            fields.check_config(rollout_config(**change))


def test_buffer_size_gb_replaces_gpu_memory_utilization(verl: SimpleNamespace) -> None:
    settings = import_module("rollout_verl.settings")
    fields = settings.engine_fields(rollout_config(gpu_memory_utilization=0.8), 0)
    assert fields["buffer_size_gb"] == 0.02


def test_fields_of_verls_rollout_config_reach_the_engine(verl: SimpleNamespace) -> None:
    settings = import_module("rollout_verl.settings")
    plain = settings.engine_fields(rollout_config(), 0)
    for change, field, value in (
        ({"tensor_model_parallel_size": 2}, "tensor_parallel_size", 2),
        ({"enable_rollout_routing_replay": True}, "record_routing", True),
        ({"full_determinism": True}, "deterministic", True),
        ({"enforce_eager": True}, "num_cuda_graphs", 0),
        ({"max_num_seqs": 4}, "max_requests", 4),
        ({"max_model_len": 64}, "max_sequence_length", 64),
    ):
        fields = settings.engine_fields(rollout_config(**change), 0)
        assert fields[field] == value
        assert {k: v for k, v in fields.items() if k != field} == {
            k: v for k, v in plain.items() if k != field
        }


@pytest.mark.parametrize(
    "lora", [{"lora_rank": 8, "lora": {}}, {"lora_rank": 0, "lora": {"rank": 8}}]
)
def test_lora_adapters_are_refused_before_anything_starts_unless_verl_merges_them(
    lora: dict[str, Any], verl: SimpleNamespace
) -> None:
    replica = import_module("rollout_verl.replica").EngineReplica()
    replica.config, replica.nnodes = rollout_config(), 2
    replica.model_config = SimpleNamespace(**lora)
    with pytest.raises(ConfigError, match=r"adapter of rank 8 .*model\.lora\.merge=True"):
        asyncio.run(replica.launch_servers())
    replica.model_config = SimpleNamespace(**(lora | {"lora": {**lora["lora"], "merge": True}}))
    with pytest.raises(ConfigError, match="2 nodes"):
        asyncio.run(replica.launch_servers())


@pytest.mark.distributed
def test_engine_server_of_two_ranks_replies_with_routed_experts_and_cached_tokens(
    verl: SimpleNamespace, tmp_path: Path
) -> None:
    tiny_mixture().save_pretrained(tmp_path)
    config = rollout_config(
        tensor_model_parallel_size=2,
        enable_rollout_routing_replay=True,
        engine_kwargs={
            "rollout": {
                **{"buffer_size_gb": 0.02, "num_threads": 1, "block_size_tokens": 8},
                "prefix_caching_eviction_policy": "lru",
            }
        },
    )
    prompt = [5, 6, 7] * 8
    with LLM(
        str(tmp_path), buffer_size_gb=0.02, num_threads=1, dtype="float32", record_routing=True
    ) as llm:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=8)
        (expected,) = llm.generate([prompt], params)
    server = import_module("rollout_verl.server").EngineServer(
        config, str(tmp_path), RolloutMode.STANDALONE
    )

    async def run() -> list[Any]:
        await server.launch()
        try:
            assert [rank.label for rank in (await server.llm.stats()).ranks] == ["0.0", "0.1"]
            params = {**GREEDY, "max_tokens": 8}
            return [await server.generate(prompt, params, "name") for _ in range(2)]
        finally:
            await server.shutdown()

    first, second = asyncio.run(run())
    assert first.token_ids == second.token_ids == expected.generated_tokens
    assert first.routed_experts.dtype.name == "int16"
    assert first.routed_experts.tolist() == expected.routing_indices.tolist()
    assert second.routed_experts.tolist() == expected.routing_indices.tolist()
    assert (first.extra_fields["num_cached_tokens"], second.extra_fields["num_cached_tokens"]) == (
        0,
        16,
    )


@pytest.mark.distributed
def test_engine_server_generates_aborts_waits_updates_and_sleeps(verl: SimpleNamespace) -> None:
    server = import_module("rollout_verl.server").EngineServer(
        rollout_config(), directory(), RolloutMode.HYBRID
    )

    async def generate(num_tokens: int, **more: Any) -> Any:
        params = {**GREEDY, "logprobs": True, "max_tokens": num_tokens}
        return await server.generate([5, 6, 7], params, "name", **more)

    async def run() -> None:
        address = await server.launch()
        assert address.startswith("127.0.0.1:")
        try:
            await check()
        finally:
            await server.shutdown()

    async def check() -> None:
        short = await generate(8)
        assert (len(short.token_ids), short.stop_reason) == (8, "completed")
        assert len(short.log_probs) == 8
        for name in ("image_data", "video_data", "audio_data"):
            with pytest.raises(InvalidRequestError, match=f"{name}: images, video and sound"):
                await generate(8, **{name: ["medium"]})

        running = asyncio.ensure_future(generate(400))
        await asyncio.sleep(0)  # it is sent now, and cannot have ended
        report = await server.abort_all_requests()
        assert report["aborted_count"] == 1
        cut = await running
        assert cut.stop_reason == "aborted"
        assert cut.token_ids[:8] == short.token_ids[: len(cut.token_ids)]
        parked = asyncio.ensure_future(generate(8))
        await asyncio.sleep(0.02)
        assert not parked.done()
        await server.set_global_steps(3)
        await server.resume_generation()
        assert (await parked).token_ids == short.token_ids
        assert (await parked).extra_fields["min_global_steps"] == 3

        await server.abort_all_requests(reject_request=True)
        rejected = await generate(8)
        assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")
        await server.resume_generation()

        await server.sleep()
        await server.wake_up(["weights"])
        assert await server.update_weights(directory(), global_steps=4) == 1
        await server.wake_up(["kv_cache"])
        after = await generate(8)
        assert after.token_ids == short.token_ids, "the same weights came back"
        assert after.extra_fields["global_steps"] == 4
        await server.release_kv_cache()
        await server.resume_kv_cache()
        assert (await generate(8)).token_ids == short.token_ids

        await server.sleep()
        await server.wake_up()
        waiting = asyncio.ensure_future(generate(8))
        await server.update_weights(directory(), global_steps=5)
        assert (await waiting).token_ids == short.token_ids, "it waited for the weights"

    asyncio.run(run())


class Method:
    """A method of an actor: `remote` is awaited."""

    def __init__(self, received: list[Any]) -> None:
        self._received = received

    async def remote(self, path: str, global_steps: int | None) -> None:
        tensors = {name: t.clone() for name, t in Checkpoint.open(Path(path)).items()}
        self._received.append((tensors, global_steps))


def test_server_adapter_of_the_leader_sends_all_tensors_and_other_ranks_gather(
    verl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_of = import_module("rollout_verl.adapter").ServerAdapter
    received: list[Any] = []
    verl.actors["rollout_server_1_0"] = SimpleNamespace(update_weights=Method(received))
    state, gathered = weights().state_dict(), []

    async def pairs() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            gathered.append(name)
            yield name, tensor

    config = rollout_config(data_parallel_size=2, tensor_model_parallel_size=2)
    for rank in (4, 5, 7):
        monkeypatch.setenv("RANK", str(rank))
        adapter = adapter_of(config, None, None)
        assert (adapter.replica_rank, adapter.is_leader_rank) == (1, rank == 4)
        asyncio.run(adapter.update_weights(pairs(), global_steps=5))
    assert gathered == [*state] * 3
    ((tensors, global_steps),) = received
    assert global_steps == 5
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())
    with pytest.raises(ConfigError, match="delta_flush"):
        asyncio.run(adapter.update_weights(pairs(), wire_format="delta_flush"))


def test_server_adapter_that_fails_keeps_gathering_with_the_other_ranks(
    verl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    adapter = import_module("rollout_verl.adapter").ServerAdapter(rollout_config(), None, None)
    gathered = []

    async def pairs() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name in ("a", "a", "b"):
            gathered.append(name)
            yield name, torch.zeros(2)

    with pytest.raises(WeightUpdateError, match="'a' comes twice"):
        asyncio.run(adapter.update_weights(pairs()))
    assert gathered == ["a", "a", "b"]


def test_python_m_rollout_verl_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = import_module("rollout_verl.__main__")

    def version_of(name: str) -> str:
        raise check.PackageNotFoundError(name)

    monkeypatch.setattr(check, "version", version_of)
    assert check.main() == 1
    assert "failed: RuntimeError: verl is not installed" in capsys.readouterr().err
    monkeypatch.setattr(check, "version", lambda name: "0.8.2")
    assert check.main() == 1
    assert "verl 0.8.2 has no plug-ins; install verl>=0.9" in capsys.readouterr().err
    monkeypatch.setattr(check, "version", lambda name: "0.9.1")
    monkeypatch.setattr(check, "entry_points", lambda group: [])
    assert check.main() == 1
    assert "no entry point 'rollout' in verl.plugins" in capsys.readouterr().err


def recording_server(replica_rank: int, seed: int | None = 0) -> tuple[Any, list[int]]:
    """Return a server of that replica that records the seeds of its requests, and these seeds."""
    config = rollout_config(seed=seed)
    server = import_module("rollout_verl.server").EngineServer(
        config, directory(), RolloutMode.HYBRID, replica_rank
    )
    fields = import_module("rollout_verl.settings").engine_fields(config, replica_rank)
    seeds: list[int] = []

    def add_groups(groups: Any, priority: int) -> Any:
        ((_, (params,)),) = groups
        seeds.append(params.seed)
        raise RolloutError("not sent")

    server._llm = SimpleNamespace(
        client=SimpleNamespace(add_groups=add_groups),
        seed=system_seed() if fields["seed"] is None else fields["seed"],
        weights_version=0,
    )
    return server, seeds


def seeds_of(replica_rank: int, steps: list[int], seed: int | None = 0) -> list[int]:
    """Return the seeds of two requests in each of the trainer's `steps`."""
    server, seeds = recording_server(replica_rank, seed)

    async def run() -> None:
        for step in steps:
            await server.set_global_steps(step)
            for _ in range(2):
                with pytest.raises(RolloutError, match="not sent"):
                    await server.generate([5, 6, 7], {}, "name")

    asyncio.run(run())
    return seeds


def test_replicas_of_one_seed_draw_differently_and_a_resumed_job_repeats_no_noise(
    verl: SimpleNamespace,
) -> None:
    whole = seeds_of(0, [1, 2, 3])
    assert seeds_of(0, [1, 2, 3]) == whole, "an explicit seed repeats a run"
    runs = [whole, seeds_of(1, [1, 2, 3]), seeds_of(0, [4, 5]), seeds_of(1, [4, 5])]
    runs += [seeds_of(rank, [1, 2, 3], seed=None) for rank in (0, 0)]
    seeds = [seed for run in runs for seed in run]
    assert len(set(seeds)) == len(seeds)


def test_seed_of_verls_sampling_parameters_equals_llm_generate(verl: SimpleNamespace) -> None:
    server, seeds = recording_server(3)

    async def run() -> None:
        with pytest.raises(RolloutError, match="not sent"):
            await server.generate([5, 6, 7], {"seed": 9}, "name")

    asyncio.run(run())
    assert seeds == [mix_seed(9, 0, 0)]
