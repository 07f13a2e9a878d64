"""A process that is one engine of a fleet: from Python `run_engine`, from a shell this package."""

from rollout.apis.engine_process.run import run_engine

__all__ = ["run_engine"]
