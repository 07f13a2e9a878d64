"""The simulation of a trainer that waits: two small runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks import producer_order


def test_ready_order_keeps_the_bound_and_trains_on_every_prompt(tmp_path: Path) -> None:
    results = producer_order.main(["--small", "--output", str(tmp_path)])
    admission, ready = results["outcomes"]
    assert (admission["case"]["order"], ready["case"]["order"]) == ("admission", "ready")
    for outcome in (admission, ready):
        assert outcome["largest_lag"] <= outcome["case"]["bound"]
        assert outcome["prompts_per_epoch"] == 1.0
    assert ready["idle_share"] < admission["idle_share"]
    assert "Orders of the producer" in next(tmp_path.glob("*.md")).read_text()
