"""Task: the prompts, rewards, tokenizer and initial policy of a job, created from its settings.

Used by `trainer_hooks.train` (main, summary, warm_up), and by programs with another training loop:
examples/train_trl.py, `benchmarks.trl_step` and `benchmarks.kv_age`. It reads files and imports
users' functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
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
from rollout.text import HFTokenizer, as_tokenizer, encode_prompts
from trainer_hooks.environments import EnvironmentRollouts
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.evaluation import evaluate
from trainer_hooks.pretrained import load_pretrained
from trainer_hooks.producer.groups import GeneratesAsync, RolloutLLM
from trainer_hooks.prompts.chat_format import ChatFormat
from trainer_hooks.prompts.checks import (
    CheckedRows,
    CheckedWhenRead,
    PromptCheck,
    SelectedRows,
    check_rows,
)
from trainer_hooks.prompts.curriculum import Curriculum
from trainer_hooks.prompts.ledger import PromptItem, PromptRows, as_prompt_item
from trainer_hooks.prompts.sources import FormattedPrompts
from trainer_hooks.rewards import ConversationalReward, RewardRunner, VerlReward, WeightedRewards
from trainer_hooks.train.config_loading import import_function, import_object
from trainer_hooks.train.prompts import (
    SplitPrompts,
    held_out_of_file,
    open_source,
    split_sources,
    without_prompts,
)
from trainer_hooks.train.settings import (
    CurriculumSettings,
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    ModelSettings,
    ProducerSettings,
    RewardSettings,
    RewardTerm,
    SourceSettings,
)

# Limits of EnvironmentRollouts. An AgentRollouts limits its episodes itself.
_OF_EPISODES = ("max_turns", "max_total_tokens", "step_timeout_s", "max_environments")


class Task:
    """The prompts, rewards, tokenizer, environment and initial policy of a job.

    `tokenizer`: a transformers tokenizer.
    `held_out`: prompts for evaluation, empty if the settings ask for none. Training omits them,
        except for training prompts that `data.held_out_path` repeats.
    `reward`: scores completions, or None if only the environment gives rewards. Close it at the
        end.
    `rollout_fn`: generates the rollouts of the environment, or None if there is none. Close it at
        the end.
    `num_skipped_rows`: number of bad rows of files and datasets that were skipped.
    """

    def __init__(
        self,
        model: ModelSettings,
        data: DataSettings,
        reward: RewardSettings,
        warmup_source: SourceSettings | None = None,
        environment: EnvironmentSettings = EnvironmentSettings(),  # noqa: B008 - it is frozen
        max_sequence_length: int | None = None,
        answer_column: str | None = None,
    ) -> None:
        """Read and check every row of files and datasets once.

        `warmup_source`: prompts of a warm-up. None takes the prompts of `data`.
        `max_sequence_length`: the engine's, if known. It limits prompts and episodes.
        `answer_column`: the column that a warm-up learns, or None if there is no warm-up.

        Raises ConfigError for settings that name missing things, and for bad rows unless
        `data.on_bad_row` is "skip".
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
        self._check = prompt_check(model, self.tokenizer, max_sequence_length)
        self._warmup_check = replace(self._check, answer_column=answer_column)
        self.num_skipped_rows = 0
        self.held_out: Sequence[PromptItem]
        # The next two are None if a function creates the prompts of each seed.
        self._train: PromptRows | None = None
        self._warmup: PromptRows | None = None
        held_out_keys: frozenset[int] = frozenset()
        if data.kind == "python":
            rows = self._made("held_out", 0, self._check)
            self.held_out = [as_prompt_item(rows[i]) for i in range(len(rows))]
        else:
            split = self._split()
            self._train, self.held_out = split.train, split.held_out
            held_out_keys = split.held_out_keys
        if warmup_source is not None and warmup_source.kind != "python":
            warmup = self._checked(warmup_source, self._warmup_check, "warmup.source")
            self._warmup = without_prompts(warmup, held_out_keys, "warmup.source")

    def prompts(self, seed: int) -> PromptRows:
        """Return the training prompts of the run with `seed`."""
        return self._made("train", seed, self._check) if self._train is None else self._train

    def warmup_prompts(self, seed: int) -> PromptRows:
        """Return the prompts of the warm-up of the run with `seed`, in the order of their use."""
        if self._warmup_source is None and self._train is None:
            return self._made("warmup", seed, self._warmup_check)
        rows = self._train if self._warmup_source is None else self._warmup
        if rows is None:
            assert self._warmup_source is not None
            rows = self._open(self._warmup_source, "warmup", seed)
            rows = CheckedWhenRead(rows, self._warmup_check)
        return SelectedRows(rows, np.random.default_rng(seed).permutation(len(rows)))

    def new_policy(self) -> PreTrainedModel:
        """Return the initial policy of a run. Random weights are drawn from torch's generator."""
        if (path := self._model.path) is not None:
            policy: PreTrainedModel = load_pretrained(
                AutoModelForCausalLM, "model.path", path, dtype=torch.float32
            )
            return policy
        return self._own_model()

    def num_parameters(self) -> int:
        """Return the number of the initial policy's parameters, without loading its weights."""
        with torch.device("meta"):  # no memory, and no draw of random weights
            if (path := self._model.path) is None:
                return int(self._own_model().num_parameters())
            config = load_pretrained(AutoConfig, "model.path", path)
            return int(AutoModelForCausalLM.from_config(config).num_parameters())

    def _own_model(self) -> PreTrainedModel:
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
        # Qwen3-MoE's checkpoints normalise the experts' weights. transformers' default does not.
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**own, norm_topk_prob=True))

    async def evaluate(
        self,
        llm: GeneratesAsync,
        params: SamplingParams,
        settings: EvaluationSettings,
        on_finished: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Return metrics of answers to the held-out prompts, or {} if there are none.

        Greedy answers give `eval/greedy_reward`, `eval/num_prompts` and `eval/<term>` for each
        reward term, and the same for each source as `eval/<source>/...`. If `settings.n` is not 0,
        `n` samples of each prompt add all metrics of `trainer_hooks.evaluation.evaluate`, which
        replace terms of the same name. The seeds are the same in each call. `on_finished` is called
        at the end of each sample.
        """
        if not self.held_out:
            return {}
        params = replace(params, return_log_probs=False)
        greedy = replace(params, temperature=0.0)
        own: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "rollout_fn": self.rollout_fn,
            "on_finished": on_finished,
        }
        greedy_metrics = await evaluate(llm, self.held_out, self.reward, greedy, **own)
        metrics: dict[str, float] = {}
        for name, value in greedy_metrics.items():
            if "/rewards/" in name:
                metrics[name.replace("/rewards/", "/")] = value
            elif name.endswith("/reward"):
                metrics[f"{name.removesuffix('reward')}greedy_reward"] = value
            elif name.endswith("/num_prompts"):
                metrics[name] = value
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
        """Return the "prompt" and greedy "answer" of each of the first `count` held-out prompts.
        The "prompt" of a chat is the text of its last message. Token ids are shown as a list."""
        greedy = replace(params, temperature=0.0, return_log_probs=False)
        answers = []
        for item in self.held_out[:count]:
            scoped = RolloutLLM(llm, greedy, item, 0, as_tokenizer(self.tokenizer))
            if self.rollout_fn is None:
                ids = (await llm.generate(item.prompt, greedy)).generated_tokens
            else:
                ids = (await self.rollout_fn(scoped, item.prompt)).completion_ids
            prompt = item.prompt if isinstance(item.prompt, str) else str(list(item.prompt))
            if messages := item.columns.get("messages"):
                prompt = str(messages[-1]["content"])
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            answers.append({"prompt": prompt, "answer": text})
        return answers

    def _open(self, source: SourceSettings, part: str, seed: int) -> PromptRows:
        if source.kind == "environment":
            if not isinstance(self.rollout_fn, AgentRollouts):
                raise ConfigError(
                    "data.kind=environment needs an environment that has prompts, such as "
                    "environment=verifiers"
                )
            return self.rollout_fn.prompts()
        return open_source(source, self._chat, part, seed)

    def _checked(self, source: SourceSettings, check: PromptCheck, name: str) -> CheckedRows:
        """Return the good rows of a source, and count the bad ones. `name` is the source's
        setting."""
        rows = self._open(source, "train", 0)
        checked = check_rows(rows, check, self._data.on_bad_row, name)
        self.num_skipped_rows += checked.num_skipped
        return checked

    def _split(self) -> SplitPrompts:
        """Return training prompts, and held-out prompts from `held_out_path` or else from the
        sources."""
        data = self._data
        # A warm-up without its own prompts learns the answers of the training prompts.
        check = self._warmup_check if self._warmup_source is None else self._check
        sources = {
            name: self._checked(own, check, f"data.sources.{name}" if data.sources else "data")
            for name, own in data.named_sources.items()
        }
        if data.held_out_path is None:
            return split_sources(sources, data)
        (train,) = sources.values()  # the settings refuse held_out_path with several sources
        rows = self._open(replace(data, path=data.held_out_path), "held_out", 0)
        held_out = held_out_of_file(rows, data, self._check, train)
        return SplitPrompts(train=train.rows, held_out=held_out, held_out_keys=frozenset())

    def _made(self, part: str, seed: int, check: PromptCheck) -> PromptRows:
        """Return the rows of the user's function for a part of a run. A list is checked at once,
        other rows when they are read."""
        rows = self._open(self._data, part, seed)
        if not isinstance(rows.rows if isinstance(rows, FormattedPrompts) else rows, (list, tuple)):
            return CheckedWhenRead(rows, check)
        return check_rows(rows, check, self._data.on_bad_row, "data").rows


def prompt_check(
    model: ModelSettings, tokenizer: Any, max_sequence_length: int | None
) -> PromptCheck:
    """Return the check of a job's prompts. `max_sequence_length` is the engine's. None takes the
    model's number of positions."""
    if model.path is not None:
        config = load_pretrained(AutoConfig, "model.path", model.path).get_text_config()
        vocab_size = getattr(config, "vocab_size", None)
        positions = getattr(config, "max_position_embeddings", None)
    else:
        vocab_size, positions = len(tokenizer), model.max_position_embeddings
    return PromptCheck(
        encode_all=functools.partial(encode_prompts, HFTokenizer(tokenizer)),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length or positions,
    )


def load_tokenizer(settings: ModelSettings) -> Any:
    """Load the tokenizer of the settings. A tokenizer without a padding token pads with its end
    token. Raises ConfigError if there is no tokenizer, or if it has no end token."""
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
    """Return the format of prompts by the chat template, or None to leave prompts unchanged.

    The result is None if `settings.chat` is False, or if `settings.chat` is None and the
    tokenizer has no template. Raises ConfigError for a system prompt or examples without a
    template."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not (has_template if settings.chat is None else settings.chat):
        for name in ("system_prompt", "examples"):
            if value := getattr(settings, name):
                raise ConfigError(
                    f"data.{name}={value!r} needs a chat template, but "
                    + ("data.chat=false turns it off" if has_template else "the tokenizer has none")
                )
        return None
    return ChatFormat(
        tokenizer, settings.system_prompt, settings.template_options, [*settings.examples.items()]
    )


def reward_runner(settings: RewardSettings) -> RewardRunner | None:
    """Return the runner of the weighted sum of the settings' terms, or None if there are no
    terms."""
    if not settings.terms:
        return None
    functions = [reward_function(name, term) for name, term in settings.terms.items()]
    weights = [term.weight for term in settings.terms.values()]
    reward = WeightedRewards(functions, weights, list(settings.terms))
    return RewardRunner(
        reward, settings.workers, settings.timeout_s, warn_after_s=settings.warn_after_s
    )


def reward_function(name: str, term: RewardTerm) -> Any:
    """Return the function of a term, adapted to RewardRunner's convention. Raises ConfigError for a
    path that names no function, and for options that it does not accept."""
    function = import_function(term.path, term.options, f"reward.terms.{name}")
    adapter = {"text": None, "chat": ConversationalReward, "verl": VerlReward}[term.convention]
    return function if adapter is None else adapter(function)


def environment_rollouts(
    settings: EnvironmentSettings,
    tokenizer: Any,
    template_options: Mapping[str, Any],
    max_sequence_length: int | None,
) -> EnvironmentRollouts | AgentRollouts | None:
    """Return the rollout_fn of the settings, or None if they name no environment.

    The engine's `max_sequence_length` limits an episode's tokens if the settings do not. Raises
    ConfigError for a path that names no environment, for wrong options and limits, and for a
    tokenizer without a chat template.
    """
    if settings.path is None:
        return None
    make, options = import_object(settings.path, "environment.path"), dict(settings.options)
    is_agent = inspect.isclass(make) and issubclass(make, AgentRollouts)
    if is_agent:
        _refuse_limits_of_episodes(settings)
        own = {
            "template_options": template_options,
            "rollout_timeout_s": settings.rollout_timeout_s,
        }
        make, options = make.load, {**options, **own, "tokenizer": tokenizer}
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        given = dict(settings.options)
        raise ConfigError(f"environment.options={given}: {settings.path}: {error}") from error
    if is_agent:
        agent: AgentRollouts = make(**options)
        return agent
    return EnvironmentRollouts(
        functools.partial(make, **options) if options else make,
        tokenizer,
        settings.limits(max_sequence_length),
        max_environments=settings.max_environments,
        template_options=template_options,
    )


def _refuse_limits_of_episodes(settings: EnvironmentSettings) -> None:
    for limit in fields(settings):
        value = getattr(settings, limit.name)
        if limit.name in _OF_EPISODES and value != limit.default:
            raise ConfigError(
                f"environment.{limit.name}={value} does not apply to {settings.path}, which runs "
                "its own episodes; leave it out, or set a limit of that class in "
                "environment.options"
            )


def producer_options(settings: ProducerSettings) -> dict[str, Any]:
    """Return the settings as arguments of AsyncRolloutProducer, with functions in place of paths.
    Raises ConfigError for a path that names no function."""
    options = {field.name: getattr(settings, field.name) for field in fields(settings)}
    filters = [
        import_function(own.path, own.options, f"producer.group_filters.{name}")
        for name, own in settings.group_filters.items()
    ]
    return {**options, "group_filters": filters, "curriculum": _curriculum(settings.curriculum)}


def _curriculum(settings: CurriculumSettings | None) -> Curriculum | None:
    if settings is None:
        return None
    weight = import_function(settings.path, settings.options, "producer.curriculum")
    return Curriculum(weight=weight, with_replacement=settings.with_replacement)
