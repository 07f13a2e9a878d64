"""run_engine: an engine that dials a coordinator, from its start to its end."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.config import DEFAULT_MAX_REQUESTS, InferenceConfig
from rollout.coordinator.dealer import CurveKeys
from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.engine_side.serve import serve
from rollout.coordinator.link import Link
from rollout.coordinator.publisher import fetch_weights
from rollout.engine.build import DynamicInferenceEngine
from rollout.text import Tokenizer, tokenizer_of

REGISTER_S = 60.0


def run_engine(
    address: int | str,
    model: str | Path | Any,
    tokenizer: Tokenizer | Any | None = None,
    inference_config: InferenceConfig | None = None,
    weights_version: int = 0,
    *,
    curve: CurveKeys | None = None,
    register_timeout_s: float = REGISTER_S,
    on_registered: Callable[[], object] = lambda: None,
) -> None:
    """Serve the coordinator at `address` with one engine, until its SHUTDOWN. Blocks.

    `address`: of an AsyncLLM, or a port on loopback. `model` and `tokenizer` as for LLM. The engine
    may come at any time: if the fleet has gone on to later weights than `weights_version`, it
    fetches those before it gets work, from the machine's shared memory. Call it in a process of its
    own: it takes all of the thread it is called in, and `on_registered` once the fleet has it.

    Raises ConfigError and ModelError, the coordinator's reason if it refuses the engine, and
    CoordinatorLostError if nobody answers within `register_timeout_s`.
    """
    config = inference_config or InferenceConfig()
    engine = DynamicInferenceEngine.from_model(
        model, config, tokenizer_of(model, tokenizer), weights_version
    )
    agent = EngineAgent(
        engine,
        engine_id=uuid.uuid4().bytes,
        block_size_tokens=config.block_size_tokens,
        max_requests=config.max_requests or DEFAULT_MAX_REQUESTS,
        fetch=fetch_weights,
    )
    with Link(address, handshake=agent.registration, status=agent.status, curve=curve) as link:
        link.wait_registered(register_timeout_s)
        on_registered()
        serve(agent, link)
