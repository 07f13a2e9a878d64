"""What a job does about Ctrl-C."""

import signal

import pytest

from trainer_hooks.jobs import stop_on_interrupt


def test_a_second_ctrl_c_acts_as_ever() -> None:
    with stop_on_interrupt() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
