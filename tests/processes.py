"""Processes of a test's own, forked from one that has imported what they run and done nothing else.

As clean as spawned ones, but each is there at once.
"""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["rollout.apis.engine_process", "benchmarks.coordinator_fleet"])
