"""Mistakes of new users: each is answered by one line, with the value and the remedy."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from rollout import LLM, InferenceConfig, SamplingParams, ServeConfig
from rollout.cli import main as command_line
from rollout.errors import RolloutError
from rollout.models import ModelSpec, build_model, save_hf_directory
from trainer_hooks import PolicyLossConfig, UpdateSettings
from trainer_hooks.doctor.command import main as doctor
from trainer_hooks.train.job import compose_settings
from trainer_hooks.train.settings import DataSettings, ModelSettings

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"buffer_size_gb": 0.001, "num_threads": 1}
TRAIN = "train data=jsonl data.path=train.jsonl reward=mine:score model.path=model"

# A command line, run in a folder with a model in `model`, and parts of its one line. BUSY stands
# for a port in use, FREE for a port at which nothing listens, WEB for a port of another web server.
COMMANDS = [
    # ---- the command
    ("generat model", "unknown command 'generat'; did you mean generate?"),
    ("sever model", "unknown command 'sever'; did you mean serve?"),
    ("trian", "unknown command 'trian'; did you mean train?"),
    ("model", "unknown command 'model'; for a model give `rollout serve model`"),
    ("--model model", "unknown command '--model'; one of: serve, generate,"),
    # ---- serve
    ("serve", "model is missing; give model=DIR"),
    ("serve nowhere", "model=nowhere is not a directory; models are not downloaded here"),
    ("serve SmolLM2", "model=SmolLM2 is not a directory; did you mean smollm2?"),
    ("serve org/name", "run `hf download org/name --local-dir name`, then give name"),
    ("serve empty", "model=empty has no config.json; give a Hugging Face model directory"),
    ("serve train.jsonl", "model=train.jsonl is a file; give the directory with config.json"),
    ("serve model other", "'other' is not a setting: settings are written key=value"),
    ("serve model model=model", "model is given twice"),
    ("serve model prot=8000", "prot=8000 is unknown; did you mean port?"),
    ("serve model --port 8000", "--port is unknown; settings are written port=8000"),
    ("serve model --tensor-parallel-size=2", "settings are written tensor_parallel_size=2"),
    ("serve model --max-num-seqs 4", "--max-num-seqs is unknown; max_num_seqs is max_requests"),
    ("serve model api-key=x", "api-key=x is unknown; write api_key=x"),
    ("serve model tp=2", "tp=2 is unknown; tp is tensor_parallel_size here"),
    ("serve model dp=2", "dp=2 is unknown; dp is data_parallel_size here"),
    ("serve model gpu_memory_utilization=0.9", "is buffer_size_gb (the GiB of the KV pool) here"),
    ("serve model trust_remote_code=true", "is not needed (code of a checkpoint is never run)"),
    ("serve model_path=model", "model_path is model (or the first word: rollout serve DIR) here"),
    ("serve model max_model_len=4k", "max_model_len=4k must be an integer or none"),
    ("serve model max_new_tokens=4", "num_tokens_to_generate, of SamplingParams and not of an en"),
    (
        "serve model dtype=fp16",
        "dtype='fp16' must be one of ['auto', 'float32', 'bfloat16', 'float",
    ),
    ("serve model port=http", "port=http must be an integer"),
    ("serve model port=99999", "port=99999 must be an integer in [0, 65535]"),
    ("serve model port=BUSY", "port=BUSY is not a free address: ", "or port=0, which takes a free"),
    ("serve model host=0.0.0.0", "host='0.0.0.0' can be reached from other machines; set api_key"),
    ("serve model protocols=vlm", "must be a tuple of items", "['openai', 'vllm', 'sglang']"),
    ("serve model port=0 tokenizer=empty", "empty holds no tokenizer.json"),
    # ---- generate
    ("generate model max_new_tokens=5", "max_new_tokens is num_tokens_to_generate here"),
    ("generate model max_tokens=5", "num_tokens_to_generate (and engine.max_tokens for the tokens"),
    ("generate model temperature=hot", "temperature=hot must be a number"),
    ("generate model temperature=-1", "temperature=-1", "must be 0 for greedy sampling, or finite"),
    ("generate model top_p=2", "top_p=2.0 must be a number in [0, 1]"),
    ("generate model stop=END", "stop is stop_words here"),
    ("generate model logprobs=true", "logprobs is the option --logprobs here"),
    ("generate model 'Once upon'", "'Once upon' is not a setting", "`echo 'Once upon' | rollout"),
    ("generate model stop_token_ids=a,b", "stop_token_ids=a,b must be JSON or none"),
    ("generate model --input train.jsonl --output empty", "--output empty is a directory; give a"),
    ("generate model --log-probs", "--log-probs is unknown; did you mean --logprobs?"),
    ("generate model --inptu train.jsonl", "--inptu is unknown; did you mean --input?"),
    (
        "generate model --input train.jsonl --output ./train.jsonl",
        "--output ./train.jsonl is the --input file; give another file",
    ),
    ("generate model prompt=Hi", "prompt is stdin or the option --input FILE here"),
    ("generate model --input none.txt", "--input none.txt: No such file", "leave --input out"),
    ("generate model --output none/o.jsonl --input train.jsonl", "--output none/o.jsonl: No such"),
    ("generate model --output . --input train.jsonl", "--output . is a directory; give a file"),
    (
        f"generate model --output {'x' * 300} --input train.jsonl",
        "File name too long; give a file that can be written",
    ),
    ("generate model --input mixed.jsonl", "mixed.jsonl, line 2 is not JSON"),
    ("generate model --input text.txt num_threads=1", "text prompts need a tokenizer; give token"),
    # ---- bench and explain
    ("bench model num_prompts=0", "num_prompts=0 must be an integer of at least 1"),
    ("bench model input_len=8", "input_len is prompt_tokens here"),
    ("bench model max_new_tokens=8", "max_new_tokens is num_tokens here"),
    ("bench model url=http://127.0.0.1:FREE", "url is a setting of `rollout bench serving`, not"),
    ("bench serve", "a server is measured by `rollout bench serving url=http://HOST:PORT`"),
    ("bench serving", "url is missing; give url=http://127.0.0.1:8000"),
    ("bench serving url=127.0.0.1:FREE", "must begin with http://", "http://127.0.0.1:FREE"),
    (
        "bench serving http://127.0.0.1:FREE",
        "no server answers at http://127.0.0.1:FREE",
        "rollout",
    ),
    ("bench serving http://127.0.0.1:FREE request_rate=2", "request_rate is rate here"),
    ("explain model block_size_tokens=17", "must be a power of two", "nearest is 16"),
    ("explain model buffer_size_gb=0", "buffer_size_gb=0.0 must be a number in (0,"),
    ("explain model device=gpu", "device='gpu' does not exist; use 'auto', 'cpu', 'cuda'"),
    ("explain model num_threads=1 max_sequence_length=9999", "more than the model's 64 positions"),
    # ---- top, coordinator, engine, keys
    ("top", "give one coordinator's address or server's URL, not 0"),
    ("top 127.0.0.1:8000", "127.0.0.1:8000 is not an address: give a server's URL, http://HOST"),
    (
        "top http://127.0.0.1:FREE",
        "no server answers at http://127.0.0.1:FREE (connection refused)",
    ),
    ("top http://127.0.0.1:FREE interval_s=0", "interval_s=0.0 must be a number in (0, 1e+09]"),
    ("coordinator --listen somewhere", "--listen somewhere is not an address: give tcp://HOST:P"),
    ("coordinator --listen tcp://0.0.0.0:0", "can be reached by other machines"),
    ("coordinator port=5555", "port is the option --listen tcp://HOST:PORT here"),
    ("coordinator --keys nowhere", "nowhere/coordinator.key_secret' cannot be read"),
    ("coordinator data_parallel_size=two", "data_parallel_size=two must be an integer"),
    (
        "coordinator prefix_caching_coordinator_policy=rr",
        "routing policy 'rr'; did you mean 'round",
    ),
    ("engine model", "give the coordinator's address", "--join tcp://HOST:PORT"),
    ("engine model --join http://host:1", "--join http://host:1 is not the address of a coordin"),
    ("engine nowhere --join 5", "model=nowhere is not a directory"),
    ("keys", "give a folder for the keys: rollout keys DIR"),
    ("keys --peer engine", "--peer is unknown; see --help"),
    # ---- train: options and groups
    ("train", "data is missing; give data=OPTION, such as data=jsonl data.path=train.jsonl"),
    ("train demo", "'demo' is not KEY=VALUE; for an entry config give --config-name demo"),
    ("train train.jsonl", "for a file of prompts give data=jsonl data.path=train.jsonl"),
    ("train .jsonl", "'.jsonl' is not KEY=VALUE; for an entry config give --config-name .jsonl"),
    (
        "train --num-steps 5",
        "--num-steps is unknown; settings are written KEY=VALUE: trainer.num_st",
    ),
    ("train --tp=2", "--tp=2 is unknown; tp (vLLM) is engine.tensor_parallel_size here"),
    ("train --config-name dem", "--config-name dem is unknown; did you mean demo?"),
    ("train --config-dir nowhere", "--config-dir nowhere is not a directory"),
    ("train --cfg=jbo", "argument --cfg/-c: invalid choice: 'jbo'"),
    ("train --help +algorithm=ppo", "see rollout train --help"),
    ("train --help algorithm=grop", "algorithm=grop is unknown; did you mean algorithm=grpo?"),
    ("train data=json", "data=json is unknown; did you mean data=jsonl?"),
    ("train data=train.jsonl", "for a file of prompts give data=jsonl data.path=train.jsonl"),
    ("train algorithm=PPO", "algorithm=PPO is unknown; did you mean algorithm=ppo?"),
    ("train mode=asynchronous", "mode=asynchronous is unknown; did you mean mode=async?"),
    ("train model=org/name", "for a checkpoint give model.path=org/name"),
    ("train --config-name demo warmup=null", "warmup=null is unknown; options: none, "),
    ("train --config-name demo algorithm=3", "algorithm=3 is unknown; options: cispo, "),
    ("train --help warmup=null", "warmup=null is unknown; options: none, "),
    ("train =3", "'=3' is not KEY=VALUE; see rollout train --help"),
    ("train reward=mine.py", "reward=mine.py is unknown", "give reward=package.module:function"),
    ("train --multirun algorithm=grpo,grop", "algorithm=grop is unknown; did you mean"),
    # ---- train: keys
    ("train foo=1", "unknown config key foo; known: algorithm, data,"),
    ("train algoritm=ppo", "unknown config key algoritm; did you mean algorithm?"),
    ("train algorithm.group_sze=4", "did you mean algorithm.group_size?"),
    ("train num_steps=4", "unknown config key num_steps; did you mean trainer.num_steps?"),
    ("train epochs=4", "epochs is trainer.num_steps, a number of steps, here"),
    ("train max_new_tokens=4", "is algorithm.max_new_tokens (and engine.max_tokens for"),
    ("train engine.max_new_tokens=4", "is algorithm.max_new_tokens (and engine.max_tokens for"),
    ("train engine.max_model_len=4", "is engine.max_sequence_length here"),
    ("train tp=2", "tp (vLLM) is engine.tensor_parallel_size here"),
    ("train num_generations=4", "num_generations (TRL) is algorithm.group_size here"),
    ("train algorithm.group_size", "give it a value: algorithm.group_size=VALUE"),
    ("train --config-name demo ~foo", "'foo' does not exist; see rollout train --help"),
    # ---- train: values
    ("train --config-name demo trainer.num_steps=ten", "trainer.num_steps='ten' must be an int"),
    ("train --config-name demo trainer.num_steps=1,2", "give one, or --multirun to run each"),
    ("train --config-name demo trainer.learning_rate=-1", "trainer.learning_rate=-1 must be a fin"),
    ("train --config-name demo algorithm.group_size=1", "set algorithm.group_size to 2 or more"),
    (
        "train --config-name demo algorithm.loss=dapo",
        "must be several settings, such as algorithm.",
    ),
    ("train --config-name demo resume=yes", "resume='yes' must be one of auto, never"),
    ("train --config-name demo 'run_name=${x}'", "run_name cannot be read: Interpolation key 'x'"),
    (
        f"{TRAIN} data.path=a=b.jsonl",
        "data.path=a=b.jsonl needs quotes",
        "'data.path=\"a=b.jsonl\"'",
    ),
    (
        f"{TRAIN} data.path=a,b.jsonl",
        "is several values",
        "'data.path=\"a,b.jsonl\"'",
        "[a,b.jsonl]",
    ),
    (f"{TRAIN} 'data.path=a(1).jsonl'", "needs quotes", "'data.path=\"a(1).jsonl\"'"),
    (f"{TRAIN} data.system_prompt=Be kind", "'kind' is not KEY=VALUE", '="Be kind"'),
    (f"{TRAIN} 'data.system_prompt=a {{b}}'", "needs quotes", "'data.system_prompt=\"a {b}\"'"),
    ("train data=jsonl reward=mine:score", "model.path is missing; give model.path=DIR", "smollm2"),
    ("train data=jsonl data.path=x model.path=model", "no reward is given; name a function"),
    (
        "train data=jsonl reward=mine:score model.path=model",
        "data.path is None; set data.path=FILE",
    ),
]


def the_doctor(*words: str) -> Callable[[Path], object]:
    return lambda model: doctor(words)


# A call with the model's directory, and parts of its one line.
CALLS: list[tuple[Any, ...]] = [
    (the_doctor(), "error: the following arguments are required: path; see python -m trainer_ho"),
    (the_doctor("nowhere"), "nowhere does not exist; give a run's directory"),
    (the_doctor("empty"), "empty has no batches/step_*.pt; run the job with logger.save_batches="),
    (lambda model: LLM("nowhere"), "nowhere is not a directory; models are not downloaded here"),
    (lambda model: LLM("org/name"), "run `hf download org/name --local-dir name`, then give name"),
    (lambda model: LLM("empty"), "empty has no config.json"),
    (lambda model: LLM("bare"), "bare has neither model.safetensors nor model.safetensors.index"),
    (lambda model: LLM("gpt2"), "model_type 'gpt2' is not supported; supported: "),
    (lambda model: LLM(model, max_model_len=5), "max_model_len is max_sequence_length here"),
    (lambda model: LLM(model, tp_size=2), "tp_size is tensor_parallel_size here"),
    (lambda model: LLM(model, max_new_tokens=2), "num_tokens_to_generate, of SamplingParams"),
    (lambda model: LLM(model, tensor_paralel_size=2), "did you mean tensor_parallel_size?"),
    (lambda model: LLM(model, data_parallel_size=2), "needs use_coordinator=True"),
    (lambda model: LLM(model, dtype="fp16"), "dtype='fp16' must be one of"),
    (lambda model: LLM(model, **SMALL).generate("Hi"), "the engine has no tokenizer; pass one, or"),
    (lambda model: LLM(model, **SMALL).generate([1], {"temperature": 0}), "SamplingParams(tempera"),
    (lambda model: LLM(model, **SMALL).generate([1], n=0), "n=0 must be an integer of at least 1"),
    (lambda model: LLM(model, **SMALL).generate([99999]), "token id 99999 is outside the model's"),
    (lambda model: SamplingParams(max_tokens=4), "max_tokens is num_tokens_to_generate here"),  # type: ignore[call-arg]
    (
        lambda model: SamplingParams(temprature=1),
        "temprature=1 is unknown; did you mean temperature",
    ),  # type: ignore[call-arg]
    (lambda model: SamplingParams(top_p=2), "top_p=2 must be a number in [0, 1]"),
    (lambda model: SamplingParams(top_k=-1), "top_k=-1 must be an integer in [0,"),
    (lambda model: SamplingParams(num_tokens_to_generate=0), "must be an integer of at least 1"),
    (lambda model: InferenceConfig(kv_cache_dtype="fp8"), "kv_cache_dtype is dtype (of weights"),  # type: ignore[call-arg]
    (lambda model: ServeConfig(port=-1), "port=-1 must be an integer in [0, 65535]"),
    (lambda model: ModelSettings(path="model", hidden_size=8), "choose one of them"),
    (lambda model: DataSettings(kind="jsonl"), "data.path is None; set data.path=FILE"),
    (lambda model: PolicyLossConfig(kind="gropo"), "kind='gropo' must be one of ['grpo', 'ppo',"),
    (lambda model: UpdateSettings(num_minibatchs=2), "did you mean num_minibatches?"),  # type: ignore[call-arg]
    (lambda model: compose_settings(["algorithm.grup_size=2"], "demo"), "algorithm.group_size?"),
    (lambda model: compose_settings(["algorithm=grop"], "demo"), "did you mean algorithm=grpo?"),
    (lambda model: compose_settings([], "dem"), "dem is unknown; did you mean demo?"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, and files that are no models."""
    folder = tmp_path_factory.mktemp("mistakes")
    spec = ModelSpec.from_hf_config(
        {
            **{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "head_dim": 16},
            **{"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 1, "max_position_embeddings": 64},
        }
    )
    save_hf_directory(build_model(spec), folder / "model")
    for name in ("empty", "bare", "gpt2"):
        (folder / name).mkdir()
    (folder / "bare" / "config.json").write_text((folder / "model" / "config.json").read_text())
    (folder / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "train.jsonl").write_text('{"prompt": [1, 2]}\n')
    (folder / "mixed.jsonl").write_text('{"prompt": [1]}\nHello\n')
    (folder / "text.txt").write_text("Once upon a time\n")
    (folder / "mine.py").write_text("def score(**columns):\n    return [0.0]\n")
    return folder


@pytest.fixture
def ports() -> Iterator[dict[str, str]]:
    """Yield a port in use by its name in the table, and a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        yield {"BUSY": str(busy.getsockname()[1]), "FREE": str(bound.getsockname()[1])}


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (path,) = re.findall(r'^train = "(.+:run)"$', project, re.MULTILINE)
    entry = EntryPoint("train", path, command_line.ENTRY_POINTS)
    monkeypatch.setattr(command_line, "entry_points", lambda group: [entry])
    GlobalHydra.instance().clear()


def with_ports(text: str, ports: dict[str, str]) -> str:
    for name, port in ports.items():
        text = text.replace(name, port)
    return text


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row[0])
def test_main_answers_a_mistake_with_one_line(
    row: tuple[str, ...], ports: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words, *parts = (with_ports(text, ports) for text in row)
    capsys.readouterr()
    assert command_line.main(shlex.split(words)) in (1, 2)
    said = capsys.readouterr()
    assert said.err.startswith("rollout: error: ")
    assert said.err.count("\n") == 1, said.err
    assert said.out == ""
    for part in parts:
        assert part in said.err


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[1][:40])
def test_llm_params_and_settings_answer_a_mistake_with_one_line(
    row: tuple[Any, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call, *parts = row
    try:
        with suppress(SystemExit):
            call(folder / "model")
        said = capsys.readouterr().err.rstrip("\n")
    except (RolloutError, TypeError) as error:
        said = str(error)
    assert said
    assert "\n" not in said
    for part in parts:
        assert part in said


WITHOUT_TORCH = """
import sys
from rollout.cli.main import main
from rollout.errors import ConfigError
from trainer_hooks.train.command import run
for command in ("serve", "generate", "bench", "explain", "engine", "coordinator", "top"):
    assert main([command, "model", "modle=3"]) == 2, command
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
for word in ("sed=1", "algorithm=grop", "--config-name=nope", "a b"):
    try:
        run([word])
    except ConfigError as error:
        print(error)
assert "torch" not in sys.modules
print("no torch")
"""


def test_main_answers_typos_without_importing_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ended.stdout.endswith("no torch\n")
    assert ended.stderr.count("rollout: error: modle=3 is unknown; did you mean model?") >= 5
