"""tree_logprobs: what plain passes give, for every model that tree_fault lets through."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import randomize, tiny_model
from trainer_hooks.losses.logprobs import token_entropies, token_logprobs
from trainer_hooks.update.tree_pass import max_depth, pair_cost, tree_fault, tree_logprobs

CPU = torch.device("cpu")
FAMILIES = ("qwen3", "gemma2", "granite", "cohere2", "qwen3_moe", "gpt_oss", "opt", "gpt2")


def rows_with_prefixes() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [5, 9] and the trained ones: two prompts, equal beginnings of completions, a gap
    between two turns, a row that is cut short, a row without trained tokens."""
    tokens_BT = torch.tensor(
        [
            [5, 6, 7, 8, 9, 10, 11, 12, 13],
            [5, 6, 7, 8, 9, 20, 21, 22, 23],
            [5, 6, 7, 8, 9, 10, 30, 0, 0],
            [40, 41, 7, 8, 9, 10, 11, 12, 13],
            [5, 6, 7, 8, 9, 10, 11, 12, 50],
        ]
    )
    mask_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
    mask_BT[:4, 4:] = True
    mask_BT[1, 6] = False
    mask_BT[2, 7:] = False
    return tokens_BT, mask_BT


def both_ways(policy: Any, temperature: float = 1.0) -> list[tuple[torch.Tensor, ...]]:
    """Log-probs, entropies of trained tokens, and all gradients: by the tree, and plain."""
    tokens_BT, mask_BT = rows_with_prefixes()
    weights_BT = torch.linspace(-1, 2, mask_BT.numel()).view(mask_BT.shape)
    results = []
    for is_tree in (True, False):
        policy.zero_grad()
        if is_tree:
            logprobs_BT, entropies_BT = tree_logprobs(policy, tokens_BT, mask_BT, temperature)
        else:
            logits_BTV = policy(input_ids=tokens_BT).logits
            logprobs_BT = token_logprobs(logits_BTV, tokens_BT, temperature)
            entropies_BT = token_entropies(logits_BTV, temperature)
        (logprobs_BT * weights_BT)[mask_BT].sum().backward()
        grads = (each.grad for each in policy.parameters() if each.grad is not None)
        results.append(
            (
                logprobs_BT[mask_BT].detach(),
                entropies_BT[mask_BT].detach(),
                *map(torch.clone, grads),
            )
        )
    return results


def assert_same_values(by_tree: tuple[torch.Tensor, ...], plain: tuple[torch.Tensor, ...]) -> None:
    """Within 1e-4 of the greatest value or gradient, which float32 sums in another order keep.

    A gradient may be 0 but for rounding, such as that of the bias of a key.
    """
    assert len(by_tree) == len(plain)
    greatest = max(float(gradient.abs().max()) for gradient in plain[2:])
    for own, other, scale in zip(by_tree, plain, (1.0, 1.0, *[greatest] * 99), strict=False):
        assert (own - other).abs().max() <= 1e-4 * scale


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", [None, "eager"])
def test_tree_logprobs_and_gradients_equal_those_of_plain_passes(
    family: str, attention: str | None
) -> None:
    policy = tiny_model(family, std=0.2, attention=attention)
    assert tree_fault(policy, CPU) is None
    assert_same_values(*both_ways(policy, temperature=0.8))


def test_tree_logprobs_train_an_adapter_as_plain_passes_do() -> None:
    base = tiny_model("llama", std=0.2)
    policy: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    randomize(policy, seed=1, std=0.1)
    assert tree_fault(policy, CPU) is None
    assert_same_values(*both_ways(policy))


@pytest.mark.parametrize(
    "options", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}]
)
def test_tree_logprobs_train_an_adapter_of_the_head(options: dict[str, list[str]]) -> None:
    base = tiny_model("llama", std=0.2)
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
    policy: Any = peft.get_peft_model(base, config)
    assert tree_fault(policy, CPU) is None  # a new adapter changes nothing yet
    randomize(policy, seed=1, std=0.1)
    assert_same_values(*both_ways(policy))


def test_tree_logprobs_train_under_autocast() -> None:
    policy = tiny_model("llama", std=0.2)
    tokens_BT, mask_BT = rows_with_prefixes()
    exact_BT, _ = tree_logprobs(policy, tokens_BT, mask_BT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs_BT, entropies_BT = tree_logprobs(policy, tokens_BT, mask_BT)
    (logprobs_BT.sum() + entropies_BT.sum()).backward()
    assert (logprobs_BT - exact_BT).abs().max() < 0.2
    assert all(weight.grad is not None for weight in policy.parameters())


def test_tree_logprobs_are_zero_where_nothing_is_trained() -> None:
    tokens_BT, mask_BT = rows_with_prefixes()
    for values_BT in tree_logprobs(tiny_model(), tokens_BT, mask_BT):
        assert values_BT[~mask_BT].eq(0).all()


@pytest.mark.parametrize(
    ("family", "reason"), [("mpt", "beside two different ones"), ("bloom", "raises ValueError")]
)
def test_tree_fault_names_why_a_model_has_no_tree_pass(family: str, reason: str) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        d_model=32, n_heads=4, n_layers=2,
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(policy, seed=0, std=0.2)
    fault = tree_fault(policy, CPU)
    assert fault is not None
    assert reason in fault


def test_tree_fault_refuses_what_is_no_module_of_transformers() -> None:
    assert tree_fault(lambda input_ids: input_ids, CPU) is not None
    assert tree_fault(torch.nn.Linear(2, 2), CPU) is not None


def test_tree_fault_leaves_dropout_as_it_was() -> None:
    policy = tiny_model().train()
    policy.model.layers[0].eval()
    before = [part.training for part in policy.modules()]
    tree_fault(policy, CPU)
    assert [part.training for part in policy.modules()] == before


def test_max_depth_is_the_smallest_window_of_a_model() -> None:
    assert max_depth(tiny_model("qwen3")) is None
    assert max_depth(tiny_model("gemma2", sliding_window=16)) == 16


def test_pair_cost_is_multiplications_of_a_pair_over_those_of_a_token() -> None:
    policy = tiny_model("llama")
    body = sum(each.numel() for each in policy.model.layers.parameters())
    body += policy.model.norm.weight.numel()
    assert pair_cost(policy) == 2 * 4 * 16 * 2 / body
