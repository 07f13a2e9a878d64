"""rollout.errors: the tree, and what is left of an error after a journey."""

from __future__ import annotations

import copy
import pickle

import msgpack
import pytest

from rollout import errors
from rollout.errors import (
    BlockOverflowError,
    ConfigError,
    ContextOverflowError,
    EventPayloadError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    ProtocolError,
    RemoteError,
    RequestAbortedError,
    RequestOverflowError,
    RolloutError,
    TokenLimitClamped,
    TokenOverflowError,
    decode_error,
    encode_error,
)

OVERFLOWS = [
    ContextOverflowError,
    RequestOverflowError,
    TokenOverflowError,
    BlockOverflowError,
    TokenLimitClamped,
    MaxSequenceLengthOverflowError,
]
PLAIN_ERRORS = [
    error_type
    for error_type in vars(errors).values()
    if isinstance(error_type, type)
    and issubclass(error_type, RolloutError)
    and not issubclass(error_type, (ContextOverflowError, RemoteError))
]


def travel(error: BaseException, *, is_transient: bool = False) -> RolloutError:
    """Return `error` as another process receives it."""
    encoded = encode_error(error, is_transient=is_transient)
    return decode_error(msgpack.unpackb(msgpack.packb(encoded)))


def test_every_error_is_drawn_in_the_tree():
    for error_type in [*PLAIN_ERRORS, *OVERFLOWS, RemoteError]:
        assert error_type.__name__ in errors.__doc__


@pytest.mark.parametrize("error_type", [ConfigError, InvalidRequestError, EventPayloadError])
def test_errors_about_values_are_value_errors(error_type):
    assert issubclass(error_type, ValueError)


@pytest.mark.parametrize("error_type", PLAIN_ERRORS)
def test_plain_error_survives_the_wire(error_type):
    error = travel(error_type("weights are late"))
    assert type(error) is error_type
    assert str(error) == "weights are late"
    assert error.is_transient == error_type.is_transient


@pytest.mark.parametrize("error_type", OVERFLOWS)
@pytest.mark.parametrize("message", ["9 blocks", None])
@pytest.mark.parametrize("is_transient", [True, False])
def test_overflow_keeps_request_message_and_flag_over_the_wire(error_type, message, is_transient):
    sent = error_type(7, message, is_transient=is_transient)
    error = travel(sent)
    assert type(error) is error_type
    assert (error.request_id, error.message) == (7, message)
    assert error.is_transient is sent.is_transient
    assert str(error) == str(sent)


def test_overflow_is_transient_unless_told_otherwise():
    assert BlockOverflowError(1).is_transient
    assert not BlockOverflowError(1, is_transient=False).is_transient


def test_sequence_length_overflow_is_never_transient():
    assert not MaxSequenceLengthOverflowError(1).is_transient
    assert not MaxSequenceLengthOverflowError(1, is_transient=True).is_transient


def test_overflow_text_names_request_and_message():
    assert str(BlockOverflowError(3, "needs 9 blocks")) == "request 3 | needs 9 blocks"
    assert str(BlockOverflowError(None)) == "request --"


def test_unknown_error_comes_back_generic_with_its_old_name():
    error = travel(KeyError("head"), is_transient=True)
    assert type(error) is RemoteError
    assert error.type_name == "KeyError"
    assert error.is_transient
    assert "head" in str(error)


def test_generic_error_is_unchanged_by_a_second_journey():
    once = travel(OSError("no route"))
    twice = travel(once)
    assert (twice.type_name, twice.message) == ("OSError", "no route")
    assert encode_error(twice) == encode_error(once)


@pytest.mark.parametrize(
    "error",
    [OSError("no file a\udcff"), RemoteError("E", "a\udcff"), BlockOverflowError(1, "a\udcff")],
)
def test_encode_error_escapes_what_utf_8_cannot_carry(error):
    assert str(travel(error)).endswith("a\\udcff")


def test_own_flag_of_an_error_wins():
    assert not travel(RequestAbortedError("by user"), is_transient=True).is_transient


def test_type_outside_the_tree_is_never_built():
    class LateError(RolloutError):
        """Defined after the tree was closed."""

    assert type(travel(LateError("x"))) is RemoteError


@pytest.mark.parametrize("encoded", [{}, {"type": "ConfigError"}, None, 3])
def test_malformed_error_raises_protocol_error(encoded):
    with pytest.raises(ProtocolError):
        decode_error(encoded)


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_overflow_survives_copy_and_pickle(clone):
    error = clone(BlockOverflowError(3, "full", is_transient=False))
    assert (error.request_id, error.message, error.is_transient) == (3, "full", False)
    assert str(error) == "request 3 | full"
