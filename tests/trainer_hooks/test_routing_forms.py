"""Routing in the forms of other systems, there and back."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import ConfigError
from trainer_hooks.losses import routing_forms as forms

TOP_K, NUM_LAYERS, NUM_EXPERTS = 2, 3, 300


def routing_of(num_tokens: int, seed: int = 0, num_experts: int = NUM_EXPERTS) -> torch.Tensor:
    """Return random rows of distinct ids [num_tokens - 1, layers, K]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens - 1, NUM_LAYERS, num_experts, generator=generator)
    return scores.topk(TOP_K).indices.to(torch.int16)


def batch_of(lengths: list[int]) -> torch.Tensor:
    """Return rows of these lengths, right padded with -1; the last token of each is -1, too."""
    batch = torch.full((len(lengths), max(lengths), NUM_LAYERS, TOP_K), -1, dtype=torch.int16)
    for row, length in enumerate(lengths):
        batch[row, : length - 1] = routing_of(length, seed=row)
    return batch


def test_verl_pads_prompts_on_the_left() -> None:
    lengths, prompts = [5, 9, 2], torch.tensor([3, 4, 1])
    batch = batch_of(lengths)
    verl = forms.to_verl(batch, prompts, max_prompt_length=6, max_response_length=5)
    assert verl.shape == (3, 11, NUM_LAYERS, TOP_K)
    # The first prompt of 3 tokens ends where all prompts end, at position 6.
    assert torch.equal(verl[0, 3:7], batch[0, :4])
    assert torch.equal(verl[1, 2:10], batch[1, :8])
    assert verl[0, 0].tolist() == [[0, 1]] * NUM_LAYERS, "padding has experts that differ"
    mask = torch.zeros(3, 11, dtype=torch.int64)
    for row, (length, prompt) in enumerate(zip(lengths, prompts.tolist(), strict=True)):
        mask[row, 6 - prompt : 6 - prompt + length] = 1
    assert torch.equal(forms.from_verl(verl, mask), batch)


def test_verl_refuses_lengths_that_do_not_fit() -> None:
    batch, prompts = batch_of([5, 9]), torch.tensor([3, 4])
    with pytest.raises(ConfigError, match=r"max_prompt_length=3 with prompts of \[3, 4\]"):
        forms.to_verl(batch, prompts, 3, 9)
    with pytest.raises(ConfigError, match="row 1 has routing of more than max_response_length=3"):
        forms.to_verl(batch, prompts, 4, 3)
    with pytest.raises(ConfigError, match=r"\[2, 9, 3, 2\] and attention_mask of shape \[2, 8\]"):
        forms.from_verl(batch, torch.ones(2, 8))


def test_from_verl_gives_a_row_without_tokens_no_routing() -> None:
    routing = forms.from_verl(batch_of([3, 3]), torch.tensor([[0, 0, 0], [0, 1, 1]]))
    assert routing.shape == (2, 2, NUM_LAYERS, TOP_K)
    assert bool((routing[0] == -1).all())


@pytest.mark.parametrize("num_experts", [8, NUM_EXPERTS])
def test_forms_of_one_sample_there_and_back(num_experts: int) -> None:
    routing = routing_of(7, num_experts=num_experts)
    assert torch.equal(forms.from_slime(forms.to_slime(routing)), routing)
    assert torch.equal(forms.from_prime_rl(forms.to_prime_rl(routing)), routing)
    assert torch.equal(forms.from_nemo_rl(forms.to_nemo_rl(routing)), routing)
    assert torch.equal(forms.from_sglang(forms.to_sglang(routing), NUM_LAYERS, TOP_K), routing)


def test_forms_are_what_the_systems_read() -> None:
    routing = routing_of(7, num_experts=8)
    assert forms.to_slime(routing).dtype == np.int32
    of_prime_rl = forms.to_prime_rl(routing)
    assert of_prime_rl["dtype"] == "uint8"
    assert of_prime_rl["shape"] == [6, NUM_LAYERS, TOP_K]
    assert list(of_prime_rl["data"]) == routing.flatten().tolist()
    assert forms.to_prime_rl(routing_of(100))["dtype"] == "uint16"
    assert forms.to_nemo_rl(routing).dtype == torch.int8
    assert forms.to_nemo_rl(routing_of(100)).dtype == torch.int16
    of_sglang = np.frombuffer(base64.b64decode(forms.to_sglang(routing)), np.int32)
    assert of_sglang.tolist() == routing.flatten().tolist()


def test_unknown_rows_stay_so_or_are_refused() -> None:
    routing = routing_of(7)
    routing[2] = -1
    assert torch.equal(forms.from_nemo_rl(forms.to_nemo_rl(routing)), routing)
    writers: list[Any] = [forms.to_slime, forms.to_prime_rl, forms.to_sglang]
    for write in writers:
        with pytest.raises(ConfigError, match="1 of 6 rows are not known"):
            write(routing)
        write(forms.without_unknown(routing))


def test_zeros_of_another_system_are_unknown_rows() -> None:
    routing = routing_of(4)
    routing[1] = 0
    assert (forms.from_slime(routing.numpy())[1] == -1).all()
    assert torch.equal(forms.from_slime(routing.numpy())[[0, 2]], routing[[0, 2]])


def test_dense_layers_are_put_in_and_left_out() -> None:
    routing = routing_of(4)
    every = forms.all_layers(routing, moe_layers=[1, 2, 4], num_layers=5)
    assert every.shape == (3, 5, TOP_K)
    assert (every[:, [0, 3]] == 0).all()
    assert torch.equal(forms.moe_layers_only(every, [1, 2, 4]), routing)
    with pytest.raises(ConfigError, match="are not the 3 layers"):
        forms.all_layers(routing, [1, 2], 5)
    with pytest.raises(ConfigError, match="not among the 3 layers"):
        forms.moe_layers_only(routing, [3])


def test_bytes_that_are_no_routing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 expert ids of uint8 do not make the shape"):
        forms.from_prime_rl({"data": bytes(5), "shape": [1, 2, 2], "dtype": "uint8"})
    with pytest.raises(ConfigError, match=r"dtype='float32' must be one of"):
        forms.from_prime_rl({"data": bytes(4), "shape": [1], "dtype": "float32"})
    with pytest.raises(ConfigError, match="not base64"):
        forms.from_sglang("no!", 3, 2)
