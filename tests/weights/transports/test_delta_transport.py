"""DeltaTransport: only changes travel, and engines that apply them have the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout import LoraAdapter
from rollout.errors import ConfigError, WeightUpdateError
from rollout.models.checkpoints.reader import Checkpoint
from rollout.weights.source import WeightsSource
from rollout.weights.transports.delta import DeltaTransport
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.update import by_name
from tests.tiny_models import IS_LONG

Tensors = dict[str, Tensor]


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DeltaTransport]:
    transport = DeltaTransport(DirectoryTransport(tmp_path))
    yield transport
    transport.close()
    assert not list(tmp_path.iterdir())


def weights() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 5, generator=generator),
        "b": torch.randn(100, generator=generator).bfloat16(),
        "c": torch.arange(6),
    }


def pushed(transport: DeltaTransport, tensors: Tensors) -> WeightsSource:
    source = transport.publish({name: tensor.clone() for name, tensor in tensors.items()})
    transport.send(source)
    transport.commit()
    return source


def check(fetched: object, expected: Tensors) -> None:
    came = by_name(fetched)  # type: ignore[arg-type]
    assert came.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (came[name].dtype, came[name].shape) == (tensor.dtype, tensor.shape)
        bits = [each.reshape(-1).view(torch.uint8) for each in (came[name], tensor)]
        assert torch.equal(*bits)


def link_of(source: WeightsSource) -> Tensors:
    return {name: values + 0 for name, values in Checkpoint.open(Path(source.address)).items()}


def test_delta_publish_sends_only_changed_elements(transport: DeltaTransport) -> None:
    fetcher, tensors = WeightFetcher(), weights()
    check(fetcher(pushed(transport, tensors)), tensors)
    tensors["a"][3, 2] = 7.0
    tensors["a"][39, 4] += 1
    tensors["b"][5:90] = 0.5
    source = pushed(transport, tensors)
    link = link_of(source)
    assert link.keys() == {"a#index", "a#value", "b", "#delta"}, "most of 'b' has changed: whole"
    assert link["a#index"].tolist() == [17, 199]
    assert link["a#index"].dtype == torch.int32
    assert link["a#value"].tolist() == tensors["a"].reshape(-1)[[17, 199]].tolist()
    check(fetcher(source), tensors)
    nothing = pushed(transport, tensors)
    assert link_of(nothing).keys() == {"#delta"}
    check(fetcher(nothing), tensors)


MADE = st.sampled_from(["change", "all", "resize", "cast", "remove", "add", "negate"])


@settings(
    max_examples=60 if IS_LONG else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    pushes=st.lists(
        st.tuples(st.lists(st.tuples(MADE, st.integers(0, 9)), max_size=4), st.booleans()),
        max_size=6,
    ),
    whole_every=st.integers(1, 4),
)
def test_delta_fetch_follows_any_pushes_at_engines_that_missed_some(
    pushes: list[tuple[list[tuple[str, int]], bool]], whole_every: int, tmp_path: Path
) -> None:
    transport = DeltaTransport(DirectoryTransport(tmp_path), whole_every=whole_every)
    always, now_and_then, tensors = WeightFetcher(), WeightFetcher(), weights()
    for changes, is_refused in pushes:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for kind, number in changes:
            change(tensors, kind, number)
        if is_refused:
            check(always(transport.publish(tensors)), tensors)
            transport.roll_back()
            tensors = before
            continue
        source = pushed(transport, tensors)
        check(always(source), tensors)
        if len(tensors) % 2:
            check(now_and_then(source), tensors)
        check(WeightFetcher()(source), tensors)
    transport.close()
    assert not list(tmp_path.iterdir())


def change(tensors: Tensors, kind: str, number: int) -> None:
    name = sorted(tensors)[number % len(tensors)] if tensors else "new"
    tensor = tensors.setdefault(name, torch.ones(3)).reshape(-1)
    if kind == "change":
        tensor[number % len(tensor)] = number
    elif kind == "all":
        tensors[name] = tensors[name] + 1
    elif kind == "resize":
        tensors[name] = torch.full((2, number + 1), float(number))
    elif kind == "cast":
        tensors[name] = tensors[name].double()
    elif kind == "remove":
        del tensors[name]
    elif kind == "add":
        tensors[f"new{number}"] = torch.full((number + 1,), 2.0)
    else:  # the bits change where the value does not
        tensor[0] = 0 if tensor.dtype is torch.int64 else -0.0


def test_delta_publish_names_a_tensor_that_is_not_finite(
    transport: DeltaTransport,
) -> None:
    fetcher, tensors = WeightFetcher(), weights()
    pushed(transport, tensors)
    tensors["a"][3, 2] = torch.nan
    with pytest.raises(WeightUpdateError, match="'a' holds NaN"):
        transport.publish(tensors)
    tensors["a"][3, 2] = 1.0
    check(fetcher(pushed(transport, tensors)), tensors)


def test_delta_publish_sends_an_unchanged_nan_once(tmp_path: Path) -> None:
    carrier = DirectoryTransport(tmp_path, reject_non_finite=False)
    transport = DeltaTransport(carrier, reject_non_finite=False)
    pushed(transport, {"a": torch.full((5,), torch.nan)})
    source = pushed(transport, {"a": torch.full((5,), torch.nan)})
    assert link_of(source).keys() == {"#delta"}
    transport.close()


def test_delta_publish_is_whole_after_a_refusal_and_every_nth_time(tmp_path: Path) -> None:
    transport = DeltaTransport(DirectoryTransport(tmp_path), whole_every=3)
    tensors, builds_on = weights(), []
    for number in range(9):
        tensors["a"][0, 0] = number
        source = transport.publish(tensors)
        builds_on.append(source.builds_on != "")
        assert len(list(tmp_path.iterdir())) == [1, 2, 3, 4, 2, 2, 2, 3, 4][number]
        if number == 4:
            transport.roll_back()
        else:
            transport.commit()
    assert builds_on == [False, True, True, False, True, False, True, True, False]
    transport.close()


def test_delta_chain_continues_after_an_adapter(transport: DeltaTransport) -> None:
    fetcher, tensors = WeightFetcher(), weights()
    fetcher(pushed(transport, tensors))
    adapter = LoraAdapter(
        tensors={"a.lora_A.weight": torch.ones(1, 5), "a.lora_B.weight": torch.ones(40, 1)},
        rank=1,
        alpha=1,
    )
    assert transport.publish(adapter).builds_on is None
    transport.commit()
    tensors["a"][1, 1] = 5.0
    source = pushed(transport, tensors)
    assert source.builds_on
    check(fetcher(source), tensors)
    check(WeightFetcher()(source), tensors)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("a#value", torch.tensor([3.0]), r"the changed weights have the checksum"),
        ("a#index", torch.tensor([18], dtype=torch.int32), r"the changed weights have"),
        ("a#index", torch.tensor([200], dtype=torch.int32), r"does not fit .* \(IndexError"),
        ("z#index", torch.tensor([0], dtype=torch.int32), r"does not fit .* \(KeyError"),
        ("#delta", torch.tensor([1], dtype=torch.uint8), r"is not a link of a chain"),
    ],
)
def test_delta_fetch_refuses_a_link_that_does_not_fit_until_a_whole_push(
    transport: DeltaTransport, name: str, values: Tensor, message: str
) -> None:
    fetcher, tensors = WeightFetcher(), weights()
    fetcher(pushed(transport, tensors))
    tensors["a"][3, 2] = 7.0
    source = transport.publish(tensors)
    (file,) = Path(source.address).glob("*.safetensors")
    link = load_file(file) | {name: values}
    save_file(link, file)
    index = Path(source.address, "model.safetensors.index.json")
    index.write_text(index.read_text().replace('"#delta"', f'"{name}": "{file.name}", "#delta"'))
    with pytest.raises(WeightUpdateError, match=message):
        fetcher(source)
    transport.roll_back()
    check(fetcher(pushed(transport, tensors)), tensors)


def test_delta_fetch_names_the_checksum_of_missing_links(
    transport: DeltaTransport, tmp_path: Path
) -> None:
    tensors = weights()
    first = pushed(transport, tensors)
    tensors["a"][3, 2] = 7.0
    source = pushed(transport, tensors)
    Path(first.address).rename(tmp_path / "elsewhere")
    with pytest.raises(WeightUpdateError, match="cannot be read"):
        WeightFetcher()(source)
    (tmp_path / "elsewhere").rename(first.address)
    check(WeightFetcher()(source), tensors)


def test_delta_fetch_refuses_a_chain_without_links(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole_every=0"):
        DeltaTransport(DirectoryTransport(tmp_path), whole_every=0)
