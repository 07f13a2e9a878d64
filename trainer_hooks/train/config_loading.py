"""Converts configs to objects: nested mappings to frozen dataclasses, import paths to functions.

Used by `trainer_hooks.train` (hydra_job, overrides, override_help, main, run_files, task, prompts,
learner) and by scripts/settings_pages.py. `import_object` appends the working directory to
sys.path.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollout import InferenceConfig
from rollout.config import CONFIG_HINTS
from rollout.errors import ConfigError
from rollout.keyword_hints import field_types, is_union, remedy_of_unknown

T = TypeVar("T")


def load_dataclass(kind: type[T], values: Mapping[str, Any] | DictConfig, path: str = "") -> T:
    """Return `kind(**values)`. A field that is a dataclass takes a nested mapping.

        settings = load_dataclass(JobSettings, hydra.compose("train"))

    `path` is the position of `values` in the whole config, for error messages. Raises ConfigError
    for an unknown key, a missing key and a value of another type. Errors that `kind` raises pass
    through.
    """
    if isinstance(values, DictConfig):
        try:
            values = typing.cast(dict[str, Any], OmegaConf.to_container(values, resolve=True))
        except OmegaConfBaseException as error:
            key, reason = error.full_key or "the config", str(error).partition("\n")[0]
            raise ConfigError(
                f"{key} cannot be read: {reason}; write \\${{ for a ${{ that is text"
            ) from error
    return _load(kind, values, path)


def dataclass_by_name(kind: Any) -> type | None:
    """Return the dataclass in a type `Mapping[str, dataclass]`, or None for any other type."""
    is_mapping = typing.get_origin(kind) is Mapping
    return dataclass_of(typing.get_args(kind)[1]) if is_mapping else None


def dataclass_of(kind: Any) -> type | None:
    """Return `kind` if it is a dataclass, or the dataclass in `X | None`, else None."""
    options = typing.get_args(kind) if is_union(kind) else (kind,)
    found = (o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o))
    return next(found, None)


def _load(kind: type[T], given: Mapping[str, Any], path: str) -> T:
    types_by_name = field_types(kind)
    for name in given:
        if name not in types_by_name:
            raise unknown_key_error(_first_leaf(name, given[name]), types_by_name, path)
    # A key with the value ??? counts as absent.
    given = {name: value for name, value in given.items() if not _is_left_open(value)}
    required = {
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(given)):
        raise ConfigError(
            f"{_join(path, missing[0])} is missing and has no default; give "
            f"{_join(path, missing[0])}=VALUE"
        )
    converted = {
        name: _convert(types_by_name[name], value, _join(path, name))
        for name, value in given.items()
    }
    try:
        return kind(**converted)
    except ConfigError as error:
        if path and str(error).partition("=")[0] in types_by_name:  # a field out of its range
            raise ConfigError(f"{path}.{error}") from error
        raise


def unknown_key_error(key: str, known: Mapping[str, Any], path: str = "") -> ConfigError:
    """Return the error for a key that does not exist below `path`.

    `known` has the types of the keys that exist there. The message proposes our name for another
    system's key, such as TRL's. Otherwise it proposes the same key one level below, the nearest
    key, or all keys.
    """
    if hint := hint_for(_join(path, key)):
        return ConfigError(f"unknown config key {_join(path, key)}; {hint}")
    parts = {name: dataclass_of(inner) for name, inner in known.items()}
    below = [n for n, part in parts.items() if part and key in field_types(part)]
    if below:
        places = " or ".join(_join(path, f"{name}.{key}") for name in below)
        return ConfigError(f"unknown config key {_join(path, key)}; did you mean {places}?")
    name = key.partition(".")[0]
    names = sorted(known)
    remedy = remedy_of_unknown(
        name, names, f"known: {', '.join(names)}", cutoff=0.5, prefix=_join(path, "")
    )
    return ConfigError(f"unknown config key {_join(path, name)}; {remedy}")


def as_plain(value: Any) -> Any:
    """Return a loaded config as mappings, lists, numbers and text. An enum becomes its value, any
    other object its repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_plain(getattr(value, name)) for name in field_types(type(value))}
    if isinstance(value, Mapping):
        return {str(name): as_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(part) for part in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, (bool, int, float, str, types.NoneType)) else repr(value)


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Return `value` converted to `kind`, for example a mapping to a dataclass. Raises
    ConfigError."""
    part = dataclass_of(kind)
    if part is not None and isinstance(value, Mapping):
        return _load(part, value, path)
    named = dataclass_by_name(kind)
    if named is not None and isinstance(value, Mapping):
        return {name: _convert(named, own, _join(path, name)) for name, own in value.items()}
    if not _fits(kind, value):
        raise ConfigError(f"{path}={value!r} must be {_described(kind, path)}")
    return tuple(value) if typing.get_origin(kind) is tuple else value


def _first_leaf(name: str, value: Any) -> str:
    while isinstance(value, Mapping) and value:
        inner, value = next(iter(value.items()))
        name = f"{name}.{inner}"
    return name


def _is_left_open(value: Any) -> bool:
    return isinstance(value, str) and value == MISSING


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a plain value fits `kind`. Any value fits a type that YAML lacks, such as an
    enum."""
    origin = typing.get_origin(kind)
    if is_union(kind):
        return any(_fits(option, value) for option in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in (bool, str, types.NoneType):
        return isinstance(value, kind)
    if origin in (tuple, list):
        return isinstance(value, (list, tuple))
    if origin is Mapping:
        return isinstance(value, Mapping)
    return not dataclasses.is_dataclass(kind)


def _described(kind: Any, path: str) -> str:
    if is_union(kind):
        return " or ".join(_described(option, path) for option in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    if dataclasses.is_dataclass(kind):
        keys = ", ".join(
            f"{path}.{name}" for name in list(field_types(typing.cast(type, kind)))[:3]
        )
        return f"several settings, such as {keys}"
    if typing.get_origin(kind) in (tuple, list):
        return f"a list, written {path}=[A,B]"
    if typing.get_origin(kind) is Mapping:
        return f"a mapping, written {path}.NAME=VALUE"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def import_object(path: str, setting: str) -> Any:
    """Return the object at `path`, such as "package.module:name".

    `setting` is the config key of the path, for errors. Appends the working directory to sys.path
    if it is missing there. Raises ConfigError for a path without a colon, and for a missing module
    or name. An error inside the module passes through.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{setting}={path} is not an import path; give package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if module_name.endswith(".py"):
        written = module_name.removesuffix(".py").replace("/", ".")
        raise ConfigError(
            f"{setting}={path} names a file; give the module, such as {written}:{name}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The traceback says more if the module was found and imports a missing one.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{setting}={path}: there is no module {error.name} in the working "
            f"directory {os.getcwd()} or on PYTHONPATH"
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(module).items() if callable(value)]
            nearest = get_close_matches(name, names, n=1)
            hint = f"; did you mean {module_name}:{nearest[0]}?" if nearest else ""
            raise ConfigError(f"{setting}={path}: {module.__name__} has no {name}{hint}")
        found = getattr(found, part)
    return found


def import_function(path: str, options: Mapping[str, Any], setting: str) -> Any:
    """Return the function at `path` with the arguments `options` bound.

    If `path` names a class, return an instance made with `options`. `setting` is the config key
    above `path` and `options`, for errors. Raises ConfigError for a path that names nothing
    callable, and for options that the function does not accept.
    """
    function = import_object(path, f"{setting}.path")
    try:
        inspect.signature(function).bind_partial(**options)
        if inspect.isclass(function):
            function = function(**options)
        elif options:
            function = functools.partial(function, **options)
    except TypeError as error:
        raise ConfigError(f"{setting}.options={dict(options)}: {path}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{setting}.path={path} is not a function")
    return function


def make_object(path: str, options: Mapping[str, Any], setting: str, *arguments: Any) -> Any:
    """Call the class or function at `path` with `arguments` and `options`. Return the result.

    `setting` is the config key above `path` and `options`, for errors. Raises ConfigError for a
    path that names nothing, and if the call raises TypeError.
    """
    make = import_object(path, f"{setting}.path")
    try:
        return make(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{setting}.options={dict(options)}: {path}: {error}") from error


_GROUP_SIZE = "algorithm.group_size"
_GROUPS_PER_STEP = "algorithm.groups_per_step"
_NUM_MINIBATCHES = "algorithm.num_minibatches"
_MAX_NEW_TOKENS = "algorithm.max_new_tokens"
_TEMPERATURE = "algorithm.temperature"
_NORMALIZATION = "algorithm.advantage_normalization"
_KIND = "the kind of loss, chosen with its group: algorithm=grpo, dapo, dr_grpo, gspo, cispo, ..."
_EPSILON = "algorithm.loss.epsilon_low and algorithm.loss.epsilon_high"
_EPSILON_HIGH = "algorithm.loss.epsilon_high"
_KL = "algorithm.loss.kl_coefficient"
_DUAL_CLIP = "algorithm.loss.dual_clip"
_LEARNING_RATE = "trainer.learning_rate"
_WARMUP_STEPS = "trainer.warmup_steps"
_NUM_STEPS = "trainer.num_steps"
_GRAD_NORM = "trainer.max_grad_norm"
_NUM_ITERATIONS = "algorithm.num_iterations"
_ENTROPY = "algorithm.loss.entropy_coefficient"
_REWARD_KL = "algorithm.reward_kl_coefficient"
_SYNC_INTERVAL = "algorithm.reference.sync_interval"
_SCHEDULER = "trainer.scheduler.path, with trainer.scheduler.options,"
_LAYERS_AGAIN = "trainer.gradient_checkpointing"
_CHECKPOINTS = "trainer.checkpoint_interval"

_TRL = {
    "num_generations": _GROUP_SIZE,
    "generation_batch_size": f"{_GROUPS_PER_STEP}, times algorithm.group_size rollouts,",
    "per_device_train_batch_size": f"{_GROUPS_PER_STEP}, split by {_NUM_MINIBATCHES},",
    "steps_per_generation": _NUM_MINIBATCHES,
    "gradient_accumulation_steps": _NUM_MINIBATCHES,
    "loss_type": _KIND,
    "importance_sampling_level": _KIND,
    "epsilon": _EPSILON,
    "epsilon_high": f"{_EPSILON_HIGH} (for cispo the cap less 1)",
    "delta": _DUAL_CLIP,
    "num_iterations": _NUM_ITERATIONS,
    "mask_truncated_completions": "algorithm.mask_truncated_completions",
    "entropy_coef": _ENTROPY,
    "off_policy_mask_threshold": "algorithm.loss.max_sequence_kl",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "sync_ref_model": f"set by {_SYNC_INTERVAL}",
    "ref_model_sync_steps": _SYNC_INTERVAL,
    "ref_model_mixup_alpha": "algorithm.reference.sync_weight",
    "lr_scheduler_type": _SCHEDULER,
    "beta": _KL,
    "temperature": _TEMPERATURE,
    "max_completion_length": _MAX_NEW_TOKENS,
    "scale_rewards": f"{_NORMALIZATION}=std or none",
    "learning_rate": _LEARNING_RATE,
    "warmup_steps": _WARMUP_STEPS,
    "max_steps": _NUM_STEPS,
    "max_grad_norm": _GRAD_NORM,
    "save_steps": _CHECKPOINTS,
    "gradient_checkpointing": _LAYERS_AGAIN,
    "bf16": "trainer.autocast=bfloat16",
    "max_staleness": "producer.max_staleness_versions",
}
_VERL = {
    "rollout.n": _GROUP_SIZE,
    "rollout.temperature": _TEMPERATURE,
    "actor.clip_ratio": _EPSILON,
    "actor.clip_ratio_low": "algorithm.loss.epsilon_low",
    "actor.clip_ratio_high": _EPSILON_HIGH,
    "actor.clip_ratio_c": _DUAL_CLIP,
    "actor.kl_loss_coef": _KL,
    "actor.policy_loss.loss_mode": _KIND,
    "actor.loss_agg_mode": "algorithm.loss.aggregation, which the kind of loss chooses,",
    "actor.loss_scale_factor": "algorithm.loss.max_completion_length",
    "actor.grad_clip": _GRAD_NORM,
    "actor.entropy_coeff": _ENTROPY,
    "actor.ppo_epochs": _NUM_ITERATIONS,
    "actor.ppo_max_token_len_per_gpu": "algorithm.max_tokens_per_forward",
    "actor.optim.lr_scheduler_type": _SCHEDULER,
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules",
    "model.use_remove_padding": "algorithm.is_packed",
    "model.enable_gradient_checkpointing": _LAYERS_AGAIN,
    "algorithm.use_kl_in_reward": f"set by {_REWARD_KL}",
    "algorithm.kl_ctrl.kl_coef": _REWARD_KL,
    "actor.optim.lr": _LEARNING_RATE,
    "actor.optim.lr_warmup_steps": _WARMUP_STEPS,
    "actor.ppo_mini_batch_size": f"{_NUM_MINIBATCHES}, a number of parts,",
    "algorithm.adv_estimator": (
        f"{_NORMALIZATION}, algorithm.advantage_baseline and algorithm.advantage_estimator"
    ),
    "algorithm.norm_adv_by_std_in_grpo": f"{_NORMALIZATION}=std or none",
    "data.train_batch_size": _GROUPS_PER_STEP,
    "data.max_response_length": _MAX_NEW_TOKENS,
    "data.filter_overlong_prompts": "data.on_bad_row=skip",
    "data.max_prompt_length": "engine.max_sequence_length, of prompt and answer together,",
    "data.prompt_key": "data.prompt_column",
    "trainer.total_training_steps": _NUM_STEPS,
    "trainer.save_freq": _CHECKPOINTS,
    "trainer.project_name": "logger.wandb_project",
    "trainer.experiment_name": "run_name",
}
_MEGATRON = {
    "grpo_group_size": _GROUP_SIZE,
    "grpo_prompts_per_step": _GROUPS_PER_STEP,
    "grpo_clamp_eps_lower": "algorithm.loss.epsilon_low",
    "grpo_clamp_eps_upper": _EPSILON_HIGH,
    "grpo_kl_beta": _KL,
    "rl_default_temperature": _TEMPERATURE,
    "rl_importance_sampling_truncation_coef": (
        "algorithm.loss.correction.high, with its mode=truncate and algorithm.decoupled=true,"
    ),
    "lr": _LEARNING_RATE,
    "clip_grad": _GRAD_NORM,
    "train_iters": _NUM_STEPS,
    "save_interval": _CHECKPOINTS,
    "global_batch_size": f"{_NUM_MINIBATCHES}, a number of parts,",
}
_ENGINE_FIELDS = field_types(InferenceConfig)
# Names in vLLM and SGLang. Our names for their engine settings are in the section `engine`.
_VLLM = {
    **{
        name: f"engine.{hint}"
        for name, hint in CONFIG_HINTS.items()
        if hint.partition(" ")[0].partition("=")[0].rstrip(",") in _ENGINE_FIELDS
    },
    **{
        name: f"{_MAX_NEW_TOKENS} (and engine.max_tokens for the tokens of one step)"
        for name in ("max_tokens", "max_new_tokens", "max_completion_tokens")
    },
    **{name: "num_engines" for name in ("dp", "dp_size", "data_parallel_size")},
    "num_return_sequences": _GROUP_SIZE,
}
# Names in other training scripts.
_COMMON = {
    **{name: _NUM_STEPS for name in ("steps", "num_iters", "total_steps", "n_steps")},
    **{
        name: f"{_NUM_STEPS}, a number of steps,"
        for name in ("epochs", "num_epochs", "num_train_epochs")
    },
    **{name: f"{_GROUPS_PER_STEP}, of prompts," for name in ("batch_size", "train_batch_size")},
    **{name: "model.path" for name in ("model_path", "model_name_or_path", "model_name")},
    **{
        name: "data and data.path, as in data=jsonl data.path=train.jsonl,"
        for name in ("dataset", "dataset_name", "train_file", "train_files", "data_path")
    },
    **{
        name: "reward=package.module:function"
        for name in ("reward_fn", "reward_func", "reward_funcs", "reward_function")
    },
    **{
        name: "run_name: files go to outputs/train/<run_name>" for name in ("output_dir", "out_dir")
    },
    "max_prompt_length": "engine.max_sequence_length, of prompt and answer together,",
    "eval_steps": "trainer.eval_interval",
    "report_to": "logger=wandb",
    "resume_from_checkpoint": "resume=auto",
}
_BY_SYSTEM = {"TRL": _TRL, "verl": _VERL, "Megatron-LM": _MEGATRON, "vLLM": _VLLM, "": _COMMON}


def hint_for(key: str) -> str | None:
    """Return a text with our name for `key` of another system, or None if no system has it.

    Leading sections are ignored, as in "algorithm.num_generations" and
    "actor_rollout_ref.actor.clip_ratio".
    """
    names = key.removeprefix("actor_rollout_ref.").split(".")
    for start in range(len(names)):
        name = ".".join(names[start:])
        for system, hints in _BY_SYSTEM.items():
            if name in hints:
                return f"{name}{f' ({system})' if system else ''} is {hints[name]} here"
    return None
