"""SCORE: log-likelihoods equal to transformers', shared contexts computed once, every bad line named."""

import json
import shutil
import weakref

import pytest

from forward.kv_cache import KvCache
from generate.score import ScoreCounters, ScoreRequest, make_waves, score_requests, shared_length
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, ORACLES, read_json, reference
from tests.support.small_tokenizers import write_tokenizer

TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")


@pytest.fixture
def score_lines(run_colibri, tmp_path):
    """score_lines(lines, **variables) -> the finished process."""

    def score(lines, *arguments, **variables):
        (tmp_path / "requests.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return run_colibri(*arguments, SCORE=tmp_path / "requests.txt", **variables)

    return score


def line_of(context, continuation):
    return " ".join(map(str, [len(context), len(continuation), *context, *continuation]))


def results(process):
    assert process.returncode == 0, process.stderr
    rows = [line.split() for line in process.stdout.decode().splitlines()]
    return [(float(logprob), int(count), int(greedy)) for logprob, count, greedy in rows]


def assert_same(first, second):
    """Two lines of output for the same tokens. Rows of one batch may differ in the last bits of float32."""
    assert first[0] == pytest.approx(second[0], abs=1e-4) and first[1:] == second[1:]


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("max_positions", [2048, 60, 1])
def test_every_split_of_a_fixture_equals_its_log_probabilities(name, max_positions, oracle_folder, load):
    """However the requests are put into waves: all together, a few at a time, one after the other."""
    ref, _ = reference(name)
    seq, following = ref["seq"], ref["teacher"]["logprob_next"]
    splits = [(1, 48), (12, 48), (12, 13), (12, 20), (12, 12), (30, 41), (47, 48)]
    requests = [ScoreRequest(tuple(seq[:a]), tuple(seq[a:b])) for a, b in splits]
    model = load(oracle_folder(name), cap=2).model
    scores = dict(score_requests(model, requests, max_positions))
    for i, (a, b) in enumerate(splits):
        assert scores[i].logprob == pytest.approx(sum(following[a - 1 : b - 1]), abs=1e-4 * max(1, b - a))
        assert scores[i].greedy == (ref["teacher"]["argmax"][a - 1 : b - 1] == seq[a:b])


@pytest.mark.parametrize("name", ORACLES)
def test_every_token_of_a_fixture_to_1e_4(name, oracle_folder, load):
    ref, _ = reference(name)
    seq = ref["seq"]
    requests = [ScoreRequest(tuple(seq[:i]), (seq[i],)) for i in range(1, len(seq))]
    scores = dict(score_requests(load(oracle_folder(name)).model, requests, 2048))
    assert [scores[i].logprob for i in range(47)] == pytest.approx(ref["teacher"]["logprob_next"], abs=1e-4)


def test_every_token_of_the_embedded_model_equals_transformers_to_1e_4(load):
    full, following = TINY["full_ids"], TINY["logprob_next"]
    requests = [ScoreRequest(tuple(full[:i]), (full[i],)) for i in range(1, len(full))]
    scores = dict(score_requests(load(EMBEDDED_SNAPSHOT).model, requests, 1024))
    assert [scores[i].logprob for i in range(len(following))] == pytest.approx(following, abs=1e-4)


def test_the_embedded_model_equals_transformers(score_lines):
    full, n = TINY["full_ids"], len(TINY["prompt_ids"])
    wrong = [*full[n : n + 4], (full[n + 4] + 1) % 2048]
    process = score_lines(
        [line_of(full[:n], full[n:]), line_of(full[: n + 7], full[n + 7 :]), line_of(full[:n], wrong)]
    )
    first, second, third = results(process)
    following = TINY["logprob_next"]
    assert first[0] == pytest.approx(sum(following[n - 1 :]), abs=1e-4 * len(full))
    assert second[0] == pytest.approx(sum(following[n + 6 :]), abs=1e-4 * len(full))
    assert first[1:] == (len(full) - n, 1) and second[1:] == (len(full) - n - 7, 1) and third[1:] == (5, 0)


def count_rows(monkeypatch):
    """-> a list that gets the rows of every chunk that goes through the layers."""
    import forward.layers_forward

    rows, plain = [], forward.layers_forward.make_chunk

    def counting(config, pieces):
        rows.append(sum(len(ids) for ids, _ in pieces))
        return plain(config, pieces)

    monkeypatch.setattr(forward.layers_forward, "make_chunk", counting)
    return rows


def test_four_choices_of_one_context_cost_little_more_than_one(load, monkeypatch):
    """Counted where rows go through the layers: at most 1.3 times."""
    context, totals = tuple(reference("glm_moe_dsa")[0]["seq"][:40]), []
    model = load(FIXTURES / "glm_moe_dsa").model
    for choices in (1, 4):
        rows, counters = count_rows(monkeypatch), ScoreCounters()
        requests = [ScoreRequest(context, (7 + i, 8, 9, 10)) for i in range(choices)]
        assert len(dict(score_requests(model, requests, 4096, counters))) == choices
        totals.append(sum(rows))
        assert counters.context_rows + counters.continuation_rows == sum(rows)
        monkeypatch.undo()
    assert totals == [40 + 3, 40 + 12] and totals[1] <= 1.3 * totals[0]


def test_the_shared_prefix_of_contexts_is_prefilled_once(load, monkeypatch):
    """As examples before questions: 5 contexts that share 30 ids, at 24 rows a pass. The scores are the same."""
    seq = reference("glm_moe_dsa")[0]["seq"]
    contexts = [(*seq[:30], 9 + i, 8, 7) for i in range(4)] + [tuple(seq[:31])]
    requests = [ScoreRequest(context, (5 + i, 6, 4)) for context in contexts for i in range(2)]
    alone = load(FIXTURES / "glm_moe_dsa").model
    expected = {}
    for i, request in enumerate(requests):
        expected[i] = dict(score_requests(alone, [request], 4096))[0]
    model, rows, counters = (
        load(FIXTURES / "glm_moe_dsa", PREFILL_CHUNK=24).model,
        count_rows(monkeypatch),
        ScoreCounters(),
    )
    scores = dict(score_requests(model, requests, 4096, counters))
    assert counters.context_rows == 30 + 4 * 3 + 1 and counters.continuation_rows == 10 * 2
    assert sum(rows) == counters.context_rows + counters.continuation_rows
    for i, score in expected.items():
        assert scores[i].logprob == pytest.approx(score.logprob, abs=1e-5) and scores[i].greedy == score.greedy


@pytest.mark.parametrize(
    ("contexts", "chunk", "shared"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3]], 2, 2),  # the shortest keeps one
        ([[1, 2, 3, 4], [1, 2, 9, 4]], 2, 2),
        ([[1, 2, 3, 4], [1, 2, 9, 4]], 8, 0),  # one pass is enough for all
        ([[1, 2, 3, 4]], 2, 0),
        ([[1, 2], [2, 2], [1, 2, 3]], 1, 0),
        ([[7], [7, 8]], 1, 0),
    ],
)
def test_shared_length(contexts, chunk, shared):
    assert shared_length(contexts, chunk) == shared


def test_a_group_that_does_not_fit_is_split(load, monkeypatch):
    """Eight choices of a context of 40 positions: what fits runs together, and the scores are the same."""
    context = tuple(reference("glm_moe_dsa")[0]["seq"][:40])
    model = load(FIXTURES / "glm_moe_dsa").model
    requests = [ScoreRequest(context, (7 + i, 8, 9, 10)) for i in range(8)]
    expected = dict(score_requests(model, requests, 4096))
    for max_positions, parts in [(344, [24]), (343, [21, 3]), (43 * 3, [9, 9, 6]), (43, [3] * 8)]:
        rows = count_rows(monkeypatch)
        scores = dict(score_requests(model, requests, max_positions))
        monkeypatch.undo()
        assert rows == [40, *parts]
        for i, score in scores.items():
            assert score.logprob == pytest.approx(expected[i].logprob, abs=1e-4)


def test_the_clones_of_one_batch_end_before_those_of_the_next_begin(load, monkeypatch):
    """Two batches of clones were held at once, twice the positions that memory was planned for."""
    model, clone, clones, held = load(EMBEDDED_SNAPSHOT).model, KvCache.clone, [], []

    def counted(kv, capacity):
        clones.append(weakref.ref(new := clone(kv, capacity)))
        held.append(sum(live.capacity for each in clones if (live := each())))
        return new

    monkeypatch.setattr(KvCache, "clone", counted)
    requests = [ScoreRequest(tuple(range(5, 15)), tuple(range(20 + i, 26 + i))) for i in range(12)]
    scores = dict(score_requests(model, requests, 3 * 15))
    assert len(clones) == 8 and max(held) == 2 * 15  # beside the context's own
    assert scores == dict(score_requests(model, requests, 999))


def test_one_pass_over_the_experts_serves_many_requests(load, monkeypatch):
    model = load(FIXTURES / "glm_moe_dsa", cap=1).model
    requested, plain = [], type(model.experts).request
    monkeypatch.setattr(
        type(model.experts), "request", lambda self, layer, *rest: requested.append(layer) or plain(self, layer, *rest)
    )
    requests = [ScoreRequest((i, i + 1, i + 2), (5, 6, 7)) for i in range(30)]
    dict(score_requests(model, requests, 4096))
    assert requested == [1, 2, 3, 4] * 2  # all contexts, all continuations


def test_waves_keep_within_their_positions():
    requests = [ScoreRequest((1,) * n, (2,) * m) for n, m in [(10, 3), (5, 1), (30, 2), (2, 2), (2, 2)]]
    groups = {request.context: [i] for i, request in enumerate(requests[:4])}
    groups[requests[4].context].append(4)
    waves = [[indices for _, indices in wave] for wave in make_waves(groups, requests, 20)]
    assert waves == [[[0], [1]], [[2]], [[3, 4]]]
    many = {(i,): [0] for i in range(150)}  # the logits after their contexts are held together
    assert [len(wave) for wave in make_waves(many, [ScoreRequest((0,), (1,))], 10_000)] == [64, 64, 22]


def test_output_is_in_input_order_with_groups_and_json_between(score_lines):
    a, b = TINY["full_ids"][2:6], TINY["full_ids"][2:9]
    lines = [
        line_of(a, [5, 6]),
        json.dumps({"context": b, "continuation": [7]}),
        line_of(a, [5, 6, 7]),
        json.dumps({"context": "And it came to pass", "continuation": " in those days"}),
        line_of(a, []),
    ]
    together = results(score_lines(lines))
    alone = [results(score_lines([line]))[0] for line in lines]
    for mine, expected in zip(together, alone, strict=True):
        assert_same(mine, expected)
    assert together[4] == (0.0, 0, 1)


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(score_lines):
    pairs = [("And it came to pass ", "in those days"), ("And it came to pass", " in those days")]
    first, second = results(score_lines([json.dumps({"context": a, "continuation": b}) for a, b in pairs]))
    assert_same(first, second)


def test_every_character_of_a_continuation_is_scored(load):
    """A word cut in two is one piece when it is encoded whole: the second half must not vanish."""
    from modes.score import ScoreFileReader
    from settings import Settings

    reader = ScoreFileReader(Settings.read([], {"PREFIX": "0"}), load(EMBEDDED_SNAPSHOT))
    text = "And it came to pass in those days, that there went out a decree from the king over the waters"
    for at in range(1, len(text)):
        request = reader.parse_line(json.dumps({"context": text[:at], "continuation": text[at:]}))
        context = text[:at].rstrip()
        assert reader.tokenizer.decode(list(request.context)) == context
        assert reader.tokenizer.decode(list(request.continuation)) == text[len(context) :]


def test_a_word_cut_in_two_gets_no_space_within_it(load, tmp_path):
    """SentencePiece puts a space in front of a text: "the t" + "ime" was scored as "the t ime"."""
    from modes.score import ScoreFileReader
    from settings import Settings

    reader = ScoreFileReader(Settings.read([], {"PREFIX": "0"}), load(EMBEDDED_SNAPSHOT))
    reader.tokenizer = write_tokenizer(tmp_path, "mixtral")
    request = reader.parse_line(json.dumps({"context": "the t", "continuation": "ime"}))
    pieces = map(reader.tokenizer.tokenizer.id_to_token, (*request.context, *request.continuation))
    assert list(pieces) == ["▁the", "▁t", "i", "me"]


def test_lines_end_at_newlines_alone(score_lines):
    """JSON may hold U+2028 and U+0085 as they are; a byte order mark and CRLF are no part of a request."""
    line = json.dumps({"context": "a\u2028b", "continuation": "c\x85d"}, ensure_ascii=False)
    escaped = json.dumps({"context": "a\u2028b", "continuation": "c\x85d"})
    first, second = results(score_lines(["\ufeff" + line + "\r", escaped]))
    assert_same(first, second)


def test_the_prefix_is_added_to_raw_tokens_unless_they_have_it(score_lines):
    """A GLM model scored without its [gMASK]<sop> gives other numbers, and nothing said so."""
    prefix, ids = TINY["full_ids"][:2], TINY["full_ids"][2:8]
    plain, given = results(score_lines([line_of(ids, [5, 6]), line_of(prefix + ids, [5, 6])]))
    assert_same(plain, given)
    [bare] = results(score_lines([line_of(ids, [5, 6])], PREFIX=0))
    assert abs(bare[0] - plain[0]) > 1e-3
    [unconditional] = results(score_lines([line_of([], [5, 6])]))
    [explicit] = results(score_lines([line_of(prefix, [5, 6])], PREFIX=0))
    assert_same(unconditional, explicit)


def test_without_a_tokenizer_the_prefix_is_off_with_a_notice(score_lines, tmp_path):
    process = score_lines([line_of([1, 2], [3])], SNAP=FIXTURES / "glm_moe_dsa")
    assert process.returncode == 0 and b"[prefix] no tokenizer with [gMASK] <sop>" in process.stderr
    folder = tmp_path / "snap"
    shutil.copytree(EMBEDDED_SNAPSHOT, folder)
    tokenizer = read_json(folder / "tokenizer.json")
    for token in tokenizer["added_tokens"]:
        if token["content"] == "[gMASK]":
            token["content"] = "[other]"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    process = score_lines([line_of([1, 2], [3])], SNAP=folder)
    assert process.returncode == 0 and b"[prefix] tokenizer.json lacks [gMASK] <sop>" in process.stderr


def test_bad_lines_are_named_before_anything_runs(load, tmp_path):
    from errors import Refused
    from modes.score import read_requests
    from settings import Settings

    loaded = load(EMBEDDED_SNAPSHOT, CTX=64)
    good = "1 1 5 6"
    cases = {
        "": "line 2: is blank",
        "hello world": "line 2: expected whole numbers",
        "3": "line 2: expected whole numbers",
        "1 1 5 1_0": "line 2: expected whole numbers",
        "1 1 5 \u0663": "line 2: expected whole numbers",
        "1 1 5 " + "9" * 5000: "line 2: expected whole numbers",
        "2 1 5 6": r"line 2: has 2 ids, ctxlen \+ contlen is 3",
        "1 1 5 6 7": r"line 2: has 3 ids, ctxlen \+ contlen is 2",
        "-1 1 5": "line 2: ctxlen and contlen cannot be negative",
        "1 1 5 2048": "line 2: id 2048 is outside the vocabulary of 2048",
        "1 1 -5 6": "line 2: id -5 is outside",
        "60 4 " + "5 " * 64: "line 2: has 66 tokens, CTX is 64",
        "{": "line 2: is not valid JSON",
        '{"context": "a"}': 'line 2: needs exactly "context" and "continuation"',
        '{"context": "a", "continuation": [1]}': "line 2: context must be a list",
        '{"context": [1], "continuation": [true]}': "line 2: continuation must be a list",
    }
    for line, message in cases.items():
        (tmp_path / "requests.txt").write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
        settings = Settings.read([], {"SCORE": str(tmp_path / "requests.txt"), "SNAP": str(EMBEDDED_SNAPSHOT)})
        with pytest.raises(Refused, match=message):
            read_requests(settings, loaded)


@pytest.mark.parametrize(("content", "message"), [(b"", "holds no requests"), (b"\xff\xfe", "not valid UTF-8")])
def test_a_file_that_cannot_be_used(run_colibri, tmp_path, content, message):
    path = tmp_path / "requests.txt"
    path.write_bytes(content)
    process = run_colibri(SCORE=path)
    assert process.returncode == 2 and message.encode() in process.stderr and process.stdout == b""
    path.unlink()
    assert b"requests.txt: No such file" in run_colibri(SCORE=path).stderr


def test_an_empty_context_without_a_prefix_is_refused(score_lines):
    process = score_lines([line_of([], [5, 6])], PREFIX=0)
    assert process.returncode == 2 and b"line 1: the context is empty" in process.stderr


def test_progress_with_time_left_and_a_report(score_lines, tmp_path):
    process = score_lines(["2 2 5 6 7 8"] * 3, REPORT=tmp_path / "report.json")
    assert b"[score 3/3 req | " in process.stderr and b"s left" in process.stderr
    report = read_json(tmp_path / "report.json")
    assert (report["mode"], report["requests"], report["context_rows"]) == ("score", 3, 4)
