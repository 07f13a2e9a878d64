"""Every command in every state of a live coordinator is done, or refused with a reason."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from rollout import SamplingParams
from rollout.control.commands import engine_state_of
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.errors import RolloutError, WeightUpdateError
from rollout.weights.transports.shared import SharedTransport
from tests.coordinator.client_commands import (
    COMMANDS,
    FINAL,
    CommandSender,
    Tally,
    publish,
    publish_incomplete,
)
from tests.coordinator.live_fleet import LiveFleet
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, prompt_of
from tests.waiting import until_async

DEADLINE_S = 20.0
NUM_PAIRS = 10_000 if IS_LONG else 60
NUM_ENDS = 50 if IS_LONG else 3
NUM_SCHEDULES = 400 if IS_LONG else 25
RUNNING, PAUSED, SUSPENDED, STOPPING = CoordinatorState
PATHS = {
    RUNNING: (),
    PAUSED: ("pause",),
    SUSPENDED: ("pause", "suspend"),
    STOPPING: ("pause", "stop"),
}
QUIET = {"stats", "epoch", "increment", "update", "update in flight"}
SUSPENDS = {name for name in COMMANDS if name.startswith("suspend")}
RESUMES = {name for name in COMMANDS if name.startswith("resume")}
GOOD_SUSPENDS = SUSPENDS - {"suspend badly", "suspend in no mode", "suspend discarding kept"}
# The commands that are done in each state; all others must be refused. A command whose target state
# is reached already is done without a look at its arguments, except for a suspend.
DONE = {
    RUNNING: {"pause", "unpause", "update in flight", "stats", "shutdown"},
    PAUSED: {"pause", "unpause", *RESUMES, *GOOD_SUSPENDS, *QUIET, *FINAL},
    SUSPENDED: {*GOOD_SUSPENDS, *(RESUMES - {"resume badly"}), *QUIET, *FINAL},
    STOPPING: {"stats", *FINAL},
}


@asynccontextmanager
async def live(num_clients: int = 1) -> AsyncIterator[tuple[LiveFleet, list[CommandSender]]]:
    with LiveFleet() as fleet:
        async with AsyncExitStack() as stack:
            whole, part = SharedTransport(), SharedTransport()
            stack.callback(whole.close)
            stack.callback(part.close)
            sources = publish(whole), publish_incomplete(part)
            clients = [InferenceClient(fleet.address) for _ in range(num_clients)]
            senders = [CommandSender(await stack.enter_async_context(c), *sources) for c in clients]
            yield fleet, senders


def run(work: Callable[[], Awaitable[None]], bound_s: float) -> None:
    asyncio.run(asyncio.wait_for(work(), bound_s))


async def bring_to(state: CoordinatorState, fleet: LiveFleet, sender: CommandSender) -> None:
    """Bring the fleet into `state`, even if its engines are in different states."""
    for name in ("resume", "pause", "resume", "unpause", *PATHS[state]):
        if name == "unpause" and fleet.coordinator.state is PAUSED:
            await updates(sender)  # weights may have been discarded
        # Commands that are not needed are refused.
        with suppress(RolloutError):
            await sender.send(name, DEADLINE_S)
    await comes_to(state, fleet)


async def updates(sender: CommandSender) -> None:
    """Wait until removed engines have registered again: without engines an update is refused."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            await sender.send("update", DEADLINE_S)
            return
        except WeightUpdateError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.01)


async def comes_to(state: CoordinatorState, fleet: LiveFleet) -> None:
    """Wait until all engines, including removed ones, are in the coordinator's state."""
    await until_async(
        lambda: fleet.engine_states() == {engine_state_of(state.name)}, f"engines {state}"
    )
    assert fleet.coordinator.state is state


def assert_is(state: CoordinatorState, fleet: LiveFleet) -> None:
    assert fleet.coordinator.state is state
    assert fleet.engine_states() == {engine_state_of(state.name)}


async def serves(fleet: LiveFleet, sender: CommandSender) -> None:
    """A request of four tokens completes, on each engine."""
    await bring_to(RUNNING, fleet, sender)
    params = SamplingParams(num_tokens_to_generate=4, temperature=0.0)
    futures = [sender.client.add_request(prompt_of(5), params) for _ in fleet.engines]
    records = await asyncio.wait_for(asyncio.gather(*futures), DEADLINE_S)
    assert {len(record.merge().generated_tokens) for record in records} == {4}


@pytest.mark.parametrize("state", [RUNNING, PAUSED, SUSPENDED])
def test_each_command_is_done_or_refused_as_the_table_says(state: CoordinatorState) -> None:
    tally = Tally()

    async def work() -> None:
        async with live() as (fleet, (sender,)):
            for name in [name for name in COMMANDS if name not in FINAL]:
                await bring_to(state, fleet, sender)
                for _ in range(2):
                    kind = await tally.send(sender, name, DEADLINE_S)
                    assert (kind == "done") == (name in DONE[state]), (name, kind)
                    if kind != "done":
                        assert_is(state, fleet)
            await serves(fleet, sender)

    run(work, 60)
    print(f"\nsingly, {state.name}: {tally}")


@pytest.mark.parametrize("final", FINAL)
@pytest.mark.parametrize("state", [RUNNING, PAUSED, SUSPENDED])
def test_stop_and_shutdown_are_done_or_refused_by_the_legality_table(
    state: CoordinatorState, final: str
) -> None:
    """After a stop each command is answered still, and so is a request: by its failure."""
    tally = Tally()

    async def work() -> None:
        async with live(2) as (fleet, (sender, other)):
            await bring_to(state, fleet, sender)
            waiting = other.client.add_request(
                prompt_of(5), SamplingParams(num_tokens_to_generate=400)
            )
            kind = await tally.send(sender, final, DEADLINE_S)
            assert (kind == "done") == (final in DONE[state])
            if kind != "done":
                waiting.cancel()
                await serves(fleet, sender)
                return
            with pytest.raises(RolloutError):
                await asyncio.wait_for(waiting, DEADLINE_S)
            for name in [*COMMANDS, "stop", "shutdown", "pause"]:
                kind = await tally.send(other, name, DEADLINE_S)
                assert (kind == "done") <= (name in DONE[STOPPING]), (name, kind)
            with pytest.raises(RolloutError):
                other.client.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=4))

    run(work, 60)
    print(f"\n{final} in {state.name}: {tally}")


@pytest.mark.parametrize("state", [RUNNING, PAUSED, SUSPENDED])
def test_commands_sent_at_once_are_all_answered_in_order(state: CoordinatorState) -> None:
    """Every pair, or a sample of them, by turns from one client and from two."""
    tally = Tally()
    names = [name for name in COMMANDS if name not in FINAL]
    pairs = list(itertools.product(names, names))
    random.Random(run_seed() + state.value).shuffle(pairs)

    async def work() -> None:
        async with live(2) as (fleet, senders):
            for number, pair in enumerate(pairs[:NUM_PAIRS]):
                await bring_to(state, fleet, senders[0])
                second = senders[number % 2]
                futures = [
                    (sender.send(name, DEADLINE_S), name)
                    for sender, name in zip((senders[0], second), pair, strict=True)
                ]
                ended = [await tally.answer(f, name, DEADLINE_S) for f, name in futures]
                assert "deadline" not in ended, pair
                assert_is(fleet.coordinator.state, fleet)
            await serves(fleet, senders[1])

    run(work, 600)
    print(f"\npairs, {state.name}: {tally}")


def test_commands_to_engines_that_hold_their_answers_back_end_by_their_deadlines() -> None:
    """Random commands of two clients, long and short deadlines; engines answer late or too late.
    Afterwards the fleet can be brought to run again, and serves."""
    tally, chance = Tally(), random.Random(run_seed() + 1)
    names = [name for name in COMMANDS if name not in FINAL]

    async def one_schedule(fleet: LiveFleet, senders: list[CommandSender]) -> None:
        fleet.hold()
        asyncio.get_running_loop().call_later(chance.choice((0.0, 0.02, 0.2)), fleet.free)
        answers = []
        for _ in range(chance.randint(1, 6)):
            sender, name = chance.choice(senders), chance.choice(names)
            deadline_s = chance.choice((0.01, 0.1, DEADLINE_S))
            answers.append(tally.answer(sender.send(name, deadline_s), name, deadline_s))
        await asyncio.gather(*answers)
        fleet.free()

    async def work() -> None:
        async with live(2) as (fleet, senders):
            for number in range(NUM_SCHEDULES):
                await bring_to([RUNNING, PAUSED, SUSPENDED][number % 3], fleet, senders[0])
                await one_schedule(fleet, senders)
                name = chance.choice(sorted({"pause", "unpause", *SUSPENDS, *RESUMES}))
                if await tally.send(senders[0], name, DEADLINE_S) == "done":
                    await comes_to(fleet.coordinator.state, fleet)
                await serves(fleet, senders[number % 2])

    run(work, 600)
    assert tally.num_done, "the last schedules leave a fleet that does what it is asked"
    assert tally.num_commands > NUM_SCHEDULES
    print(f"\nheld back: {tally}")


@pytest.mark.parametrize("final", FINAL)
def test_stop_and_shutdown_are_answered_among_held_commands(final: str) -> None:
    tally, chance = Tally(), random.Random(run_seed() + 2)

    async def work() -> None:
        for _ in range(NUM_ENDS):
            async with live(2) as (fleet, senders):
                await bring_to(chance.choice((PAUSED, SUSPENDED)), fleet, senders[0])
                names = chance.sample(sorted(COMMANDS), 6)
                names[chance.randrange(6)] = final
                fleet.hold()
                asyncio.get_running_loop().call_later(chance.choice((0.0, 0.1)), fleet.free)
                await asyncio.gather(
                    *(tally.send(chance.choice(senders), name, 2.0) for name in names)
                )
                fleet.free()
                answer = await tally.send(senders[0], "shutdown", DEADLINE_S)
                assert answer in {"done", "the end"}

    run(work, 600)
    print(f"\n{final} held back: {tally}")
