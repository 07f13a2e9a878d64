"""verl's own loss and advantage functions against those of trainer_hooks: python verl_losses.py.

Losses and gradients, with verl's normalisation over a whole batch, on one side; on the other the
same batch in micro-batches by tokens, padded and packed. verl_client.py runs it as well.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.config import ActorConfig

from trainer_hooks import (
    PolicyLossConfig,
    RolloutBatch,
    UpdateSettings,
    accumulate_gradients,
    gae_advantages,
    group_advantages,
    reinforce_plus_plus_advantages,
    token_rewards,
    update_policy,
    value_loss,
)

NUM_GROUPS, GROUP_SIZE, PROMPT_LENGTH, VOCAB_SIZE = 4, 3, 4, 64
LENGTHS = [1, 2, 3, 3, 5, 8, 13, 29, 4, 6, 2, 9]
TEMPERATURE, KL_COEFFICIENT, ENTROPY_COEFFICIENT = 0.8, 0.1, 0.02
EXACT = {"rtol": 1e-5, "atol": 1e-6}

# Of each kind: verl's loss, its aggregation, and its fields where they differ from ours.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("vanilla", "token-mean", {}),
    "dapo": ("vanilla", "token-mean", {"clip_ratio_high": 0.28}),
    "grpo": ("vanilla", "seq-mean-token-mean", {}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {"loss_scale_factor": 32}),
    "gspo": (
        "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    ),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    "sapo": ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
}  # fmt: skip


def random_batch() -> RolloutBatch:
    """Long-tailed lengths, a tool's output amid a rollout, a rollout that was cut."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor(LENGTHS) + PROMPT_LENGTH
    positions_T = torch.arange(int(lengths_B.max()))
    shape = (len(LENGTHS), len(positions_T))
    attention_mask_BT = positions_T < lengths_B[:, None]
    mask_BT = attention_mask_BT & (positions_T >= PROMPT_LENGTH)
    mask_BT[6, 7:10] = False
    behaviour_BT = (-torch.rand(shape, generator=generator) - 3.7).masked_fill(~mask_BT, 0.0)
    tokens_BT = torch.randint(VOCAB_SIZE, shape, generator=generator)
    return RolloutBatch(
        tokens_BT=tokens_BT.masked_fill(~attention_mask_BT, 0),
        position_ids_BT=positions_T.expand(shape).masked_fill(~attention_mask_BT, 0),
        attention_mask_BT=attention_mask_BT,
        mask_BT=mask_BT,
        behaviour_logprobs_BT=behaviour_BT,
        policy_lag_BT=torch.zeros(shape, dtype=torch.int32),
        kv_lag_BT=torch.zeros(shape),
        kv_staleness_BT=torch.zeros(shape, dtype=torch.int32),
        rewards_R=torch.randn(len(LENGTHS), generator=generator),
        rollout_index_B=torch.arange(len(LENGTHS)),
        prompt_lengths_B=torch.full((len(LENGTHS),), PROMPT_LENGTH),
        completion_lengths_B=mask_BT.sum(dim=1),
        lengths_B=lengths_B,
        is_truncated_B=torch.tensor([length == 29 for length in LENGTHS]),
        train_version=0,
    )


def new_policy() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train()


def columns_of(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    advantages_PG = group_advantages(batch.rewards_B.view(NUM_GROUPS, GROUP_SIZE))
    reference_BT = -torch.rand(batch.tokens_BT.shape, generator=generator) - 3.7
    return {
        "advantages_BT": advantages_PG.view(-1, 1).expand(batch.tokens_BT.shape),
        "reference_logprobs_BT": reference_BT,
    }


def verl_loss(policy: Qwen3ForCausalLM, batch: RolloutBatch, kind: str) -> torch.Tensor:
    """The whole batch at once: verl's policy loss, less its entropy, with its KL to a reference."""
    name, aggregation, fields = KINDS[kind]
    config = ActorConfig(
        strategy="fsdp", rollout_n=GROUP_SIZE, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2,
        clip_ratio_c=1e6, loss_agg_mode=aggregation,
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **fields},
    )  # fmt: skip
    scale = fields.get("loss_scale_factor")
    config.global_batch_info["loss_scale_factor"] = scale
    logits_BTV = policy(input_ids=batch.tokens_BT).logits[:, :-1] / TEMPERATURE
    logprobs_BT = logprobs_from_logits(logits_BTV, batch.tokens_BT[:, 1:], inplace_backward=False)
    mask_BT, columns = batch.mask_BT[:, 1:].float(), columns_of(batch)
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.behaviour_logprobs_BT[:, 1:], log_prob=logprobs_BT,
        advantages=columns["advantages_BT"][:, 1:], response_mask=mask_BT,
        loss_agg_mode=aggregation, config=config,
    )  # fmt: skip
    reference_BT = columns["reference_logprobs_BT"][:, 1:]
    kl_BT = core_algos.kl_penalty(logprobs_BT, reference_BT, "low_var_kl")
    how = (mask_BT, aggregation)
    kl = core_algos.agg_loss(kl_BT, *how, loss_scale_factor=scale)
    entropy = core_algos.agg_loss(entropy_from_logits(logits_BTV), *how, loss_scale_factor=scale)
    return loss + KL_COEFFICIENT * kl - ENTROPY_COEFFICIENT * entropy


def config_of(kind: str) -> PolicyLossConfig:
    return PolicyLossConfig(
        kind=kind,
        kl_coefficient=KL_COEFFICIENT,
        entropy_coefficient=ENTROPY_COEFFICIENT,
        max_completion_length=KINDS[kind][2].get("loss_scale_factor"),
    )


def gradients(policy: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


def check_losses() -> None:
    """Reference KL, entropy, token budgets and packing, for every kind, masked rollouts too."""
    policy = new_policy()
    for kind in KINDS:
        for batch in (random_batch(), random_batch().without_truncated()):
            policy.zero_grad()
            loss = verl_loss(policy, batch, kind)
            loss.backward()
            expected = gradients(policy)
            for max_tokens, is_packed in ((None, False), (40, False), (40, True)):
                policy.zero_grad()
                settings = UpdateSettings(
                    max_tokens=max_tokens, is_packed=is_packed, temperature=TEMPERATURE
                )
                own = (columns_of(batch), config_of(kind), settings)
                metrics = accumulate_gradients(policy, batch, *own)
                assert math.isclose(metrics["loss"], loss.item(), rel_tol=1e-5, abs_tol=1e-6), kind
                assert_close(gradients(policy), expected, **EXACT)
            assert max(float(each.abs().max()) for each in expected) > 1e-3, kind


def check_iterations() -> None:
    """Three passes are three steps with verl's loss around the same old log-probs."""
    batch, policy = random_batch(), new_policy()
    plain = copy.deepcopy(policy)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        verl_loss(plain, batch, "grpo").backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    settings = UpdateSettings(
        num_iterations=3, max_tokens=40, is_packed=True, temperature=TEMPERATURE
    )
    update_policy(policy, optimizer, batch, columns_of(batch), config_of("grpo"), settings)
    assert_close(list(policy.parameters()), list(plain.parameters()), **EXACT)


def check_advantages() -> None:
    batch = random_batch()
    mask_BT = batch.mask_BT.float()
    groups = np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE)
    logprobs_BT, reference_BT = batch.behaviour_logprobs_BT, torch.full_like(mask_BT, -4.0)
    rewards_BT = token_rewards(batch.rewards_B, logprobs_BT, reference_BT, batch.mask_BT, 0.1)
    scores_BT = token_rewards(batch.rewards_B, logprobs_BT, logprobs_BT, batch.mask_BT, 0.0)
    kl_BT = core_algos.kl_penalty(logprobs_BT, reference_BT, "kl") * mask_BT
    assert_close(rewards_BT, scores_BT - 0.1 * kl_BT, **EXACT)
    for gamma in (1.0, 0.9):
        theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards_BT.clone(), mask_BT, config=AlgoConfig(gamma=gamma)
        )
        ours = reinforce_plus_plus_advantages(rewards_BT, batch.mask_BT, gamma)
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        scores_BT.clone(), mask_BT, groups
    )
    centred_B = group_advantages(batch.rewards_B.view(NUM_GROUPS, GROUP_SIZE), "none").flatten()
    centred_BT = token_rewards(centred_B, logprobs_BT, logprobs_BT, batch.mask_BT, 0.0)
    ours = reinforce_plus_plus_advantages(centred_BT, batch.mask_BT)
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, how, function in (
        ("std", ("std", "mean"), core_algos.compute_grpo_outcome_advantage),
        ("rloo", ("none", "leave_one_out"), core_algos.compute_rloo_outcome_advantage),
    ):
        theirs, _ = function(scores_BT.clone(), mask_BT, groups)
        ours = group_advantages(batch.rewards_B.view(NUM_GROUPS, GROUP_SIZE), *how).view(-1, 1)
        assert_close(ours * mask_BT, theirs, **EXACT, msg=name)


def check_critic() -> None:
    batch = random_batch()
    generator, mask_BT = torch.Generator().manual_seed(2), batch.mask_BT.float()
    old_BT, values_BT = (torch.randn(mask_BT.shape, generator=generator) for _ in range(2))
    logprobs_BT = batch.behaviour_logprobs_BT
    rewards_BT = token_rewards(batch.rewards_B, logprobs_BT, logprobs_BT, batch.mask_BT, 0.0)
    _, theirs = core_algos.compute_gae_advantage_return(rewards_BT, old_BT, mask_BT, 0.95, 0.9)
    _, returns_BT = gae_advantages(rewards_BT, old_BT, batch.mask_BT, gamma=0.95, lam=0.9)
    assert_close(returns_BT, theirs * mask_BT, **EXACT)
    expected, _ = core_algos.compute_value_loss(values_BT, returns_BT, old_BT, mask_BT, 0.2)
    loss, _ = value_loss(values_BT, old_BT, returns_BT, batch.mask_BT, clip_range=0.2)
    assert_close(loss, expected, **EXACT)


def main() -> None:
    check_losses()
    check_iterations()
    check_advantages()
    check_critic()
    print("verl's losses: passed")


if __name__ == "__main__":
    main()
