"""Traces of two processes merge on one clock; how much drafting ran under verification is read from them."""

import json
import threading
import time
from pathlib import Path

import pytest

from foredraft.infer.tracing import Trace, summarise

MS = 1_000_000  # ns


def events_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def test_both_processes_in_one_file(tmp_path: Path) -> None:
    server = Trace("draft-server", is_on=True)
    server.record("expand", 10 * MS, 30 * MS, rows=8)
    server.instant("hit", request="0")
    server.flush(tmp_path / "part")
    engine = Trace("engine", is_on=True)
    with engine.span("verify", rows=5):
        time.sleep(0.002)
    engine.absorb(tmp_path / "part")
    engine.write(tmp_path / "trace.json")

    events = events_of(tmp_path / "trace.json")
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"engine", "draft-server"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert spans["expand"]["dur"] == pytest.approx(20_000)
    assert spans["expand"]["args"] == {"rows": 8}
    assert 2_000 <= spans["verify"]["dur"] < 1_000_000
    assert spans["verify"]["ts"] == pytest.approx(time.monotonic() * 1e6, abs=5e6)
    assert [e["name"] for e in events if e["ph"] == "i"] == ["hit"]
    assert list(tmp_path.glob(".*")) == []


def test_threads_are_named(tmp_path: Path) -> None:
    trace = Trace("draft-server", is_on=True)
    thread = threading.Thread(target=trace.instant, args=("leaf",), name="drafter")
    thread.start()
    thread.join()
    trace.write(tmp_path / "t.json")
    assert "drafter" in [e["args"].get("name") for e in events_of(tmp_path / "t.json")]


def test_a_part_survives_a_kill(tmp_path: Path) -> None:
    part = tmp_path / "part"
    trace = Trace("draft-server", is_on=True)
    for name in ("hit", "leaf"):
        trace.instant(name)
        trace.flush(part)
    part.write_text(part.read_text()[:-20])
    engine = Trace("engine", is_on=True)
    engine.absorb(part)
    engine.absorb(tmp_path / "missing")
    engine.write(tmp_path / "t.json")
    assert [e["name"] for e in events_of(tmp_path / "t.json") if e["ph"] == "i"] == ["hit"]


def test_off_records_nothing_and_is_cheap(tmp_path: Path) -> None:
    trace = Trace("engine", is_on=False)
    start = time.thread_time()
    for _ in range(10_000):
        with trace.span("verify"):
            trace.instant("hit")
    assert time.thread_time() - start < 0.1  # 10 us a pair is already ten times the usual
    trace.flush(tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_span_is_recorded_when_its_body_raises(tmp_path: Path) -> None:
    trace = Trace("engine", is_on=True)
    with pytest.raises(KeyError), trace.span("verify"):
        raise KeyError("x")
    trace.write(tmp_path / "t.json")
    assert summarise(tmp_path / "t.json").seconds_verify > 0


def test_overlap(tmp_path: Path) -> None:
    trace = Trace("engine", is_on=True)
    for start, end in ((0, 100), (90, 150), (200, 300)):  # overlapping verify spans count once
        trace.record("verify", start * MS, end * MS)
    for start, end in ((50, 120), (140, 210), (290, 320), (400, 410)):  # inside: 70, 10 + 10, 10, 0
        trace.record("expand", start * MS, end * MS)
    trace.record("wait", 150 * MS, 160 * MS)
    for name in ("hit", "hit", "miss"):
        trace.instant(name)
    trace.write(tmp_path / "t.json")

    summary = summarise(tmp_path / "t.json")
    assert summary.seconds_expand == pytest.approx(0.180)
    assert summary.seconds_expand_in_verify == pytest.approx(0.100)
    assert summary.overlap == pytest.approx(100 / 180)
    assert summary.seconds_wait == pytest.approx(0.010)
    assert (summary.num_hits, summary.num_leaves, summary.num_misses) == (2, 0, 1)


def test_nothing_expanded_is_no_overlap(tmp_path: Path) -> None:
    Trace("engine", is_on=True).write(tmp_path / "t.json")
    assert summarise(tmp_path / "t.json").overlap == 0.0


@pytest.mark.parametrize("text", ["[]", "{}", "{"], ids=["list", "no events", "cut short"])
def test_not_a_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match="traceEvents"):
        summarise(tmp_path / "t.json")
