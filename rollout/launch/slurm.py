"""SlurmLauncher: starts each engine as a Slurm job. No other module imports submitit.

Users, and `rollout train` with `launcher=slurm`, make a SlurmLauncher and give it to AsyncLLM. It
writes the engines' arguments and submitit's logs to a private folder.
"""

from __future__ import annotations

import logging
import pickle
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.child_process import pickled
from rollout.errors import ConfigError, decode_error
from rollout.launch.launcher import EngineJob, run_to_end, summary_of
from rollout.launch.private_files import PrivateFolder

_logger = logging.getLogger(__name__)
_POLL_S = 0.5  # between two checks of a job and of the file that marks its start


class SlurmLauncher:
    """Submits one Slurm job per engine. The coordinator stays with the caller, which may be a job
    itself.

    A job that ends with an error is submitted again, `max_engine_restarts` times. The engines'
    nodes need the same packages, the model's files and `folder`. Jobs are cancelled when the fleet
    ends. If the caller is killed, the jobs end once their coordinator is gone."""

    def __init__(
        self,
        *,
        folder: str | Path,
        cluster: str | None = "slurm",
        host: str | None = None,
        **parameters: Any,
    ) -> None:
        """Make the folder and submitit's executor.

        folder: folder on a file system that all nodes share, for logs and for the engines'
            arguments and keys. It is made for this user alone.
        cluster: "slurm", or "local" for processes on this machine.
        host: host to which engines connect; None takes this node's name.
        parameters: parameters of submitit's executors, such as slurm_partition, timeout_min,
            cpus_per_task and gpus_per_node.

        Raises ConfigError if submitit is not installed or refuses the parameters, and for a folder
        that others can write."""
        self.host = host or socket.gethostname()
        self._num_cpus = parameters.get("cpus_per_task")
        self._arguments_files: list[str] = []
        try:
            import submitit
        except ImportError as error:
            raise ConfigError(
                "SlurmLauncher needs submitit: pip install 'submitit>=1.5' (extra 'slurm'); "
                f"{error}"
            ) from error
        self._folder = PrivateFolder(folder)
        try:
            self._executor = submitit.AutoExecutor(folder=self._folder.path / "%j", cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (OSError, RuntimeError, NameError, TypeError) as error:
            raise ConfigError(
                f"cluster={cluster!r} cannot be used with {parameters} in {folder}: {error}"
            ) from error

    def num_threads(self, num_engines: int) -> int | None:
        return self._num_cpus

    def launch(self, job: EngineJob, num_engines: int) -> list[SlurmEngine]:
        """Submit the jobs. See Launcher. Raises ConfigError if the arguments cannot be pickled or
        written."""
        arguments = pickled(dict(job.arguments), "the model, its tokenizer or its config")
        file = self._folder.write("arguments", arguments)
        self._arguments_files.append(file)
        names = [f"engine {number}" for number in range(num_engines)]
        return [SlurmEngine(name, self._executor, self._folder.path, file, job) for name in names]

    def close(self) -> None:
        """Remove the files with the engines' arguments. Logs stay."""
        while self._arguments_files:
            self._folder.remove(self._arguments_files.pop())


class SlurmEngine:
    """The successive jobs of one engine, and the thread that submits them. See LaunchedEngine."""

    def __init__(self, name: str, executor: Any, folder: Path, file: str, job: EngineJob) -> None:
        """Start the thread. `file` names the file in `folder` with the engine's arguments."""
        self.name, self._executor, self._folder, self._file = name, executor, folder, file
        self._module, self._address = job.module, job.address
        self._max_restarts, self._start_timeout_s = job.max_restarts, job.start_timeout_s
        self._on_end = job.on_end
        self.started: Future[None] = Future()
        self._is_ending, self._lock = threading.Event(), threading.Lock()
        self._is_cancelled = False
        self._job: Any = None  # submitit's job
        self._thread = threading.Thread(target=self._watch, name=f"{name} watch", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return "not submitted" if self._job is None else f"job {self._job.job_id}"

    def end_restarts(self) -> None:
        self._is_ending.set()

    def terminate(self) -> None:
        """Cancel the job. Slurm sends it SIGTERM, and then SIGKILL."""
        with self._lock:
            self._is_cancelled = True
            self._is_ending.set()
            if self._job is not None:
                self._job.cancel()

    kill = terminate

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    # ---- the watching thread

    def _watch(self) -> None:
        try:
            reason = self._run_all()
        except Exception as error:  # `started` raises it
            self.terminate()
            if not self.started.done():
                self.started.set_exception(error)
                return
            reason = summary_of(error)
        if reason is not None and not self._is_ending.is_set():
            _logger.error("%s is not submitted again: %s", self.name, reason)
        self._on_end(self.name, reason)

    def _run_all(self) -> str | None:
        """Run jobs until one ends in order or no restart is left. Returns the reason why the last
        job ended, or None after an orderly stop."""
        for num_restarts in range(self._max_restarts + 1):
            reason = self._run()
            if reason is None or self._is_ending.is_set():
                break
            if num_restarts < self._max_restarts:
                _logger.warning("%s (%s) is submitted again: %s", self.name, self.place, reason)
        return reason

    def _run(self) -> str | None:
        """Submit a job and wait for its end. Returns the reason why the job ended, or None after an
        orderly stop. Raises the error that makes the engine's first start fail."""
        registered = self._folder / f"registered-{uuid.uuid4().hex}"
        address, submitted_at = self._address.result(), time.monotonic()
        with self._lock:
            if self._is_cancelled:
                return "cancelled"
            self._job = self._executor.submit(
                run_job, self._module, address, str(self._folder), self._file, str(registered)
            )
        try:
            while not (is_over := self._job.done()) or not self.started.done():
                if registered.exists():
                    self._set_started()
                elif is_over:
                    raise _fault_of(self._job, self.name)
                elif time.monotonic() - submitted_at > self._start_timeout_s:
                    who = f"{self.name} ({self.place})"
                    raise ConfigError(f"{who} did not start within {self._start_timeout_s:g} s")
                time.sleep(_POLL_S)
        finally:
            with suppress(OSError):
                registered.unlink()
        return _end_of(self._job)

    def _set_started(self) -> None:
        if not self.started.done():
            self.started.set_result(None)


def run_job(
    module: str, address: str, folder: str, file: str, registered: str
) -> dict[str, Any] | None:
    """Run one engine inside its Slurm job until the engine ends. `file` names the file in `folder`
    with the engine's arguments. `registered` is the path of a file that is created once the engine
    is registered. Returns None after an orderly stop, else the encoded error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    return run_to_end(
        module,
        address,
        lambda: pickle.loads(PrivateFolder(folder).read(file)),
        Path(registered).touch,
    )


def _end_of(job: Any) -> str | None:
    """Return the reason why a job ended, or None after an orderly stop."""
    try:
        fault = job.result()
    except Exception as error:  # submitit raises several kinds for a job that Slurm ended
        return summary_of(error)
    return None if fault is None else summary_of(decode_error(fault))


def _fault_of(job: Any, name: str) -> Exception:
    """Return the error that kept an engine from starting."""
    try:
        fault = job.result()
    except Exception as error:
        return ConfigError(f"{name} (job {job.job_id}) died while it started: {summary_of(error)}")
    if fault is None:
        return ConfigError(f"{name} (job {job.job_id}) ended before it was registered")
    return decode_error(fault)
