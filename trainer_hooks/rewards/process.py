"""The program of a child process that computes rewards.

`trainer_hooks.rewards.processes` starts it as python -m trainer_hooks.rewards.process. The program
reads calls from a pipe and writes results to the pipe.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from rollout.child_process import run_child
from rollout.errors import ConfigError
from trainer_hooks.rewards.calling import RewardFunction, rewards_of
from trainer_hooks.rewards.failures import RemoteTraceback, RewardFailed


def serve(pipe: Connection, reward_fn: RewardFunction) -> None:
    """Call `reward_fn` with each pair of arguments from the pipe until the parent closes the pipe.

    A reply is a triple of the rewards, the error and the error's traceback. Missing parts are None.
    """
    pipe.send("ready")
    while True:
        try:
            args, named = pipe.recv()
        except EOFError:
            return
        error: Exception | None = None
        try:
            pipe.send((rewards_of(reward_fn, args, named), None, None))
        except ConfigError as fault:
            error, cause = ConfigError(str(fault)), RemoteTraceback.of(fault)
        except Exception as fault:  # the user's function may raise any error
            error = RewardFailed(f"{type(fault).__name__}: {fault}")
            cause = RemoteTraceback.of(fault)
        if error is not None:
            pipe.send((None, error, cause))


if __name__ == "__main__":
    run_child(serve)
