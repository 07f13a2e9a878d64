"""Runs the kits of SGLang's tests that ask a server by HTTP, over that of TEST_API_BASE_URL."""

from __future__ import annotations

import os
import random
import unittest
from unittest import mock

import requests
from kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin
from kits.basic_api_contract_kit import BasicAPIContractMixin
from kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from kits.matched_stop_kit import MatchedStopMixin
from kits.pause_generation_kit import PauseResumeInPlaceMixin
from kits.radix_cache_server_kit import run_radix_attention_test

NUM_TOKENS = 8192


class _Process:
    """The server's process, as the kits look at it."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def poll(self) -> int | None:
        """None while the server answers."""
        return None if requests.get(f"{self.base_url}/health", timeout=60).ok else 1


class ServerCase(unittest.TestCase):
    base_url = os.environ["TEST_API_BASE_URL"].removesuffix("/v1")
    process = _Process(base_url)
    model = served_model_name = "default"


class TestAPIContract(BasicAPIContractMixin, ServerCase): ...


class TestDecodeCorrectness(BasicDecodeCorrectnessMixin, ServerCase): ...


class TestSchedulerStress(BasicSchedulerStressMixin, ServerCase): ...


class TestMatchedStop(MatchedStopMixin, ServerCase): ...


class TestPause(PauseResumeInPlaceMixin, ServerCase):
    # Such a tiny model has made 512 tokens before the pause.
    pause_max_new_tokens = 4000


class TestAbortAll(AbortAllMixin, ServerCase): ...


@unittest.skip("option: requests of SGLang's server have limits of their time by variables")
class TestTimeLimits(WaitingTimeoutMixin, RunningTimeoutTwoWaveMixin, ServerCase): ...


class TestRadixCache(ServerCase):
    def test_radix_attention(self) -> None:
        draw = random.Random(0).randint

        def token_or_length(lowest: int, highest: int) -> int:
            return draw(lowest, min(highest, NUM_TOKENS - 1))

        # The kit draws ids of a vocabulary of 32,000.
        with mock.patch.object(random, "randint", token_or_length):
            run_radix_attention_test(self.base_url)
