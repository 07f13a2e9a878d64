"""join_as_lead, join_as_follower: processes of a trainer become the ranks of one engine.

They meet in the trainer's group `pg_collection.tp`, once. Orders then go over sockets of the
machine, which tell that a rank is gone with all that it forked, and sums over memory or a
communicator of the engine's own: after a failure neither could be mended within the trainer's
group, which must live.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from rollout.backends.group_bytes import all_gather_bytes
from rollout.backends.process_groups import RankRendezvous
from rollout.backends.select import device_of
from rollout.config import InferenceConfig
from rollout.errors import ConfigError, LockstepError, RolloutError, decode_error, encode_error
from rollout.parallel.channel import FollowerChannel, LeadChannel, raise_first
from rollout.parallel.collectives import Collectives
from rollout.parallel.rank_sockets import RankListener, this_machine, wire_to_lead
from rollout.tensor_parallel.follower import answer_next, prepared_worker
from rollout.tensor_parallel.spmd_executor import SpmdExecutor
from rollout.tensor_parallel.spmd_follower import SpmdFollower
from rollout.tensor_parallel.start import prepare_ranks
from rollout.worker.loading import EngineSizes, LoadedModel, load_model, runner_of

Model = str | Path | nn.Module | Any
# What ranks may differ in: rank 0 alone writes metrics, and each has its own object of the group.
_OWN_FIELDS = ("metrics_writer", "logging_step_interval", "pg_collection", "num_threads")


def num_spmd_ranks(config: InferenceConfig) -> int:
    """The number of a trainer's processes that run an engine of `config` together."""
    return 1 if config.pg_collection is None else int(config.pg_collection.tp.size())


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others. `settings`: by name, those that all must have alike. `place`
    and `address`: of rank 0, where sums meet, and where it is dialled. `error`: what keeps the rank
    from taking part, encoded, in place of all else.
    """

    machine: str = ""
    pid: int = 0
    settings: dict[str, str] = {}
    error: dict[str, Any] | None = None
    place: str = ""
    address: bytes = b""


def join_as_lead(
    model: Model, config: InferenceConfig, weights_version: int
) -> tuple[LoadedModel, EngineSizes, SpmdExecutor]:
    """Meet the other ranks of `config.pg_collection.tp` and load the model on all of them.

    Raises ConfigError and ModelError, of whatever rank, and LockstepError if a rank is lost.
    """
    group, config = config.pg_collection.tp, _config_of_rank(config)
    size, start_s = config.tensor_parallel_size, config.tensor_parallel_start_timeout_s
    with ExitStack() as stack:

        def begin() -> tuple[RankListener, RankRendezvous]:
            listener = RankListener()
            stack.callback(listener.close)
            meeting = RankRendezvous(device_of(config), size)
            stack.callback(meeting.close)
            return listener, meeting

        (listener, meeting), facts = _met(group, config, weights_version, begin)
        names = [f"rank {rank} (process {facts[rank].pid})" for rank in range(1, size)]
        wires = dict(zip(names, listener.wires(size, start_s), strict=True))
        channel = LeadChannel(wires, timeout_s=config.tensor_parallel_timeout_s)
        with _ended_by_errors(channel):
            channel.send("meet")
            collectives = meeting.collectives(
                0, timeout_s=config.tensor_parallel_timeout_s, check=channel.check
            )
            # The place where they meet is there until all have come, whatever fails then.
            raise_first(channel.answers(timeout_s=start_s))
            channel.send("load")
            loaded = load_model(model, config, weights_version, collectives)
            raise_first(channel.answers(timeout_s=start_s))
            sizes = prepare_ranks(loaded, channel)
            runner, kv = runner_of(loaded, sizes)
            raise_first(channel.answers(timeout_s=start_s))
        executor = SpmdExecutor(
            *(runner, kv, loaded.weights),
            collectives=collectives,
            channel=channel,
            start_timeout_s=start_s,
        )
    return loaded, sizes, executor


def join_as_follower(model: Model, config: InferenceConfig, weights_version: int) -> SpmdFollower:
    """Be another rank of the group than rank 0. Raises as `join_as_lead` does."""
    group, config = config.pg_collection.tp, _config_of_rank(config)
    rank, start_s = group.rank(), config.tensor_parallel_start_timeout_s
    _, (lead, *_) = _met(group, config, weights_version, lambda: None)
    wire = wire_to_lead(lead.address, rank, start_s)
    channel = FollowerChannel(rank, wire)
    try:
        meeting = RankRendezvous(device_of(config), config.tensor_parallel_size, lead.place)
        collectives: Collectives = answer_next(
            channel,
            lambda: meeting.collectives(
                rank, timeout_s=config.tensor_parallel_timeout_s, check=channel.check
            ),
            tells=False,
            timeout_s=start_s,
        )
        loaded: LoadedModel = answer_next(
            channel,
            lambda: load_model(model, config, weights_version, collectives),
            tells=False,
            timeout_s=start_s,
        )
        worker = prepared_worker(channel, loaded, start_s)
    except BaseException as error:
        channel.leave(f"it could not start: {error!r}")
        raise
    return SpmdFollower(
        *(rank, worker, collectives, channel),
        timeout_s=config.tensor_parallel_timeout_s,
        start_timeout_s=start_s,
    )


def _config_of_rank(config: InferenceConfig) -> InferenceConfig:
    return config.replace(tensor_parallel_size=num_spmd_ranks(config), pg_collection=None)


def _met(
    group: Any, config: InferenceConfig, weights_version: int, begin: Callable[[], Any]
) -> tuple[Any, Sequence[_Facts]]:
    """Begin, and learn what all ranks have said. An error of one rank is raised on all of them."""
    begun: Any = None
    try:
        begun = begin()
        listener, meeting = begun or (None, None)
        own = _Facts(
            machine=this_machine(),
            pid=os.getpid(),
            settings=_settings(config, weights_version),
            place="" if meeting is None else meeting.address,
            address=b"" if listener is None else listener.address,
        )
    except (RolloutError, OSError) as error:
        own = _Facts(error=encode_error(error))
    try:
        gathered = all_gather_bytes(group, msgspec.msgpack.encode(own))
    except (RuntimeError, ValueError) as error:  # whatever the group's library has to say
        raise LockstepError(f"the ranks of pg_collection.tp did not meet: {error}") from error
    facts = [msgspec.msgpack.decode(each, type=_Facts) for each in gathered]
    for rank, each in enumerate(facts):
        if each.error is not None:
            raise decode_error({**each.error, "message": f"rank {rank}: {each.error['message']}"})
    _check_alike(facts)
    return begun, facts


def _settings(config: InferenceConfig, weights_version: int) -> dict[str, str]:
    shared = [f.name for f in dataclasses.fields(config) if f.name not in _OWN_FIELDS]
    values = {name: repr(getattr(config, name)) for name in shared}
    return {**values, "weights_version": repr(weights_version)}


def _check_alike(facts: Sequence[_Facts]) -> None:
    """Raise ConfigError, on all ranks, if an engine of these ranks cannot be."""
    first = facts[0]
    for rank, each in enumerate(facts):
        if each.machine != first.machine:
            raise ConfigError(
                f"ranks 0 and {rank} of pg_collection.tp are on two machines, {first.machine} and "
                f"{each.machine}; the ranks of an engine share one: make smaller groups"
            )
        for name, value in first.settings.items():
            if each.settings[name] != value:
                raise ConfigError(
                    f"{name}={value} on rank 0 of pg_collection.tp, and {each.settings[name]} on "
                    f"rank {rank}; give all ranks the same"
                )


@contextmanager
def _ended_by_errors(channel: LeadChannel) -> Iterator[None]:
    """Have the other ranks raise what is raised here, instead of waiting."""
    try:
        yield
    except BaseException as error:
        channel.end(error)
        raise
