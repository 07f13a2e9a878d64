"""One example of every message and of every part of a message."""

from __future__ import annotations

import numpy as np

from rollout import SamplingParams
from rollout.control.commands import COMMANDS, Resume, SetGenerationEpoch, Suspend
from rollout.coordinator.protocol import messages as wire
from rollout.coordinator.protocol.packed import pack_params
from rollout.requests.token_runs import TokenRun, TokenRuns, TopNRun
from rollout.weights import source as weights_source
from rollout.wire import Message

NO_IDS = np.zeros(0, np.int32)
TOP_N = TopNRun(counts=NO_IDS, token_ids=NO_IDS, log_probs=NO_IDS.astype(np.float32))
RUN = TokenRun(
    offset=0,
    entry_version=0,
    token_ids=NO_IDS,
    policy_versions=NO_IDS,
    context_kv_version_min=NO_IDS,
    context_kv_version_mean=NO_IDS.astype(np.float64),
)
RUNS = TokenRuns(
    **dict.fromkeys(("request_ids", "attempts", "offsets"), NO_IDS.astype(np.int64)),
    **dict.fromkeys(("counts", "entry_versions", "token_ids", "policy_versions"), NO_IDS),
    context_kv_version_min=NO_IDS,
    context_kv_version_mean=NO_IDS.astype(np.float64),
    **dict.fromkeys(("has_log_probs", "has_ranks", "has_top_n"), NO_IDS.astype(np.uint8)),
    log_probs=NO_IDS.astype(np.float32),
    ranks=NO_IDS,
)
SAMPLE = wire.Sample(request_id=1, sampling_params=pack_params(SamplingParams()))
ERROR = wire.WireError(type_name="ConfigError", message="no")
TENSOR = weights_source.TensorEntry(dtype="float32", shape=(2, 3), offset=0, num_bytes=24)
TERMS = weights_source.LoraTerms(
    rank=2, alpha=4.0, use_rslora=False, ranks={"q": 3}, alphas={"q": 1.0}
)
SOURCE = weights_source.WeightsSource(
    kind="shm", address="w", manifest=b"", checksum="c", lora=TERMS
)
STATUS = wire.EngineStatus(
    state="running", num_steps=1, num_waiting=0, num_running=1, weights_version=0
)
SECONDS = {"lease_s": 2.0, "heartbeat_s": 0.5}
EXAMPLES = [
    TOP_N,
    RUN,
    RUNS,
    SAMPLE,
    ERROR,
    TENSOR,
    TERMS,
    SOURCE,
    STATUS,
    wire.Attempt(request_id=1),
    wire.Connect(client_id=bytes(16)),
    wire.ConnectAck(
        coordinator_id=bytes(16),
        state="",
        data_parallel_size=2,
        weights_version=0,
        answer_grace_s=1.0,
        **SECONDS,
    ),
    wire.Register(
        engine_id=bytes(16),
        state="running",
        weights_version=0,
        weights_checksum="",
        block_size_tokens=16,
        max_requests=4,
    ),
    wire.RegisterAck(
        coordinator_id=bytes(16),
        state="paused",
        report_interval_tokens=8,
        weights_version=1,
        **SECONDS,
    ),
    wire.SubmitRequest(samples=(SAMPLE,), prompt_tokens=NO_IDS),
    wire.AssignRequest(samples=(SAMPLE,), prompt_tokens=NO_IDS),
    wire.EngineReplyPartial(request_id=1, tokens=RUN),
    wire.EngineReply(request_id=1, record=b"r", error=ERROR, is_failed=True),
    wire.ReplyAck(attempts=()),
    wire.AbortRequest(attempts=()),
    Suspend(command_id=1, mode="offload"),
    Resume(only="weights"),
    SetGenerationEpoch(version=1),
    *(command() for command in COMMANDS if command not in (Suspend, Resume, SetGenerationEpoch)),
    wire.Ack(command_id=1),
    wire.Nack(command_id=1, error=ERROR),
    wire.Heartbeat(sequence=1, status=STATUS),
    wire.Disconnect(),
    wire.Credit(num_granted=5),
    wire.Progress(runs=RUNS),
    wire.UpdateWeights(command_id=1, source=SOURCE),
    wire.Prepare(command_id=1, version=1, source=SOURCE),
    wire.Commit(command_id=1, version=1),
    wire.Rollback(command_id=1),
]
MESSAGES = [example for example in EXAMPLES if isinstance(example, Message)]
