"""LocalLauncher: starts each engine as a child process.

Used by `rollout.apis.async_llm` by default, and by `rollout.launch.torchrun` in the ranks that run
engines.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping

from rollout.backends.devices import environment_of
from rollout.backends.limits import num_usable_cpus
from rollout.child_process import ChildProcess, end_of, pickled
from rollout.launch.launcher import EngineJob
from rollout.launch.supervised_process import SupervisedProcess


class LocalLauncher:
    """Starts engines as child processes, which share the processors and end with this process. An
    engine with GPUs sees only its own GPUs. An engine that fails after it has registered is
    restarted, at most `max_restarts` times in a row."""

    host: None = None

    def num_threads(self, num_engines: int) -> int:
        return max(1, num_usable_cpus() // max(1, num_engines))

    def launch(self, job: EngineJob, num_engines: int) -> list[SupervisedProcess]:
        """Start the processes. See Launcher. If an engine fails to start, the `started` future of
        its SupervisedProcess raises the error."""
        arguments = pickled(dict(job.arguments), "the model, its tokenizer or its config")
        address = job.address  # `begin` must not hold the job, which has the trainer's model

        def begin(child: ChildProcess) -> None:
            child.send(pickle.dumps(address.result()), arguments)

        # All at once: most of a start is imports, which need no address.
        engines: list[SupervisedProcess] = []
        try:
            for number in range(num_engines):
                environment = environment_of(number, job.num_gpus)
                engines.append(_process(f"engine {number}", job, begin, environment))
        except BaseException:  # also after Ctrl-C: no other object knows the processes
            for engine in engines:
                engine.end_restarts()
                engine.kill()
            raise
        return engines

    def close(self) -> None:
        """No-op, because ended engines leave no files or resources."""


def _process(
    name: str,
    job: EngineJob,
    begin: Callable[[ChildProcess], object],
    environment: Mapping[str, str],
) -> SupervisedProcess:
    on_end = job.on_end
    return SupervisedProcess(
        name,
        job.module,
        begin,
        start_timeout_s=job.start_timeout_s,
        max_restarts=job.max_restarts,
        environment=environment,
        on_end=lambda exit_code: on_end(name, end_of(exit_code) if exit_code else None),
    )
