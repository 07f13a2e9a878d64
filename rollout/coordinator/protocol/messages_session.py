"""Who is there: handshakes, heartbeats, goodbyes. Times are durations: no clock is shared."""

from __future__ import annotations

from rollout.coordinator.protocol.field_codecs import WireData, wire_data
from rollout.coordinator.protocol.field_types import Count, Name, Seconds, Uuid, Version
from rollout.coordinator.protocol.headers import PROTOCOL_VERSION
from rollout.coordinator.protocol.messages_control import WeightsSource
from rollout.coordinator.protocol.messages_requests import Attempt


@wire_data
class Connect(WireData):
    """Client -> coordinator, first of all. `client_id` is a uuid; after a reconnect the same."""

    protocol_version: Count = PROTOCOL_VERSION
    client_id: Uuid
    name: Name = ""


@wire_data
class ConnectAck(WireData):
    """Coordinator -> client. A changed `coordinator_id` is another life of the coordinator.

    state: name of the coordinator's state. lease_s: a client unheard of for so long has vanished;
    heartbeat_s: how often it should send one.
    """

    protocol_version: Count = PROTOCOL_VERSION
    coordinator_id: Uuid
    state: Name
    data_parallel_size: Count
    weights_version: Version
    lease_s: Seconds
    heartbeat_s: Seconds


@wire_data
class RunningAttempt(WireData):
    """An attempt that an engine still holds, finished or not, and its generated tokens."""

    request_id: Count
    attempt: Count
    num_tokens: Count


@wire_data
class Register(WireData):
    """Engine -> coordinator, first of all and whenever its lease has run out.

    engine_id: a uuid, one for the life of the process. state: name of its state.
    prepared_command_id: the Prepare it has voted yes to and has no decision on; Commit or Rollback
    follows the RegisterAck.
    """

    protocol_version: Count = PROTOCOL_VERSION
    engine_id: Uuid
    state: Name
    weights_version: Version
    weights_checksum: Name
    block_size_tokens: Count
    max_requests: Count
    running: tuple[RunningAttempt, ...] = ()
    prepared_command_id: Count | None = None


@wire_data
class RegisterAck(WireData):
    """Coordinator -> engine: what to be. The engine aborts all attempts that `keep` does not name.

    rank: its place, small integers. state: the one to enter before it gets work.
    lease_s: stop stepping when the coordinator was not heard for so long. heartbeat_s: how often to
    send one. progress_deadline_s: a step count that stands still for so long, with work to do, is
    death. report_interval_tokens: most tokens of a request between two partial replies.
    weights: where to get `weights_version`, None if the engine serves it.
    """

    coordinator_id: Uuid
    rank: Count
    state: Name
    lease_s: Seconds
    heartbeat_s: Seconds
    progress_deadline_s: Seconds
    report_interval_tokens: Count
    weights_version: Version
    weights: WeightsSource | None = None
    keep: tuple[Attempt, ...] = ()


@wire_data
class EngineStatus(WireData):
    """An engine as it sends a heartbeat. `num_steps` is what progress is judged by."""

    state: Name
    num_steps: Count
    num_waiting: Count
    num_running: Count
    num_blocks_free: Count
    weights_version: Version


@wire_data
class Heartbeat(WireData):
    """Either way; the coordinator answers each with its `sequence` and no status.

    The answer renews the lease from when the one with this sequence was *sent*. `status`: engines
    only.
    """

    sequence: Count
    status: EngineStatus | None = None


@wire_data
class Disconnect(WireData):
    """Either way: the sender goes, and says why. is_fault: it failed, perhaps by what it ran:
    `suspects`, the attempts that were in the steps that failed.
    """

    reason: Name = ""
    is_fault: bool = False
    suspects: tuple[Attempt, ...] = ()
