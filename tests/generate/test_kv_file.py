"""Saved conversations: resumed only by the same model; damaged, truncated or foreign ones start empty with a notice."""

import copy
import os
import shutil

import pytest
import safetensors.torch
import torch

from forward.kv_cache import make_kv_cache
from forward.step import step
from generate.kv_file import KvFileStore
from generate.request import Request, Started
from generate.scheduler import Scheduler
from tests.conftest import FIXTURES
from tests.support.serving import NAME, PROMPT, reference_ids, submit

FOLDER = FIXTURES / NAME


@pytest.fixture
def begin(load, tmp_path):
    """begin(**variables) -> a Scheduler that saves, after the one before was closed; begin.notices: its notices."""
    running = []

    def begin(folder=FOLDER, slots=2, expert_bits=16, **variables):
        while running:
            running.pop().close()
        loaded = load(folder, expert_bits=expert_bits, **({"DRAFT": "3"} | variables))
        begin.notices = []
        begin.files = KvFileStore(loaded, tmp_path / "cache", begin.notices.append)
        running.append(Scheduler(loaded, slots, store=begin.files))
        return running[-1]

    yield begin
    for scheduler in running:
        scheduler.close()


def saved_files(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.kv*"))


def turn(scheduler, ids, most=6, name="a"):
    """-> (cached tokens, the ids with the answer)."""
    recorder = submit(scheduler, Request(tuple(ids), most, conversation=name)).wait()
    assert recorder.reason() == "length"
    return recorder.of(Started)[0].cached_tokens, [*ids, *recorder.ids()]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", [NAME, "qwen3_moe"])
def test_a_cache_in_fewer_bits_is_saved_as_it_is(begin, tmp_path, name, kv_dtype):
    """With KV_DTYPE=bf16 a saved conversation was "cut off or damaged": its rows were taken for float32."""
    _, text = turn(begin(FIXTURES / name, KV_DTYPE=kv_dtype), PROMPT)
    plain = turn(begin(FIXTURES / name, KV_DTYPE=kv_dtype), [*text, 5, 6], name="another")[1]
    found = turn(begin(FIXTURES / name, KV_DTYPE=kv_dtype), [*text, 5, 6])
    assert found == (len(PROMPT) + 5, plain), begin.notices
    assert begin.notices == [f"[KV] conversation a: resumed with {len(PROMPT) + 5} tokens"]
    assert turn(begin(FIXTURES / name), [*text, 5, 6])[0] == 0  # another precision


def two_turns(begin):
    """-> the text of a conversation of two turns, saved."""
    _, text = turn(begin(), PROMPT)
    scheduler = begin()
    cached, text = turn(scheduler, [*text, 5, 6])
    assert cached == len(PROMPT) + 5
    return text


def check_starts_empty(begin, text, words, folder=FOLDER, **variables):
    """The next turn starts with an empty KV cache and a notice of the reason, and its answer is correct."""
    scheduler = begin(folder, **variables)
    cached, longer = turn(scheduler, [*text, 9])
    assert cached == 0 and [line for line in begin.notices if words in line] and len(begin.notices) == 1, begin.notices
    scheduler.close()
    assert longer == [*text, 9, *reference_ids(scheduler.model, Request((*text, 9), 6))]


def test_a_conversation_survives(begin, tmp_path):
    text = two_turns(begin)
    scheduler = begin()
    cached, longer = turn(scheduler, [*text, 7])
    assert cached == len(text) - 1 and begin.notices == [f"[KV] conversation a: resumed with {len(text) - 1} tokens"]
    cached, _ = turn(scheduler, longer[:20], name="b")
    assert cached == 19  # another conversation may share the prefix in a KV slot
    scheduler.close()
    assert len(saved_files(tmp_path)) == 2 and all(path.stat().st_mode & 0o77 == 0 for path in saved_files(tmp_path))
    assert longer == [*text, 7, *reference_ids(scheduler.model, Request((*text, 7), 6))]


@pytest.mark.parametrize("name", ["mixtral", "glm_moe_dsa", "glm_moe_dsa_dense"])
def test_load_restores_what_was_saved(load, oracle_folder, tmp_path, name):
    """Grouped queries, an indexer, an indexer that the snapshot lacks or does not use."""
    loaded, said = load(oracle_folder(name)), []
    kv, other = make_kv_cache(loaded.config, 40), make_kv_cache(loaded.config, 60)
    step(loaded.model, [(list(PROMPT), kv)])
    KvFileStore(loaded, tmp_path, said.append).save("x", list(PROMPT), kv)
    files = KvFileStore(loaded, tmp_path, said.append)
    assert files.ids("x") == files.load("x", other) == list(PROMPT) and other.length == len(PROMPT)
    assert len(said) == 1 and "resumed with 12 tokens" in said[0]
    assert torch.equal(*(step(loaded.model, [([5, 6, 7], state)]) for state in (kv, other)))


def test_a_turn_is_appended_and_replaced_records_are_compacted(begin, tmp_path):
    scheduler = begin()
    _, text = turn(scheduler, PROMPT)
    scheduler.close()
    [path] = saved_files(tmp_path)
    start = path.read_bytes()
    scheduler = begin()
    _, text = turn(scheduler, [*text, 5, 6])
    scheduler.close()
    assert path.read_bytes()[: len(start)] == start and path.stat().st_size > len(start)
    row_bytes = begin.files.row_bytes
    scheduler = begin()
    for i in range(8):  # the same question again, each time with another end
        cached, _ = turn(scheduler, [*text[:20], 30 + i, *range(10)], 1)
        assert cached == 20
    scheduler.close()
    assert path.stat().st_size < 4.2 * 31 * row_bytes
    scheduler = begin()
    assert begin.files.ids("a") == [*text[:20], 37, *range(10)]


def test_a_crash_loses_the_last_turn_at_most(begin, tmp_path):
    """Truncated at any byte, or with any byte changed."""
    text = two_turns(begin)
    scheduler = begin()
    scheduler.close()
    [path] = saved_files(tmp_path)
    data = path.read_bytes()
    first = data.index(b"\n") + 1 + 16 + (len(PROMPT) + 5) * (4 + begin.files.row_bytes) + 32
    known, whole = text[: len(PROMPT) + 5], text[:-1]
    for end in (first, first + 7, first + 20, first + 200, len(data) - 1):
        path.write_bytes(data[:end])
        assert resumed(begin.files) == known
    for at in (first + 3, first + 17, first + 300, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert resumed(begin.files) == known
    path.write_bytes(data + b"more")
    assert resumed(begin.files) == whole
    path.write_bytes(data)
    assert resumed(begin.files) == whole
    for end in (0, 10, data.index(b"\n") + 1, data.index(b"\n") + 9, first - 1):
        path.write_bytes(data[:end])
        check_starts_empty(begin, text, "starts empty: " + path.name + " is cut off or damaged")
    path.write_bytes(data[: first - 40] + b"\xff" + data[first - 39 :])  # rows of the first turn
    scheduler = begin()
    assert turn(scheduler, [*text, 9])[0] == 0 and "damaged" in begin.notices[0]


def resumed(files):
    """The ids that a new process would load."""
    other = copy.copy(files)
    other.known, other.say, kv = {}, lambda line: None, make_kv_cache(files.config, 60)
    ids = other.ids("a") and other.load("a", kv)
    assert len(ids) == kv.length
    return ids


def test_other_weights_are_refused(begin, tmp_path):
    text = two_turns(begin)
    other = tmp_path / "other"
    shutil.copytree(FOLDER, other)
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.weight"] *= 1.01  # shapes and routers as before
    safetensors.torch.save_file(tensors, other / "model.safetensors", {"format": "pt"})
    check_starts_empty(begin, text, "saved with other weights", other)
    scheduler = begin()  # and the others' conversation is still there
    assert turn(scheduler, [*text, 7])[0] == len(text) - 1


def test_another_precision_is_refused(begin):
    text = two_turns(begin)
    check_starts_empty(begin, text, 'it was saved with precision {"kv"', expert_bits=8)
    assert begin.files.header["precision"]["lossy"] == ["expert_bits=8"]  # not the notice, whose words may change
    text = two_turns(begin)
    check_starts_empty(begin, text, "it was saved with precision", TOPK=1)


def test_a_smaller_context_is_refused(begin):
    text = two_turns(begin)
    begin(CTX=len(text) - 2)
    assert begin.files.ids("a") == [] and f"has {len(text) - 1} positions, CTX is {len(text) - 2}" in begin.notices[0]


def test_hostile_files(begin, tmp_path):
    text = two_turns(begin)
    begin().close()
    [path] = saved_files(tmp_path)
    data = path.read_bytes()
    line, rest = data.split(b"\n", 1)
    huge = (2**63).to_bytes(8, "little")
    for broken, words in [
        (b"{}\n" + rest, "it was saved with"),
        (b"[]\n" + rest, "starts empty"),
        (b"\xff\n" + rest, "starts empty"),
        (b"{" * 70000, "starts empty"),
        (line.replace(b'"kv": 1', b'"kv": true', 1) + b"\n" + rest, "saved with kv true"),
        (line.replace(b'"name": "a"', b'"name": "b"') + b"\n" + rest, 'saved with name "b"'),
        (line + b"\n" + bytes(8) + huge + rest[16:], "cut off or damaged"),
        (line + b"\n" + huge + rest[8:], "cut off or damaged"),
        (line + b"\n" + rest[:16] + b"\xff\xff\xff\xff" + rest[20:], "cut off or damaged"),
    ]:
        path.write_bytes(broken)
        check_starts_empty(begin, text, words)
    path.unlink()
    os.mkfifo(path)
    begin()
    assert begin.files.ids("a") == [] and "not a regular file" in begin.notices[0]


def test_numbers_that_are_not_finite_are_refused(load, tmp_path):
    loaded, said = load(FOLDER), []
    kv = make_kv_cache(loaded.config, 40)
    step(loaded.model, [(list(PROMPT), kv)])
    kv.latents[1, 3, 2] = float("nan")
    KvFileStore(loaded, tmp_path, said.append).save("x", list(PROMPT), kv)
    files = KvFileStore(loaded, tmp_path, said.append)
    assert files.ids("x") and files.load("x", kv) == [] == files.ids("x") and "not finite" in said[-1]
    assert kv.length == 0


def test_a_failed_save_is_a_notice_and_answers_continue(begin, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    scheduler = begin()
    _, text = turn(scheduler, PROMPT)
    cached, _ = turn(scheduler, [*text, 5])
    assert cached == len(text) - 1
    scheduler.close()
    assert begin.notices and all("cannot be saved" in line for line in begin.notices)


def test_a_file_that_another_process_wrote_is_replaced_whole(begin, tmp_path):
    scheduler = begin()
    _, text = turn(scheduler, PROMPT)
    scheduler.close()
    [path] = saved_files(tmp_path)
    path.write_bytes(path.read_bytes() + b"of another")
    scheduler = begin()
    _, text = turn(scheduler, [*text, 5])
    scheduler.close()
    begin()
    assert begin.files.ids("a") == text[:-1] and not begin.notices and saved_files(tmp_path) == [path]
