"""Task: what a job trains on, made from its settings: prompts, rewards, tokenizer, policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout import SamplingParams
from rollout.errors import ConfigError
from rollout.text import as_tokenizer
from trainer_hooks.chat_format import ChatFormat
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.evaluate import evaluate
from trainer_hooks.jobs.environment import EnvironmentSettings, environment_rollouts
from trainer_hooks.jobs.import_paths import import_function, import_object
from trainer_hooks.jobs.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    RewardSettings,
    RewardTerm,
    SourceSettings,
)
from trainer_hooks.pretrained import load_pretrained
from trainer_hooks.producer.groups import GeneratesAsync, ScopedLLM
from trainer_hooks.prompt_ledger import PromptItem, PromptRows, as_prompt_item
from trainer_hooks.prompt_sources import (
    DatasetPrompts,
    JsonlPrompts,
    MixedPrompts,
    ParquetPrompts,
    ReasoningGymPrompts,
)
from trainer_hooks.rewards import ConversationalReward, RewardRunner, VerlReward, WeightedRewards


class Task:
    """What a job trains on. The tokenizer is one of transformers.

    `held_out`: prompts that the training never sees; empty where the settings ask for none.
    `reward`: scores completions; close it at the end, which ends its processes. None where the
    environment alone does. `rollout_fn`: the environment, if there is one; close it as well.
    """

    def __init__(
        self,
        model: ModelSettings,
        data: DataSettings,
        reward: RewardSettings,
        warmup_source: SourceSettings | None = None,
        environment: EnvironmentSettings = EnvironmentSettings(),  # noqa: B008 - it is frozen
        max_sequence_length: int | None = None,
    ) -> None:
        """`max_sequence_length`: of the engine, if it is known; it bounds an episode.

        Raises ConfigError for settings that name what is not there.
        """
        self._model, self._data, self._warmup_source = model, data, warmup_source
        self.tokenizer: Any = load_tokenizer(model)
        self._chat = chat_format(data, self.tokenizer)
        self.reward = reward_runner(reward)
        self.rollout_fn = environment_rollouts(
            environment, self.tokenizer, data.template_options, max_sequence_length
        )
        if self.reward is None and isinstance(self.rollout_fn, AgentRollouts):
            own = self.rollout_fn.reward_fn
            self.reward = None if own is None else RewardRunner(own)
        self.held_out: Sequence[PromptItem]
        self._train: PromptRows | None = None  # made for each seed where a function makes them
        if data.kind == "python":
            rows = self._open(data, "held_out", 0)
            self.held_out = [as_prompt_item(rows[i]) for i in range(len(rows))]
        else:
            self._train, self.held_out = self._split()

    def prompts(self, seed: int) -> PromptRows:
        """The training prompts of the run with `seed`."""
        return self._open(self._data, "train", seed) if self._train is None else self._train

    def warmup_prompts(self, seed: int) -> PromptRows:
        """The prompts of the warm-up, in the order in which they are to be used."""
        if self._warmup_source is None and self._train is None:
            return self._open(self._data, "warmup", seed)
        rows = self._train
        if self._warmup_source is not None:
            rows = self._open(self._warmup_source, "warmup", seed)
        assert rows is not None
        return SelectedRows(rows, np.random.default_rng(seed).permutation(len(rows)))

    def new_policy(self) -> PreTrainedModel:
        """The policy that a run begins with; random weights are drawn from torch's generator."""
        if (path := self._model.path) is not None:
            policy: PreTrainedModel = load_pretrained(
                AutoModelForCausalLM, "model.path", path, dtype=torch.float32
            )
            return policy
        own: dict[str, Any] = {
            **self._model.shape,
            "vocab_size": len(self.tokenizer),
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        if self._model.num_experts is None:
            return Qwen3ForCausalLM(Qwen3Config(**own))
        # Experts' weights sum to 1 as in the family's checkpoints, unlike transformers' default.
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**own, norm_topk_prob=True))

    async def evaluate(
        self, llm: GeneratesAsync, params: SamplingParams, settings: EvaluationSettings
    ) -> dict[str, float]:
        """The rewards of answers to the held-out prompts; {} where there are none.

        `eval/greedy_reward`, also as `eval/<source>/greedy_reward`; with samples all metrics of
        `evaluate`. The samples are those of the same seeds each time.
        """
        if not self.held_out:
            return {}
        params = replace(params, return_log_probs=False)
        greedy = replace(params, temperature=0.0)
        own: dict[str, Any] = {"tokenizer": self.tokenizer, "rollout_fn": self.rollout_fn}
        of_greedy = await evaluate(llm, self.held_out, self.reward, greedy, **own)
        metrics = {
            f"{name.removesuffix('reward')}greedy_reward": value
            for name, value in of_greedy.items()
            if name.endswith("/reward")
        }
        if not settings.n:
            return metrics
        answer_fn = None
        if (answer := settings.answer) is not None:
            answer_fn = import_function(answer.path, answer.options, "trainer.evaluation.answer")
        sampled = await evaluate(
            llm,
            self.held_out,
            self.reward,
            replace(params, temperature=settings.temperature, seed=0),
            settings.n,
            pass_at=settings.pass_at,
            success_reward=settings.success_reward,
            answer_fn=answer_fn,
            **own,
        )
        return metrics | sampled

    async def greedy_answers(
        self, llm: GeneratesAsync, params: SamplingParams, count: int
    ) -> list[dict[str, str]]:
        """The greedy answers to the first `count` held-out prompts, as {"prompt", "answer"}."""
        greedy = replace(params, temperature=0.0, return_log_probs=False)
        answers = []
        for item in self.held_out[:count]:
            scoped = ScopedLLM(llm, greedy, item, 0, as_tokenizer(self.tokenizer))
            if self.rollout_fn is None:
                ids = (await llm.generate(item.prompt, greedy)).generated_tokens
            else:
                ids = (await self.rollout_fn(scoped, item.prompt)).completion_ids
            prompt = item.prompt if isinstance(item.prompt, str) else str(list(item.prompt))
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            answers.append({"prompt": prompt, "answer": text})
        return answers

    def _open(self, source: SourceSettings, part: str, seed: int) -> PromptRows:
        if source.kind == "environment":
            if not isinstance(self.rollout_fn, AgentRollouts):
                raise ConfigError(
                    "data.kind=environment needs an environment that brings prompts, such as "
                    "environment=verifiers"
                )
            return self.rollout_fn.prompts()
        return open_source(source, self._chat, part, seed)

    def _split(self) -> tuple[PromptRows, Sequence[PromptItem]]:
        """Training prompts, and those held out: of their own path, or every n-th row."""
        data = self._data
        sources = {name: self._open(own, "train", 0) for name, own in data.named_sources.items()}
        weights = {name: own.weight for name, own in data.named_sources.items()}
        rows = next(iter(sources.values()))
        if data.sources:
            rows = MixedPrompts({name: (sources[name], weights[name]) for name in sources})
        if data.held_out_path is not None:
            held_out = self._open(replace(data, path=data.held_out_path), "held_out", 0)
            num_held_out = min(data.num_held_out or len(held_out), len(held_out))
            return rows, [as_prompt_item(held_out[i]) for i in range(num_held_out)]
        num_held_out = min(data.num_held_out, len(rows) // 10)
        if not num_held_out:
            return rows, []
        places = np.arange(num_held_out) * len(rows) // num_held_out
        kept = np.delete(np.arange(len(rows)), places)
        return SelectedRows(rows, kept), [as_prompt_item(rows[int(i)]) for i in places]


class SelectedRows:
    """Some rows of a source, in an order of their own."""

    def __init__(self, rows: PromptRows, indices: Any) -> None:
        """`indices`: integers [number of rows]."""
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._indices)

    def __getitem__(self, index: int, /) -> PromptItem:
        return as_prompt_item(self._rows[int(self._indices[index])])


def load_tokenizer(settings: ModelSettings) -> Any:
    """The tokenizer of the settings; one without a token for padding pads with its end token.

    Raises ConfigError if there is none, or if it has no end token.
    """
    source = settings.tokenizer or settings.path
    assert source is not None, "the settings check it"
    if ":" in source:
        tokenizer = import_object(source, "model.tokenizer")()
    else:
        setting = "model.tokenizer" if settings.tokenizer else "model.path"
        tokenizer = load_pretrained(AutoTokenizer, setting, source)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer {source} has no end token; set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def chat_format(settings: DataSettings, tokenizer: Any) -> ChatFormat | None:
    """How prompts become text: the tokenizer's chat template, or None for as they are.

    Raises ConfigError for a system prompt without a template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not (has_template if settings.chat is None else settings.chat):
        if settings.system_prompt is not None:
            raise ConfigError(
                f"data.system_prompt={settings.system_prompt!r} needs a chat template, which "
                + ("data.chat=false leaves out" if has_template else "the tokenizer does not have")
            )
        return None
    return ChatFormat(tokenizer, settings.system_prompt, settings.template_options)


def open_source(
    source: SourceSettings, chat: ChatFormat | None, part: str, seed: int
) -> PromptRows:
    """The rows of one source. `part`, `seed`: for a function that makes them."""
    path, column, options = source.path, source.prompt_column, dict(source.options)
    assert path is not None, "the settings check it"
    if source.kind in ("jsonl", "parquet"):
        reader = JsonlPrompts if source.kind == "jsonl" else ParquetPrompts
        return reader(path, column, chat_template=chat, **options)
    if not isinstance(path, str):
        raise ConfigError(f"data.path={list(path)} of kind {source.kind} must be one path")
    if source.kind == "datasets":
        return DatasetPrompts(path, column, chat_template=chat, **options)
    if source.kind == "reasoning_gym":
        return ReasoningGymPrompts(path, chat_template=chat, **options)
    rows: PromptRows = import_object(path, "data.path")(part, seed, **options)
    return rows


def reward_runner(settings: RewardSettings) -> RewardRunner | None:
    """The weighted sum of the settings' terms; None if there are none."""
    if not settings.terms:
        return None
    functions = [reward_function(name, term) for name, term in settings.terms.items()]
    weights = [term.weight for term in settings.terms.values()]
    reward = WeightedRewards(functions, weights, list(settings.terms))
    return RewardRunner(
        reward, settings.workers, settings.timeout_s, warn_after_s=settings.warn_after_s
    )


def reward_function(name: str, term: RewardTerm) -> Any:
    """The function of a term, in the convention of RewardRunner.

    Raises ConfigError for a path that names none, and for options that it does not take.
    """
    function = import_function(term.path, term.options, f"reward.terms.{name}")
    adapter = {"text": None, "chat": ConversationalReward, "verl": VerlReward}[term.convention]
    return function if adapter is None else adapter(function)
