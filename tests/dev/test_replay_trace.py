"""Route traces: written and read back; replays of small traces have the hits counted by hand."""

import csv
import json
import re
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.replay_trace import CACHES, Trace, main, parse_budgets, replay
from errors import Refused
from experts.route_trace import RouteTrace, read_trace

IDENTITY = dict(model_type="glm_moe_dsa", layers=[1, 3], num_experts=8, top_k=2, slot_bytes=20_054_016)


def write(path, events, **changes):
    trace = RouteTrace(path, **(IDENTITY | changes))
    for layer, rows, uses in events:
        trace.record(layer, uses, rows)
    trace.close()


EVENTS = [(1, 5, {7: 5, 0: 1, 2: 4}), (3, 5, {1: 5}), (1, 1, {6: 1, 2: 1}), (3, 1, {})]


# ---------------------------------------------------------------------------------------------------------------------
# The file


def test_a_trace_is_read_back_and_continued(tmp_path):
    path = tmp_path / "run.jsonl"
    for times in (1, 2):
        write(path, EVENTS)
        assert read_trace(path) == ({"route_trace": 1, **IDENTITY}, EVENTS * times)
    assert path.read_text().splitlines()[1:4] == ["[1,5,[0,2,7],[1,4,5]]", "[3,5,[1],[5]]", "[1,1,[2,6]]"]


def test_every_line_is_there_at_once(tmp_path):
    trace = RouteTrace(tmp_path / "run.jsonl", **IDENTITY)
    trace.record(1, {4: 1}, 1)
    assert read_trace(tmp_path / "run.jsonl")[1] == [(1, 1, {4: 1})]
    trace.close()


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_that_was_cut_off_is_dropped(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    write(path, EVENTS)
    path.write_bytes(path.read_bytes()[:-cut])
    whole = read_trace(path)[1]
    assert whole == EVENTS[: len(whole)] and len(whole) >= 2
    write(path, EVENTS)
    assert read_trace(path)[1] == whole + EVENTS


def test_the_trace_of_another_model_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    for content in (b"a file of something else\n", b"no newline"):
        path.write_bytes(content)
        with pytest.raises(Refused, match="no route trace of this model"):
            write(path, EVENTS)
        assert path.read_bytes() == content
    path.unlink()
    write(path, EVENTS)
    with pytest.raises(Refused, match="no route trace of this model"):
        write(path, EVENTS, num_experts=16)


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "run.jsonl"):
        with pytest.raises(Refused, match=re.escape(str(path))):
            RouteTrace(path, **IDENTITY)


HEADER = json.dumps({"route_trace": 1, **IDENTITY})
BAD = {
    "empty": "",
    "no JSON": "hello\n",
    "another version": HEADER.replace('"route_trace": 1', '"route_trace": 2') + "\n",
    "a list": "[]\n",
    "no layers": HEADER.replace("[1, 3]", "[]") + "\n",
    "a layer twice": HEADER.replace("[1, 3]", "[1, 1]") + "\n",
    "more active than there are": HEADER.replace('"top_k": 2', '"top_k": 9') + "\n",
    "a number for a line": HEADER + "\n5\n",
    "an unknown layer": HEADER + "\n[2, 1, [0]]\n",
    "an unknown expert": HEADER + "\n[1, 1, [8]]\n",
    "an expert twice": HEADER + "\n[1, 1, [4, 4]]\n",
    "too few counts": HEADER + "\n[1, 2, [4, 5], [1]]\n",
    "no counts": HEADER + "\n[1, 2, [4, 5]]\n",
    "counts of one row": HEADER + "\n[1, 1, [4], [1]]\n",
    "more rows than there are": HEADER + "\n[1, 2, [4], [3]]\n",
    "words": HEADER + '\n[1, "x", [4]]\n',
    "a nested list": HEADER + "\n[1, 1, [[4]]]\n",
    "a list for a layer": HEADER + "\n[[1], 1, [4]]\n",
    "nothing to count": HEADER + "\n",
    "brackets": HEADER + "\n" + "[" * 100_000 + "\n",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_bad_traces_are_one_line_and_exit_code_2(tmp_path, capsys, content):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    assert main([str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"replay_trace: {path}: ") and err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Replays


def trace_of(events, num_experts=8, top_k=2, layers=(0,), counted_from=0):
    return Trace(list(layers), num_experts, top_k, 4096, events, counted_from)


def hits(trace, capacity):
    """name -> hits of each event."""
    return {name: list(cache(trace, capacity=capacity)) for name, cache in CACHES.items()}


def decode(*experts):
    """One layer, one token after the other, one expert each."""
    return [(0, 1, {expert: 1}) for expert in experts]


def test_a_cycle_longer_than_the_cache():
    """LRU misses all; Belady holds on to the first two."""
    trace = trace_of(decode(0, 1, 2, 0, 1, 2, 0, 1, 2), top_k=1)
    found = hits(trace, 2)
    assert sum(found["LRU per layer"]) == sum(found["LRU global"]) == 0
    assert found["Belady"] == [0, 0, 0, 1, 1, 0, 1, 1, 0]
    assert found["fixed"] == [1, 1, 0] * 3  # 0 and 1: the first of equally popular ones


def test_a_popular_expert_between_passing_ones():
    """Expert 0 is every third token, the others come once each: with two slots LRU loses it, frequency keeps it."""
    trace = trace_of(decode(0, 0, 0, 1, 2, 0, 3, 4, 0, 5, 6, 0), top_k=1)
    found = hits(trace, 2)
    kept = [0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert found["colibri"] == found["LFU, ageing"] == found["Belady"] == kept
    assert found["LRU per layer"] == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_layers_in_a_cycle():
    """Six experts in turn: a cache of three could hit three of the second round; LRU has just evicted each."""
    events = [(layer, 1, {expert: 1}) for _ in range(2) for expert in range(3) for layer in (0, 1)]
    found = hits(trace_of(events, top_k=0, layers=(0, 1)), 3)
    assert sum(found["LRU global"]) == 0
    assert sum(found["Belady"]) == 3


def test_phases_and_the_warm_half_are_counted_apart():
    events = [(0, 4, {0: 4, 1: 2}), *decode(0, 1), (0, 4, {0: 1, 5: 3}), *decode(5, 6)]
    results = replay(trace_of(events, counted_from=3), [Fraction(1, 2)])
    counted = {(r.policy, r.phase): (r.hits, r.requests) for r in results}
    for name in ("LRU per layer", "colibri"):
        assert counted[name, "prefill"] == (1, 2) and counted[name, "decode"] == (1, 2)
    assert counted["fixed", "prefill"] == counted["fixed", "decode"] == (2, 2)


TOKEN = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=2, max_size=2)


@given(st.lists(st.tuples(TOKEN, st.integers(1, 3)), min_size=1, max_size=25), st.integers(1, 12), st.integers(0, 20))
def test_no_policy_beats_belady(tokens, capacity, warm):
    events = [
        (layer, rows, dict.fromkeys(sorted(chosen), rows))
        for token, rows in tokens
        for layer, chosen in enumerate(token)
    ]
    trace = trace_of(events, num_experts=6, top_k=3, layers=(0, 1), counted_from=min(warm, len(events)))
    counted = {name: sum(of_events[trace.counted_from :]) for name, of_events in hits(trace, capacity).items()}
    assert all(counted["Belady"] >= count for name, count in counted.items() if name != "fixed")
    if capacity == 12:
        assert counted["fixed"] == len(list(trace.requests.elements()))


def test_the_report(tmp_path, capsys):
    path, table = tmp_path / "run.jsonl", tmp_path / "run.csv"
    write(path, [event for _ in range(4) for event in EVENTS[:3] + [(3, 1, {1: 1, 4: 1})]])
    assert main([str(path), "--budgets", "1/4,0.5,1", "--csv", str(table), "--cold"]) == 0
    out = capsys.readouterr().out
    assert "2 layers of 8 experts, 2 a token; tokens: 4 of decode and 20 of prefill" in out
    assert "distinct experts of a layer: 3.0 on average, 2.0 to 4.0" in out
    assert re.search(r"^decode, hits in % +1/4 +1/2 +1$", out, re.MULTILINE)
    assert len({len(line) for line in out.splitlines()[4:]}) == 1  # aligned
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == len(CACHES) * 3 * 2
    whole = [row for row in rows if row["budget"] == "1" and row["policy"] == "colibri"]
    assert [(row["phase"], row["hits"], row["requests"]) for row in whole] == [
        ("decode", "14", "16"),  # 6 and 4 are new once
        ("prefill", "12", "16"),
    ]


@pytest.mark.parametrize("budgets", ["", "0", "-1/4", "3/2", "x", "1/0", "1/4,", "nan"])
def test_a_budget_is_a_share(budgets):
    with pytest.raises(Refused, match="no share of the experts"):
        parse_budgets(budgets)
    assert parse_budgets("1/4,0.5") == [Fraction(1, 4), Fraction(1, 2)]


def test_a_plot_without_matplotlib_is_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(tmp_path / "missing.jsonl"), "--plot", str(tmp_path / "run.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_missing_trace_and_an_unwritable_csv(tmp_path, capsys):
    assert main([str(tmp_path / "missing.jsonl")]) == 2
    path = tmp_path / "run.jsonl"
    write(path, EVENTS)
    assert main([str(path), "--budgets", "1/2", "--csv", str(tmp_path / "no" / "run.csv")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "No such file" in lines[0] and "No such file" in lines[-1]
