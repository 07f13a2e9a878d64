"""Fields that a client leaves out, with and without the model's generation_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import ConfigError, ServeConfig
from rollout.serve.generation_config import SamplingDefaults, sampling_defaults
from tests.serve import chat_model
from tests.serve.served import CONFIG, OwnEngine, Served

pytestmark = pytest.mark.distributed

FILE = {"temperature": 0.7, "top_k": 1, "top_p": 0.8, "max_new_tokens": 3, "do_sample": True}
PROMPT = [5, 6, 7, 8]
REST = {"seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shutil.copytree(chat_model.directory(), path, dirs_exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(FILE))
    return path


def server_with(directory: Path, generation_config: str | None) -> Served:
    fields = {} if generation_config is None else {"generation_config": generation_config}
    config = ServeConfig(port=0, **fields)
    return Served(lambda: OwnEngine(str(directory), None, CONFIG), config)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Callable[[str | None], Served]]:
    servers: dict[str | None, Served] = {}

    def of(generation_config: str | None) -> Served:
        if generation_config not in servers:
            servers[generation_config] = server_with(directory, generation_config)
        return servers[generation_config]

    yield of
    for server in servers.values():
        server.close()


def drawn(server: Served, **fields: Any) -> dict[str, list[int]]:
    """The ids that each route draws after one prompt."""
    openai = {**REST, **fields, "prompt_token_ids": PROMPT, "return_token_ids": True}
    completion = server.post("/v1/completions", openai).json()["choices"][0]
    chat = server.post("/v1/chat/completions", openai).json()["choices"][0]
    sampling = {**REST, **fields}
    tokens = server.post(
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}
    )
    sampling = {"ignore_eos": True, "sampling_seed": REST["seed"], "max_new_tokens": 16, **fields}
    sglang = server.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    return {
        "completions": completion["token_ids"],
        "chat": chat["token_ids"],
        "tokens": tokens.json()["choices"][0]["token_ids"],
        "sglang": sglang.json()["output_ids"],
    }


def test_generation_config_auto_reads_the_file(served: Callable[[str | None], Served]) -> None:
    ids = drawn(served("auto"))
    greedy = drawn(served("auto"), temperature=0.0)
    # One token of top_k=1 is the most likely one.
    assert ids["completions"] == greedy["completions"]
    assert len(ids["completions"]) == 16  # of max_tokens, whose default is OpenAI's
    assert ids["chat"] == ids["tokens"] == greedy["chat"] == ids["completions"][:3]


def test_a_field_of_the_request_overrides_generation_config(
    served: Callable[[str | None], Served],
) -> None:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert (
        drawn(served("auto"), **neutral)["completions"]
        == drawn(served("vllm"))["completions"]
        != drawn(served("auto"))["completions"]
    )


def test_generation_config_vllm_draws_from_the_whole_distribution(
    served: Callable[[str | None], Served],
) -> None:
    assert ServeConfig().generation_config == "vllm"
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ids = drawn(served("vllm"))
    assert ids["completions"] == drawn(served("vllm"), **neutral)["completions"]
    assert len(ids["chat"]) == len(ids["tokens"]) == 512 - len(PROMPT)


def test_sglangs_generate_does_not_read_the_file(served: Callable[[str | None], Served]) -> None:
    assert drawn(served("auto"))["sglang"] == drawn(served("vllm"))["sglang"]


def test_max_new_tokens_of_the_file_is_cut_to_the_context(
    served: Callable[[str | None], Served],
) -> None:
    prompt = {"prompt_token_ids": [5] * 510, "ignore_eos": True}
    reply = served("auto").post("/v1/chat/completions", prompt).json()
    assert reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": "0.9"}, "top_p='0.9'"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"max_new_tokens": 0}, "max_tokens=0"),
    ],
)
def test_generation_config_out_of_range_is_refused_at_start(
    tmp_path: Path, file: dict[str, Any], message: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match="generation_config='vllm'") as refusal:
        sampling_defaults(str(tmp_path), "auto")
    assert message in str(refusal.value)
    assert "generation_config.json" in str(refusal.value)
    assert sampling_defaults(str(tmp_path), "vllm") == SamplingDefaults()


def test_generation_config_skips_nulls_and_unknown_settings(tmp_path: Path) -> None:
    file = {"temperature": None, "top_k": 20, "eos_token_id": [1, 2], "do_sample": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert sampling_defaults(str(tmp_path), "auto") == SamplingDefaults(top_k=20)
    assert sampling_defaults(None, "auto") == SamplingDefaults()
