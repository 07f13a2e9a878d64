"""Bias and noise of off-policy corrections, on a problem whose exact gradient is known.

    python benchmarks/lag_corrections.py            # about a minute on one core
    python benchmarks/lag_corrections.py --small    # seconds: shows that it runs

A program, run by hand. It prints two Markdown tables and writes docs/images/lag_corrections.png.
docs/losses.md explains the problem and the figures.

Shape letters: S policies, B rows, T positions, V tokens of the vocabulary, P parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from trainer_hooks import OffPolicyCorrection, PolicyLossConfig, group_advantages, policy_loss

NUM_POSITIONS = 6
NUM_TOKENS = 3
KV_LAGS = (0, 2)  # drawn per token, each with equal probability; position 0 has no context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """Parameters of S policies, at one version.

    own_STV: logits of each token at each position.
    context_SVV: logits added for each token, by the token before. They stand for attention's
        context.
    """

    own_STV: torch.Tensor
    context_SVV: torch.Tensor

    @classmethod
    def zeros(cls, num_policies: int) -> Parameters:
        """Return the parameters of policies that choose all tokens with equal probability."""
        return cls(
            own_STV=torch.zeros(num_policies, NUM_POSITIONS, NUM_TOKENS),
            context_SVV=torch.zeros(num_policies, NUM_TOKENS, NUM_TOKENS),
        )

    def requiring_grad(self) -> Parameters:
        """Return a copy whose tensors require gradients."""
        return Parameters(
            own_STV=self.own_STV.detach().clone().requires_grad_(),
            context_SVV=self.context_SVV.detach().clone().requires_grad_(),
        )

    def stepped(self, objective: torch.Tensor, learning_rate: float) -> Parameters:
        """Return the parameters after one gradient step that increases `objective`."""
        own, context = torch.autograd.grad(objective, (self.own_STV, self.context_SVV))
        return Parameters(
            own_STV=(self.own_STV + learning_rate * own).detach(),
            context_SVV=(self.context_SVV + learning_rate * context).detach(),
        )

    def drifted(self, scale: float, generator: torch.Generator) -> Parameters:
        """Return the parameters plus normal noise of standard deviation `scale`."""
        steps = (
            scale * torch.randn(part.shape, generator=generator)
            for part in (self.own_STV, self.context_SVV)
        )
        own_STV, context_SVV = steps
        return Parameters(
            own_STV=self.own_STV + own_STV, context_SVV=self.context_SVV + context_SVV
        )


def logits_at(
    own: Parameters, context: Parameters, position: int, previous_SB: torch.Tensor
) -> torch.Tensor:
    """Return the logits [S, B, V] of `position` after the tokens `previous_SB`.

    `own_STV` is taken from `own`, and `context_SVV` from `context`. Position 0 has no context.
    """
    own_S1V = own.own_STV[:, position, None]
    num_policies, num_rows = previous_SB.shape
    if position == 0:
        return own_S1V.expand(num_policies, num_rows, NUM_TOKENS)
    index_SBV = previous_SB[..., None].expand(num_policies, num_rows, NUM_TOKENS)
    return own_S1V + context.context_SVV.gather(1, index_SBV)


def logprobs(own: Parameters, context: Parameters, tokens_SBT: torch.Tensor) -> torch.Tensor:
    """Return the log-probs [S, B, T] of given tokens."""
    columns = []
    for position in range(NUM_POSITIONS):
        previous_SB = tokens_SBT[..., max(position - 1, 0)]
        log_softmax = logits_at(own, context, position, previous_SB).log_softmax(-1)
        chosen = tokens_SBT[..., position, None].expand(*log_softmax.shape[:2], 1)
        columns.append(log_softmax.gather(-1, chosen)[..., 0])
    return torch.stack(columns, dim=-1)


def all_sequences() -> torch.Tensor:
    """Return all possible sequences, [V^T, T]."""
    return torch.tensor(list(product(range(NUM_TOKENS), repeat=NUM_POSITIONS)))


def all_kv_lags() -> torch.Tensor:
    """Return all patterns of KV lags, [patterns, T]. They are equally likely."""
    return torch.tensor([(0, *lags) for lags in product(KV_LAGS, repeat=NUM_POSITIONS - 1)])


def rewards(tokens: torch.Tensor) -> torch.Tensor:
    """Return rewards in [0, 1] of sequences.

    A reward is the squared share of positions that count up by 1 modulo V, beginning with 2.
    """
    previous = torch.nn.functional.pad(tokens, (1, 0), value=1)[..., :-1]
    hits = tokens == (previous + 1) % NUM_TOKENS
    return hits.float().mean(dim=-1).square()


def expected_rewards(policy: Parameters) -> torch.Tensor:
    """Return the exact expected reward of each policy, [S], with gradients."""
    tokens_BT = all_sequences()
    tokens_SBT = tokens_BT.expand(len(policy.own_STV), *tokens_BT.shape)
    probability_SB = logprobs(policy, policy, tokens_SBT).sum(dim=-1).exp()
    return (probability_SB * rewards(tokens_SBT)).sum(dim=-1)


def lagged_logprobs(
    history: list[Parameters], policy_lag: int, tokens_SBT: torch.Tensor, kv_lag_SBT: torch.Tensor
) -> torch.Tensor:
    """Return the behaviour log-probs [S, B, T] of tokens with the given KV lags.

    `history` has the versions of the policies, oldest first.
    """
    own = version_before(history, policy_lag)
    chosen = torch.zeros(tokens_SBT.shape)
    for kv_lag in KV_LAGS:
        context = version_before(history, policy_lag + kv_lag)
        values = logprobs(own, context, tokens_SBT)
        chosen = torch.where(kv_lag_SBT == kv_lag, values, chosen)
    return chosen


def sample(
    history: list[Parameters], policy_lag: int, num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample sequences from a lagged policy. Returns the tokens and their random KV lags, [S, B,
    T]."""
    own = version_before(history, policy_lag)
    num_policies = len(own.own_STV)
    shape = (num_policies, num_rows, NUM_POSITIONS)
    draws = torch.randint(len(KV_LAGS), shape, generator=generator)
    kv_lag_SBT = torch.tensor(KV_LAGS)[draws]
    kv_lag_SBT[..., 0] = 0
    tokens_SBT = torch.zeros(shape, dtype=torch.int64)
    for position in range(NUM_POSITIONS):
        previous_SB = tokens_SBT[..., max(position - 1, 0)]
        logits_SBV = torch.zeros(num_policies, num_rows, NUM_TOKENS)
        for kv_lag in KV_LAGS:
            context = version_before(history, policy_lag + kv_lag)
            is_chosen = (kv_lag_SBT[..., position] == kv_lag)[..., None]
            values = logits_at(own, context, position, previous_SB)
            logits_SBV = torch.where(is_chosen, values, logits_SBV)
        uniform = torch.rand(logits_SBV.shape, generator=generator).clamp(min=1e-20)
        tokens_SBT[..., position] = (logits_SBV - (-uniform.log()).log()).argmax(dim=-1)
    return tokens_SBT, kv_lag_SBT


def version_before(history: list[Parameters], lag: int) -> Parameters:
    """Return the version `lag` updates before the newest, or the oldest kept version."""
    return history[max(len(history) - 1 - lag, 0)]


PLOT = Path(__file__).parents[1] / "docs" / "images" / "lag_corrections.png"
LAGS = (0, 1, 2, 4, 6, 8)
BATCH_SIZE = 32
LEARNING_RATE = 8.0
# Histories of the gradient figures: exact ascent plus a random step per version, like the noise of
# batches. The figures are taken half way up.
ASCENT_RATE, DRIFT, VERSION, NUM_HISTORIES = 1.0, 0.15, 24, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A correction, and the policy that is the denominator of the loss's ratio.

    anchor: "behaviour", "proximal" or "present".
    """

    name: str
    anchor: str
    correction: OffPolicyCorrection

    @property
    def config(self) -> PolicyLossConfig:
        # The mean of this loss's gradient is the policy gradient itself, without a scale.
        return PolicyLossConfig(kind="dr_grpo", correction=self.correction)


TRUNCATE = {"mode": "truncate", "high": 2.0}
CONTESTANTS = tuple(
    Contestant(name=name, anchor=anchor, correction=OffPolicyCorrection(**fields))
    for name, anchor, fields in (
        ("none", "present", {"mode": "none"}),
        ("PPO clip", "behaviour", {"mode": "none"}),
        ("TIS", "present", TRUNCATE),
        ("IcePop", "present", {"mode": "mask", "low": 0.5, "high": 2.0}),
        ("sequence TIS", "present", {**TRUNCATE, "level": "sequence"}),
        ("decoupled PPO", "proximal", TRUNCATE),
        ("lag-aware TIS", "present", {**TRUNCATE, "lag_decay": 0.25}),
        ("TIS, KV lag <= 1", "present", {**TRUNCATE, "max_kv_lag": 1.0}),
    )
)


def token_weights(
    contestant: Contestant,
    logprobs_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    policy_lag: int,
    kv_lag_BT: torch.Tensor,
) -> torch.Tensor:
    """Return the factor [B, T] that the loss puts on advantage * gradient of the log-prob."""
    leaf_BT = logprobs_BT.detach().requires_grad_()
    anchors = {"present": logprobs_BT.detach(), "behaviour": None, "proximal": proximal_BT}
    loss, _ = policy_loss(
        leaf_BT,
        behaviour_BT,
        advantages_B[:, None],
        torch.ones_like(leaf_BT),
        contestant.config,
        proximal_logprobs_BT=anchors[contestant.anchor],
        policy_lag_BT=torch.full_like(kv_lag_BT, policy_lag),
        kv_lag_BT=kv_lag_BT,
        aggregation_denominator=1.0,
    )
    return -torch.autograd.grad(loss, leaf_BT)[0] / advantages_B[:, None]


def ascend(num_versions: int, seed: int) -> list[Parameters]:
    """Return the versions of a noisy gradient ascent, beginning with the uniform policy."""
    generator = torch.Generator().manual_seed(seed)
    history = [Parameters.zeros(1)]
    for _ in range(num_versions):
        policy = history[-1].requiring_grad()
        exact = policy.stepped(expected_rewards(policy).sum(), ASCENT_RATE)
        history.append(exact.drifted(DRIFT, generator))
    return history


def score_functions(policy: Parameters, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each token's log-prob with respect to all parameters, [B, T, P]."""
    onehot_BTV = torch.nn.functional.one_hot(tokens_BT, policy.own_STV.shape[-1]).float()
    columns = []
    for position in range(NUM_POSITIONS):
        previous_B = tokens_BT[:, max(position - 1, 0)]
        logits_BV = policy.own_STV[0, position].expand(len(tokens_BT), -1)
        own_BTV = torch.zeros_like(onehot_BTV)
        context_BVV = torch.zeros(len(tokens_BT), *policy.context_SVV.shape[1:])
        if position > 0:
            logits_BV = logits_BV + policy.context_SVV[0, previous_B]
        slope_BV = onehot_BTV[:, position] - logits_BV.softmax(-1)
        own_BTV[:, position] = slope_BV
        if position > 0:
            context_BVV[torch.arange(len(tokens_BT)), previous_B] = slope_BV
        columns.append(torch.cat([own_BTV.flatten(1), context_BVV.flatten(1)], dim=1))
    return torch.stack(columns, dim=1)


def gradient_figures(history: list[Parameters], policy_lag: int) -> dict[str, dict[str, float]]:
    """Return exact bias, noise, error and ESS of each contestant's gradient.

    The gradient is that of the second step on a batch. The present policy is the last version in
    `history`, and the proximal policy is the version before. The batch was sampled `policy_lag`
    versions before the proximal policy.
    """
    policy, proximal = history[-1], history[-2]
    sequences, patterns = all_sequences(), all_kv_lags()
    tokens_BT = sequences.repeat_interleave(len(patterns), dim=0)
    kv_lag_BT = patterns.repeat(len(sequences), 1)
    behaviour_BT = lagged_logprobs(history[:-1], policy_lag, tokens_BT[None], kv_lag_BT[None])[0]
    probability_B = behaviour_BT.sum(dim=1).exp() / len(patterns)
    rewards_B = rewards(tokens_BT)
    advantages_B = rewards_B - (probability_B * rewards_B).sum()
    scores_BTP = score_functions(policy, tokens_BT)
    leaf = policy.requiring_grad()
    exact = torch.autograd.grad(expected_rewards(leaf).sum(), (leaf.own_STV, leaf.context_SVV))
    exact_P = torch.cat([part.flatten() for part in exact])
    figures = {}
    for contestant in CONTESTANTS:
        weights_BT = token_weights(
            contestant,
            logprobs(policy, policy, tokens_BT[None])[0],
            behaviour_BT,
            logprobs(proximal, proximal, tokens_BT[None])[0],
            advantages_B,
            policy_lag,
            kv_lag_BT,
        )
        gradient_BP = torch.einsum("BT,B,BTP->BP", weights_BT, advantages_B, scores_BTP)
        mean_P = probability_B @ gradient_BP
        variance = probability_B @ (gradient_BP - mean_P).square().sum(dim=1)
        first, second = probability_B @ weights_BT, probability_B @ weights_BT.square()
        bias = (mean_P - exact_P).norm() / exact_P.norm()
        noise = (variance / BATCH_SIZE).sqrt() / exact_P.norm()
        figures[contestant.name] = {
            "bias": float(bias),
            "noise": float(noise),
            "error": float((bias.square() + noise.square()).sqrt()),
            "ess": float(first.sum().square() / (second.sum() * NUM_POSITIONS)),
        }
    return figures


def mean_figures(figures: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of every figure of every contestant."""
    return {
        name: {key: fmean(each[name][key] for each in figures) for key in row}
        for name, row in figures[0].items()
    }


def learning_curve(
    contestant: Contestant, policy_lag: int, num_updates: int, num_seeds: int
) -> torch.Tensor:
    """Train `num_seeds` policies, and return their mean expected reward, [1 + num_updates].

    The first entry is the reward before the first update. Each update takes two steps on one batch.
    All contestants get the same random numbers.
    """
    generator = torch.Generator().manual_seed(policy_lag)
    history = [Parameters.zeros(num_seeds)]
    returns = [expected_rewards(history[0])]
    for _ in range(num_updates):
        tokens_SBT, kv_lag_SBT = sample(history, policy_lag, BATCH_SIZE, generator)
        behaviour_BT = lagged_logprobs(history, policy_lag, tokens_SBT, kv_lag_SBT).flatten(0, 1)
        proximal = history[-1]
        proximal_BT = logprobs(proximal, proximal, tokens_SBT).flatten(0, 1)
        # `token_weights` divides by advantages, which are 0 for rewards equal to the group's mean.
        advantages_B = group_advantages(rewards(tokens_SBT), "none").flatten() + 1e-12
        policy = proximal
        for _ in range(2):
            policy = policy.requiring_grad()
            present_BT = logprobs(policy, policy, tokens_SBT).flatten(0, 1)
            weights_BT = token_weights(
                contestant,
                present_BT,
                behaviour_BT,
                proximal_BT,
                advantages_B,
                policy_lag,
                kv_lag_SBT.flatten(0, 1),
            )
            gain_BT = weights_BT * advantages_B[:, None] * present_BT
            policy = policy.stepped(gain_BT.sum() / BATCH_SIZE, LEARNING_RATE / 2)
        history = [*history[-max(LAGS) - 2 :], policy]
        returns.append(expected_rewards(policy))
    return torch.stack(returns).mean(dim=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the tables and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="few updates, two seeds")
    parser.add_argument("--plot", type=Path, default=PLOT)
    arguments = parser.parse_args(argv)
    num_updates, num_seeds, num_histories = (
        (4, 2, 1) if arguments.small else (40, 32, NUM_HISTORIES)
    )
    torch.set_num_threads(1)
    histories = [ascend(VERSION + 1, seed) for seed in range(num_histories)]
    figures = {
        lag: mean_figures([gradient_figures(history, lag) for history in histories]) for lag in LAGS
    }
    curves = {
        lag: {
            contestant.name: learning_curve(contestant, lag, num_updates, num_seeds)
            for contestant in CONTESTANTS
        }
        for lag in (0, 4, max(LAGS))
    }
    print(as_markdown(figures, curves))
    draw(figures, curves[max(LAGS)], arguments.plot)


def as_markdown(figures: dict[int, Any], curves: dict[int, Any]) -> str:
    """Return the two Markdown tables of docs/losses.md."""
    lines = [
        "| correction | bias, lag 0 | lag 4 | lag 8 | noise, lag 0 | lag 4 | lag 8 "
        "| error, lag 8 | ESS, lag 8 |",
        "|---|" + "---|" * 8,
    ]
    for contestant in CONTESTANTS:
        rows = [figures[lag][contestant.name] for lag in (0, 4, 8)]
        cells = [row[name] for name in ("bias", "noise") for row in rows]
        cells += [rows[-1]["error"], rows[-1]["ess"]]
        lines.append(f"| {contestant.name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    num_updates = len(next(iter(curves[0].values()))) - 1
    early = num_updates // 4
    lines += ["", f"| correction | return after {early} and {num_updates} updates, lag 0"]
    lines[-1] += " | lag 4 | lag 8 |"
    lines += ["|---|---|---|---|"]
    for contestant in CONTESTANTS:
        pairs = [curves[lag][contestant.name][[early, -1]].tolist() for lag in (0, 4, 8)]
        cells = [f"{first:.2f}, {last:.2f}" for first, last in pairs]
        lines.append(f"| {contestant.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(figures: dict[int, Any], curves: dict[str, torch.Tensor], path: Path) -> None:
    """Write a plot to `path`: bias, noise and ESS by lag, and learning curves at the largest
    lag."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    titles = {
        "bias": "bias of the gradient / its length",
        "noise": f"noise of a batch of {BATCH_SIZE} / its length",
        "ess": "effective sample size / n",
    }
    panels = dict(zip(titles, axes.flat, strict=False))
    for index, contestant in enumerate(CONTESTANTS):
        style = {"color": f"C{index}", "label": contestant.name, "marker": "os^vDPX*"[index]}
        for name, panel in panels.items():
            panel.plot(LAGS, [figures[lag][contestant.name][name] for lag in LAGS], **style)
        axes[1, 1].plot(curves[contestant.name], color=f"C{index}", label=contestant.name)
    for name, panel in panels.items():
        panel.set(title=titles[name], xlabel="policy lag, versions (KV lag 0 or 2 on top)")
    axes[1, 1].set(title=f"return while learning, policy lag {max(LAGS)}", xlabel="update")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    axes[1, 1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
