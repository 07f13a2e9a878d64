"""What the plug-in uses of verl and Ray, with the signatures of verl 0.9.1, without either."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar


class TokenOutput(SimpleNamespace):
    def __init__(
        self,
        *,
        token_ids: list[int],
        log_probs: list[float] | None = None,
        routed_experts: Any = None,
        stop_reason: str | None = None,
        num_preempted: int | None = None,
        extra_fields: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            token_ids=token_ids,
            log_probs=log_probs,
            routed_experts=routed_experts,
            stop_reason=stop_reason,
            extra_fields=extra_fields or {},
        )


class RolloutMode(Enum):
    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


class RolloutReplica:
    pass


class RolloutReplicaRegistry:
    _registry: ClassVar[dict[str, Callable[[], type]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type]) -> None:
        cls._registry[name] = loader


class BaseRollout:
    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


@contextmanager
def fake_verl() -> Iterator[SimpleNamespace]:
    """Put the fakes in place of verl and Ray. Yields (registry, adapters, actors by name)."""
    actors: dict[str, Any] = {}
    adapters: dict[tuple[str, str], str] = {}
    contents: dict[str, dict[str, Any]] = {
        "ray": {"get_actor": actors.__getitem__},
        "verl": {},
        "verl.utils": {},
        "verl.utils.device": {
            "get_resource_name": lambda: "GPU",
            "get_visible_devices_keyword": lambda: "VISIBLE",
        },
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"BaseRollout": BaseRollout, "_ROLLOUT_REGISTRY": adapters},
        "verl.workers.rollout.replica": {
            "RolloutMode": RolloutMode,
            "RolloutReplica": RolloutReplica,
            "RolloutReplicaRegistry": RolloutReplicaRegistry,
            "TokenOutput": TokenOutput,
        },
    }

    def is_ours(name: str) -> bool:
        return name in contents or name.partition(".")[0] == "rollout_verl"

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
    try:
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            sys.modules[name] = module
        registry = RolloutReplicaRegistry._registry
        yield SimpleNamespace(registry=registry, adapters=adapters, actors=actors)
    finally:
        for name in [name for name in sys.modules if is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


# Every field of verl 0.9.1's RolloutConfig with its default; "" stands for a part of its own.
VERL_FIELDS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "rollout_config.json").read_text(encoding="utf-8")
)["fields"]


def rollout_config(**changes: Any) -> Any:
    """Return a RolloutConfig of verl 0.9.1 with the sizes of a tiny engine."""
    fields = {
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "seed": 0,
        "prompt_length": 30,
        "response_length": 450,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "engine_kwargs": {"rollout": {"buffer_size_gb": 0.02, "num_threads": 1}, "vllm": {}},
        "disaggregation": SimpleNamespace(enabled=False),
        "mtp": SimpleNamespace(enable=False, enable_rollout=False),
        "checkpoint_engine": SimpleNamespace(update_weights_bucket_megabytes=1),
    }
    return SimpleNamespace(**(VERL_FIELDS | fields | changes))
