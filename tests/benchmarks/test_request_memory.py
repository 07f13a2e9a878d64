"""What requests cost in memory, as the benchmark measures it."""

from __future__ import annotations

from benchmarks.request_memory import main


def test_a_running_requests_token_takes_the_bytes_of_its_typed_arrays() -> None:
    results = main(["--small"])
    # Token id 4 bytes in the document and 4 in the scheduler, time 8, log-prob 4; arrays grow in
    # steps, and few tokens share what a step itself needs.
    assert results["without log-probs"]["total"] < 32
    assert results["with log-probs"]["total"] < 36
    first, _, last = results["record"]
    assert last["in_memory"] < first["in_memory"] + 20 * 4096
    assert last["on_the_wire"] < first["on_the_wire"] + 20 * 1250  # mostly its sampling parameters
    # Token id, log-prob, time, and the oldest and the mean version of the context: 4, 4, 8, 4, 8.
    assert results["reply"]["wire_bytes"] < 29
    assert results["reply"]["kept_bytes"] < 30
