"""Updates of the vllm protocol: over a gloo group from another process, and from directories."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout import DynamicInferenceEngine, ServeConfig
from rollout.errors import WeightUpdateError
from rollout.serve.control.announcement import tensor_metadata
from tests.apis.fleets import weights
from tests.serve.served import CONFIG, Answer, Served, served_directory
from tests.serve.trainer import Trainer, announced, packed

pytestmark = pytest.mark.distributed
GROUP = "weight_transfer"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def served(roots: Path) -> Iterator[Served]:
    config = ServeConfig(
        port=0,
        checkpoint_roots=(str(roots),),
        weight_transfer_backend="gloo",
        weight_transfer_timeout_s=20.0,
    )
    server = served_directory(config)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def trainer(served: Served) -> Iterator[Trainer]:
    """One that has made a group with the server, which lasts through faults of rounds."""
    trainer = Trainer()
    try:
        assert joined(served, trainer).status == 200
        yield trainer
    finally:
        trainer.close()


def joined(served: Served, trainer: Trainer, **init_info: Any) -> Answer:
    trainer.begin_join(GROUP)
    info = {
        "master_address": "127.0.0.1",
        "master_port": trainer.port,
        "rank_offset": 1,
        "world_size": 2,
    }
    answer = served.post("/init_weight_transfer_engine", {"init_info": info | init_info})
    assert trainer.end() == ""
    return answer


def tensors_of(version: int) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in weights(version).named_parameters()}


@cache
def checksums_of(version: int) -> Mapping[str, str]:
    engine = DynamicInferenceEngine.from_model(weights(version), CONFIG)
    return engine.weight_checksums().checksums


def served_version(served: Served) -> int:
    return served.do(served.llm.stats()).weights_version


def send(served: Served, trainer: Trainer, tensors: dict[str, Tensor], **info: Any) -> Answer:
    """One /update_weights, with its broadcasts."""
    trainer.begin_broadcast([*tensors.values()])
    answer = served.post("/update_weights", {"update_info": announced(tensors) | info})
    assert trainer.end() == ""
    return answer


def update(served: Served, trainer: Trainer, version: int) -> Answer:
    """A whole round, in two calls."""
    tensors = list(tensors_of(version).items())
    assert served.post("/start_weight_update").status == 200
    for part in (tensors[:7], tensors[7:]):
        assert send(served, trainer, dict(part)).status == 200
    return served.call("POST", "/finish_weight_update")


def assert_refused(answer: Answer, *, because: str) -> None:
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert because in error["message"]


def assert_next_round_works(served: Served, trainer: Trainer, version: int) -> None:
    before = served_version(served)
    assert update(served, trainer, version).status == 200
    assert served_version(served) == before + 1
    answer = served.post("/weight_checker", {"action": "checksum"})
    assert answer.json()["checksums"] == checksums_of(version)


def test_a_round_of_many_calls_is_one_update(served: Served, trainer: Trainer) -> None:
    before, updates = served_version(served), served.do(served.llm.stats()).num_weight_updates
    assert update(served, trainer, 1).status == 200
    stats = served.do(served.llm.stats())
    assert stats.weights_version == before + 1
    assert stats.num_weight_updates == updates + 1
    assert_next_round_works(served, trainer, 2)


def test_empty_lists_announce_the_tensors_of_the_call_before(
    served: Served, trainer: Trainer
) -> None:
    tensors = tensors_of(2)
    served.post("/start_weight_update")
    assert send(served, trainer, tensors).status == 200
    assert served.post("/finish_weight_update").status == 200
    served.post("/start_weight_update")
    trainer.begin_broadcast([*tensors_of(3).values()])
    assert served.post("/update_weights", {"update_info": {}}).status == 200
    assert trainer.end() == ""
    assert served.post("/finish_weight_update").status == 200
    answer = served.post("/weight_checker", {"action": "checksum"})
    assert answer.json()["checksums"] == checksums_of(3)


def test_update_info_may_be_a_list_with_one_entry_for_the_one_rank(
    served: Served, trainer: Trainer
) -> None:
    tensors = tensors_of(1)
    assert served.post("/start_weight_update").status == 200
    for count in (0, 2):
        infos = [announced(tensors)] * count
        answer = served.post("/update_weights", {"update_info": infos})
        assert_refused(answer, because=f"update_info has {count} entries and needs 1")
    trainer.begin_broadcast([*tensors.values()])
    answer = served.post("/update_weights", {"update_info": [announced(tensors)]})
    assert trainer.end() == ""
    assert answer.status == 200
    assert served.post("/finish_weight_update").status == 200


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "a name": ({"model.other.weight": torch.ones(3)}, "no tensor 'model.other.weight'"),
    "a shape": ({"model.norm.weight": torch.ones(47)}, "has shape [47]"),
    "values": ({"model.norm.weight": torch.full((48,), torch.nan)}, "NaN"),
    "a dtype": ({"model.norm.weight": torch.ones(48, dtype=torch.int64)}, "int64"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_tensor_ends_the_round_and_the_next_one_works(
    served: Served, trainer: Trainer, fault: str
) -> None:
    bad, because = BAD[fault]
    before = served_version(served)
    served.post("/start_weight_update")
    good = tensors_of(1)
    del good["model.norm.weight"]
    assert send(served, trainer, good).status == 200
    answer = send(served, trainer, bad)
    if answer.status == 200:  # only the engines can detect it
        answer = served.post("/finish_weight_update")
    assert_refused(answer, because=because)
    assert_refused(served.post("/finish_weight_update"), because="no update is open")
    assert served_version(served) == before
    assert_next_round_works(served, trainer, 2)


def test_update_calls_out_of_order_are_refused(served: Served, trainer: Trainer) -> None:
    assert_refused(served.post("/finish_weight_update"), because="no update is open")
    one = {"model.norm.weight": torch.ones(48)}
    assert_refused(send(served, trainer, one), because="no update is open")
    served.post("/start_weight_update")
    assert_refused(served.post("/start_weight_update"), because="open already")
    assert_refused(served.post("/finish_weight_update"), because="no update is open")
    served.post("/start_weight_update")
    assert_refused(served.post("/finish_weight_update"), because="of 0 announced")
    served.post("/start_weight_update")
    assert send(served, trainer, one).status == 200
    assert_refused(send(served, trainer, one), because="comes twice")
    served.post("/start_weight_update")
    assert send(served, trainer, one).status == 200
    assert_refused(served.post("/finish_weight_update"), because="lacks 24 of the model's tensors")
    assert_next_round_works(served, trainer, 1)


def test_packed_tensors_are_received_in_one_broadcast(
    served: Served,
) -> None:
    trainer = Trainer()
    try:
        assert joined(served, trainer, packed=True, packed_buffer_size_bytes=4000).status == 200
        served.post("/start_weight_update", {"is_checkpoint_format": True})
        tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(1).items()}
        chunks: list[list[Tensor]] = [[]]
        for tensor in tensors.values():
            if sum(other.nbytes for other in chunks[-1]) > 4000:
                chunks.append([])
            chunks[-1].append(tensor)
        assert len(chunks) > 3
        trainer.begin_broadcast([packed(chunk) for chunk in chunks])
        answer = served.post("/update_weights", {"update_info": announced(tensors)})
        assert trainer.end() == ""
        assert answer.status == 200
        assert served.post("/finish_weight_update", {"weight_version": "bf16"}).status == 200
        assert served.get("/weight_info").json() == {"weight_version": "bf16"}
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("info", "because"),
    [
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": []}, "one of each"),
        ({"names": ["a"], "dtype_names": ["float7"], "shapes": [[1]]}, "float7"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}, "shape [-1]"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[2**40, 2**40]]}, "shape"),
    ],
)
def test_update_weights_refuses_malformed_announcements(info: dict[str, Any], because: str) -> None:
    with pytest.raises(WeightUpdateError, match=re.escape(because)):
        tensor_metadata(info["names"], info["dtype_names"], info["shapes"])


def test_a_malformed_announcement_leaves_the_group(served: Served) -> None:
    trainer, one = Trainer(), announced({"model.norm.weight": torch.ones(48)})
    try:
        assert joined(served, trainer).status == 200
        served.post("/start_weight_update")
        trainer.begin_broadcast([torch.ones(1000, 1000)])
        answer = served.post("/update_weights", {"update_info": one | {"dtype_names": ["float7"]}})
        assert_refused(answer, because="float7")
        assert trainer.end() != "", "the trainer fails, too"
        answer = served.post("/update_weights", {"update_info": one})
        assert_refused(answer, because="join it first")
    finally:
        trainer.close()


def test_a_dead_trainer_ends_the_round_and_another_may_join(served: Served) -> None:
    before, trainer = served_version(served), Trainer()
    try:
        assert joined(served, trainer).status == 200
        served.post("/start_weight_update")
        tensors = tensors_of(1)
        trainer.begin_broadcast([*list(tensors.values())[:3], None])
        answer = served.post("/update_weights", {"update_info": announced(tensors)})
        assert_refused(answer, because="another group")
        assert_refused(served.post("/finish_weight_update"), because="no update is open")
    finally:
        trainer.close()
    assert served_version(served) == before
    another = Trainer()
    try:
        assert joined(served, another).status == 200
        assert_next_round_works(served, another, 2)
    finally:
        another.close()


def test_broadcasts_of_another_size_than_announced_leave_the_server_alive(
    served: Served,
) -> None:
    trainer = Trainer()
    try:
        assert joined(served, trainer).status == 200
        served.post("/start_weight_update")
        trainer.begin_broadcast([torch.ones(4096)])
        one = announced({"model.norm.weight": torch.ones(48)})
        answer = served.post("/update_weights", {"update_info": one})
        assert_refused(answer, because="another group")
        assert served.get("/health").status == 200
        assert_refused(served.post("/finish_weight_update"), because="no update is open")
    finally:
        trainer.close()


def test_weight_transfer_timeout_s_ends_a_silent_trainer(served: Served) -> None:
    config = ServeConfig(port=0, weight_transfer_backend="gloo", weight_transfer_timeout_s=5.0)
    impatient, trainer = served_directory(config), Trainer()
    try:
        assert joined(impatient, trainer).status == 200
        impatient.post("/start_weight_update")
        one = announced({"model.norm.weight": torch.ones(48)})
        answer = impatient.post("/update_weights", {"update_info": one})
        assert_refused(answer, because="did not arrive")
    finally:
        impatient.close()
        trainer.close()


def test_shutdown_answers_a_call_that_waits_for_a_broadcast() -> None:
    server = served_directory(ServeConfig(port=0, weight_transfer_backend="gloo"))
    trainer, answers = Trainer(), []
    names = ("model.norm.weight", "model.embed_tokens.weight")
    tensors = {name: tensors_of(1)[name] for name in names}
    try:
        assert joined(server, trainer).status == 200
        server.post("/start_weight_update")
        body = {"update_info": announced(tensors)}
        waiting = threading.Thread(
            target=lambda: answers.append(server.post("/update_weights", body))
        )
        waiting.start()
        trainer.begin_broadcast([tensors[names[0]]])
        assert trainer.end() == "", "the server has taken the first one, and waits for the second"
        server.do(server.llm.stop_serving(drain_timeout_s=0.0))
        waiting.join()
        (answer,) = answers
        assert_refused(answer, because="did not arrive")
    finally:
        server.close()
        trainer.close()


def test_other_backends_are_refused_at_once(served: Served) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "backend": "nccl"}
    answer = served.post("/init_weight_transfer_engine", {"init_info": info})
    assert (answer.status, answer.json()["error"]["type"]) == (400, "BadRequestError")


HERE = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2, "rank_offset": 1}
NONSENSE = [
    *(
        ({"master_port": port}, "master_port")
        for port in (0, -1, 65536, 10**18, "8 0", "", "x", "²")
    ),
    ({"master_port": "1" * 5000}, "master_port"),
    *(
        ({"master_address": name}, "master_address")
        for name in ("", "no.such.invalid", "256.1.1.1", "a\0b", "x" * 300, "a..b", "-", " ")
    ),
    ({"world_size": 0}, "world_size=0"),
    ({"world_size": 1}, "world_size=1"),
    ({"world_size": 2**40}, "world_size"),
    ({"rank_offset": 0}, "rank_offset=0"),
    ({"rank_offset": 2}, "rank_offset=2"),
    ({"rank_offset": -1}, "rank_offset=-1"),
]


@pytest.mark.parametrize(("nonsense", "because"), NONSENSE)
def test_init_weight_transfer_engine_refuses_impossible_groups(
    served: Served, monkeypatch: pytest.MonkeyPatch, nonsense: dict[str, Any], because: str
) -> None:
    def joined(**_: Any) -> None:
        raise AssertionError("a process would wait for the trainer until the time limit")

    monkeypatch.setattr("rollout.serve.control.weight_transfer.join_group", joined)
    info = HERE | nonsense
    vllm = {"init_info": info | {"backend": "gloo"}}
    sglang = info | {"group_name": "g", "backend": "gloo"}
    for path, body in (
        ("/init_weight_transfer_engine", vllm),
        ("/init_weights_update_group", sglang),
    ):
        answer = served.post(path, body)
        assert answer.status == 400, (path, answer.body)
        assert because in answer.body.decode(), path


def test_packed_buffer_size_bytes_of_0_is_refused(served: Served) -> None:
    info = HERE | {"backend": "gloo", "packed": True, "packed_buffer_size_bytes": 0}
    answer = served.post("/init_weight_transfer_engine", {"init_info": info})
    assert_refused(answer, because="packed_buffer_size_bytes=0")


# ---- directories


def saved(directory: Path, version: int, num_shards: int = 1) -> Path:
    """A checkpoint as prime-rl writes it: weights, and a file that says they are complete."""
    directory.mkdir(parents=True)
    if num_shards == 1:
        save_file(tensors_of(version), directory / "model.safetensors")
    else:
        weights(version).save_pretrained(directory, max_shard_size="20KB")
        assert (directory / "model.safetensors.index.json").is_file()
    (directory / "STABLE").touch()
    return directory


@pytest.mark.parametrize("num_shards", [1, 2])
def test_weight_dir_is_one_update(served: Served, roots: Path, num_shards: int) -> None:
    directory = saved(roots / f"step_{num_shards}", 3 + num_shards, num_shards)
    before = served_version(served)
    assert served.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    answer = served.post("/update_weights", {"weight_dir": str(directory)})
    assert (answer.status, answer.json()) == (200, {"status": "ok"})
    assert served.post("/resume").json() == {"status": "resumed"}
    assert served_version(served) == before + 1
    answer = served.post("/weight_checker", {"action": "checksum"})
    assert answer.json()["checksums"] == checksums_of(3 + num_shards)


def test_only_checkpoints_below_the_roots_are_read(
    served: Served, roots: Path, tmp_path: Path
) -> None:
    outside = saved(tmp_path / "outside", 1)
    (roots / "link").symlink_to(outside)
    (roots / "linked_shard").mkdir()
    (roots / "linked_shard" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (roots / "empty").mkdir()
    (roots / "torn").mkdir()
    whole = (outside / "model.safetensors").read_bytes()
    (roots / "torn" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    before = served_version(served)
    for path, because in (
        (outside, "checkpoint_roots"),
        (roots / "link", "checkpoint_roots"),
        (roots / "linked_shard", "checkpoint_roots"),
        (f"{roots}/../{roots.name}/../..", "checkpoint_roots"),
        ("step_1", "checkpoint_roots"),
        (roots / "empty", "has neither"),
        (roots / "torn", "cannot be read"),
    ):
        answer = served.post("/update_weights", {"weight_dir": str(path)})
        assert_refused(answer, because=because)
    assert_refused(served.post("/update_weights", {"weight_dir": None}), because="neither")
    assert served_version(served) == before
    shutil.rmtree(roots / "torn")
