"""lm_eval on a snapshot: log-likelihoods equal those of SCORE, answers those of the engine. Tests that need lm_eval
itself are skipped where it is not installed."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, processors

from dev.evaluation import Evaluation, EvaluationOptions, cut_at
from errors import Refused
from scripts import lm_eval_model
from settings import EMBEDDED_SNAPSHOT, Settings
from tests.conftest import FIXTURES, ROOT, read_json

TASKS = FIXTURES / "lm_eval"
TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")


def documents(name):
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


CHOICES = [(doc["question"], f" {choice}") for doc in documents("choice") for choice in doc["choices"]]
TEXTS = [doc["text"] for doc in documents("read")]
LONG = " ".join(TEXTS * 3)


@pytest.fixture
def evaluation(load):
    """evaluation(num_slots=1, **variables) -> an Evaluation of the embedded model."""

    def make(num_slots=1, **variables):
        variables = {"SEED": 3} | variables
        environ = {name: str(value) for name, value in variables.items()}
        loaded = load(EMBEDDED_SNAPSHOT, **variables)
        evaluation = Evaluation(Settings.read([], environ), loaded)
        evaluation.load(replace(loaded, plan=replace(loaded.plan, kv_slots=num_slots)))
        return evaluation

    return make


def score_lines(run_colibri, tmp_path, lines, **variables):
    """The output of SCORE for these lines: [(log-likelihood, greedy), ...]"""
    path = tmp_path / "requests.txt"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    process = run_colibri(SCORE=path, **variables)
    assert process.returncode == 0, process.stderr
    rows = [line.split() for line in process.stdout.decode().splitlines()]
    return [(float(logprob), greedy == "1") for logprob, _, greedy in rows]


# --- log-likelihoods --------------------------------------------------------------------------------------------------


def test_log_likelihoods_are_those_of_score(evaluation, run_colibri, tmp_path):
    """Choices, contexts that end with a space or are empty, whole texts in one window and in several."""
    pairs = [*CHOICES, ("In the ", "beginning"), ("", "And it came to pass"), ("a cut wo", "rd")]
    lines = [json.dumps({"context": context, "continuation": continuation}) for context, continuation in pairs]
    lines += [json.dumps({"context": "", "continuation": text}) for text in TEXTS]
    small = evaluation(CTX=24)
    windows = small.windows(LONG)
    assert len(windows) > 3
    lines += [" ".join(map(str, [len(w.context), len(w.continuation), *w.context, *w.continuation])) for w in windows]
    expected = score_lines(run_colibri, tmp_path, lines)
    large = evaluation()
    found = large.loglikelihood(pairs)
    assert [logprob for logprob, _ in found] == pytest.approx([row[0] for row in expected[: len(pairs)]], abs=1e-4)
    assert [greedy for _, greedy in found] == [row[1] for row in expected[: len(pairs)]]
    texts = [row[0] for row in expected[len(pairs) : len(pairs) + len(TEXTS)]]
    assert large.loglikelihood_rolling(TEXTS) == pytest.approx(texts, abs=1e-4)
    of_windows = sum(row[0] for row in expected[len(pairs) + len(TEXTS) :])
    assert small.loglikelihood_rolling([TEXTS[0], LONG])[1] == pytest.approx(of_windows, abs=1e-4 * len(windows))


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("context", [3, 7, 24, 1024])
def test_windows_score_every_token_once(evaluation, context, prefix):
    e = evaluation(CTX=context, PREFIX=prefix)
    ids, windows = e.tokenizer.encode(LONG), e.windows(LONG)
    assert [token for w in windows for token in w.continuation] == ids
    assert list(windows[0].context) == e.start and e.windows("") == []
    at = len(windows[0].continuation)
    for w in windows[1:]:
        assert len(w.context) + len(w.continuation) == context + 1  # as much context as there can be
        assert list(w.context) == e.prefix + ids[at - len(w.context) + len(e.prefix) : at]
        at += len(w.continuation)


@needs_lm_eval
@pytest.mark.parametrize("context", [3, 7, 24, 1024])
def test_windows_are_those_of_lm_eval(evaluation, context):
    """Without a prefix of the family, which lm_eval does not know."""
    code = """if 1:
        import json, sys
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        ids, start, context = json.loads(sys.stdin.read())
        print(json.dumps([make_disjoint_window(w) for w in get_rolling_token_windows(ids, start, context, 1)]))
        """
    e = evaluation(CTX=context, PREFIX=0)
    asked = json.dumps([e.tokenizer.encode(LONG), e.start[0], context])
    process = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=True)
    assert [[list(w.context), list(w.continuation)] for w in e.windows(LONG)] == json.loads(process.stdout)


def test_an_empty_context_is_the_prefix_or_one_token(evaluation):
    e, bare = evaluation(), evaluation(PREFIX=0)
    text = e.tokenizer.encode("And")
    assert e.pair("", "And").context == tuple(e.tokenizer.encode("[gMASK]<sop>"))
    assert e.pair("", "[gMASK]<sop>And") == e.pair("", "And") and e.pair("", "And").continuation == tuple(text)
    assert bare.pair("", "And").context == tuple(bare.tokenizer.encode("<|endoftext|>"))
    assert bare.pair("In", " the").context == tuple(bare.tokenizer.encode("In"))


def test_a_context_that_does_not_fit_is_truncated_on_the_left_with_a_notice(evaluation, capfd):
    e = evaluation(CTX=16)
    [long, short] = [e.pair(text, " end") for text in (LONG, "The")]
    ids = e.tokenizer.encode(LONG)
    room = 17 - len(long.continuation) - len(e.prefix)
    assert long.context == (*e.prefix, *ids[-room:]) and len(short.context) == len(e.prefix) + 1
    e.loglikelihood([(LONG, " end"), ("The", " end"), (LONG, " and")])
    assert "[truncated] 3 contexts were cut on the left to fit CTX=16; raise CTX" in capfd.readouterr().err
    assert e.all_cut == 3
    with pytest.raises(Refused, match=r"a continuation of \d+ tokens does not fit CTX=16"):
        e.loglikelihood([("The", LONG)])
    with pytest.raises(Refused, match=r"a answer of 256 tokens does not fit CTX=16"):
        e.generate([("The", EvaluationOptions())])


# --- answers ----------------------------------------------------------------------------------------------------------

PROMPTS = ["In the beginning", "In the beginning God", "Enter the king", "And it came to", "In the"]


def test_the_greedy_answer_is_the_reference(evaluation):
    e, n = evaluation(), len(TINY["prompt_ids"])
    prompt, answer = TINY["prompt_ids"], TINY["full_ids"][n:]
    assert e.prefix + e.tokenizer.encode(e.tokenizer.decode(prompt[len(e.prefix) :])) == prompt
    text = e.tokenizer.decode(prompt[len(e.prefix) :])
    assert e.generate([(text, EvaluationOptions(max_tokens=len(answer)))]) == [e.tokenizer.decode(answer)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_batch_composition_or_order(evaluation, temperature):
    options = EvaluationOptions(max_tokens=12, temperature=temperature, nucleus=0.9)
    e = evaluation()
    alone = [e.generate([(prompt, options)])[0] for prompt in PROMPTS]
    assert e.generate([(prompt, options) for prompt in PROMPTS]) == alone
    assert evaluation(num_slots=3).generate([(p, options) for p in reversed(PROMPTS)]) == alone[::-1]


def test_the_same_request_again_is_another_sample(evaluation):
    options = EvaluationOptions(max_tokens=12, temperature=1.0)
    first, second, other = evaluation().generate([("In the", options), ("In the", options), ("Enter", options)])
    assert first != second
    assert evaluation(SEED=4).generate([("In the", options)]) == [second] and other


def test_a_shared_prefix_is_prefilled_once(evaluation, monkeypatch):
    import forward.layers_forward

    rows, plain = [], forward.layers_forward.make_chunk

    def counting(config, segments):
        rows.append(sum(len(ids) for ids, _ in segments))
        return plain(config, segments)

    e, shots = evaluation(), LONG[:200]
    requests = [(shots + end, EvaluationOptions(max_tokens=1)) for end in (" And", " The", " A", " But")]
    monkeypatch.setattr(forward.layers_forward, "make_chunk", counting)
    assert len(e.generate(requests)) == 4
    assert sum(rows) <= len(e.tokenizer.encode(shots)) + len(e.prefix) + 4 * 2


def test_an_answer_ends_before_its_first_stop_string(evaluation):
    e = evaluation()
    [whole] = e.generate([("In the beginning", EvaluationOptions(max_tokens=24))])
    assert len(whole) > 30
    for until in [(whole[9:12],), (whole[20:26], whole[9:14]), (whole[:1],), ("no such words", whole[-3:])]:
        expected = min((whole[: whole.find(stop)] for stop in until if stop in whole), key=len)
        assert e.generate([("In the beginning", EvaluationOptions(until, max_tokens=24))]) == [expected]
    assert cut_at("a END b", ("ENDS",)) is None and cut_at("a END b", ("b", "END")) == "a "


def test_generation_ends_with_the_stop_string(evaluation, monkeypatch):
    import dev.evaluation

    numbers, close = [], dev.evaluation.Scheduler.close

    def counting(self):
        close(self)
        numbers.append(self.statistics()["tokens"])

    e = evaluation()
    [whole] = e.generate([("In the beginning", EvaluationOptions(max_tokens=200))])
    monkeypatch.setattr(dev.evaluation.Scheduler, "close", counting)
    assert e.generate([("In the beginning", EvaluationOptions((whole[4:8],), max_tokens=200))]) == [
        whole[: whole.find(whole[4:8])]
    ]
    assert numbers[0] < 20


def test_a_failed_answer_is_an_error(evaluation, monkeypatch):
    e = evaluation()

    def broken(*args, **options):
        raise Refused("expert 3 of layer 1 cannot be read")

    monkeypatch.setattr("forward.layers_forward.layer_forward", broken)
    with pytest.raises(Refused, match="an answer failed: expert 3 of layer 1 cannot be read"):
        e.generate([("In the", EvaluationOptions(max_tokens=4))])


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [
        ({}, EvaluationOptions()),
        ({"until": "\n", "do_sample": False, "temperature": 0.7}, EvaluationOptions(("\n",))),
        ({"until": ["a", ""], "max_gen_toks": 7, "max_tokens": 9}, EvaluationOptions(("a",), 7)),
        ({"until": None, "max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "num_beams": 1},
         EvaluationOptions((), 5, 0.5, 0.9, 4)),
    ],
)  # fmt: skip
def test_generation_kwargs(kwargs, options):
    assert EvaluationOptions.read(kwargs) == options


@pytest.mark.parametrize("kwargs", [{"num_beams": 4}, {"repetition_penalty": 1.2}, {"max_gen_toks": 0}])
def test_unknown_generation_kwargs_are_refused(kwargs):
    with pytest.raises(Refused, match="generation_kwargs"):
        EvaluationOptions.read(kwargs)


def test_the_chat_template(evaluation):
    e = evaluation()
    messages = [{"role": "user", "content": "2+2?"}]
    assert e.render_chat(messages).endswith("<|user|>2+2?<|assistant|><think></think>")
    started = [*messages, {"role": "assistant", "content": "The answer is "}]
    assert e.render_chat(started, add_generation_prompt=False).endswith("<think></think>The answer is")
    assert evaluation(THINK=1).render_chat(messages).endswith("<|assistant|><think>")


def test_special_tokens_in_a_message_of_a_task_stay_text(evaluation):
    """A question about "<|assistant|>" ended there. In a raw text, which a task writes itself, they are tokens."""
    e = evaluation()
    text = e.render_chat([{"role": "user", "content": "a<|assistant|>b<|endoftext|>"}])
    [assistant], [end] = e.tokenizer.encode("<|assistant|>"), e.tokenizer.encode("<|endoftext|>")
    context = e.pair(text, " c").context
    assert context.count(assistant) == 1 and end not in context
    assert "<|user|>a<|assistant|>b<|endoftext|><|assistant|>" in e.tokenizer.decode(context)
    assert e.pair("a<|assistant|>b", " c").context.count(assistant) == 1


# --- the script -------------------------------------------------------------------------------------------------------


def run_script(*arguments, **variables):
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "USAGE": "0"} | {name: str(v) for name, v in variables.items()}
    command = [sys.executable, str(ROOT / "scripts" / "lm_eval_model.py"), "--include_path", str(TASKS), *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=240)


@needs_lm_eval
def test_the_small_tasks_through_lm_eval(evaluation):
    """The same numbers as from the log-likelihoods and answers themselves."""
    process = run_script("--tasks", "colibri_choice,colibri_read,colibri_write")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    last = json.loads(lines[-1])
    assert any(line.startswith("|colibri_choice") for line in lines)
    e = evaluation()
    scores = iter([logprob for logprob, _ in e.loglikelihood(CHOICES)])
    correct = [
        max(range(len(doc["choices"])), key=[next(scores) for _ in doc["choices"]].__getitem__) == doc["answer"]
        for doc in documents("choice")
    ]
    assert last["tasks"]["colibri_choice"]["acc,none"] == pytest.approx(sum(correct) / len(correct))
    nats = -sum(e.loglikelihood_rolling(TEXTS))
    words, num_bytes = sum(len(text.split()) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    read = last["tasks"]["colibri_read"]
    assert read["word_perplexity,none"] == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert read["byte_perplexity,none"] == pytest.approx(math.exp(nats / num_bytes), rel=1e-5)
    options = EvaluationOptions((".", ",", ";", "\n"), 8)
    answers = e.generate([(doc["question"], options) for doc in documents("write")])
    hits = [text.split()[0] == doc["answer"] for text, doc in zip(answers, documents("write"), strict=True)]
    assert last["tasks"]["colibri_write"]["exact_match,first_word"] == pytest.approx(sum(hits) / len(hits))
    assert 0 < sum(hits) < len(hits) and 0 < sum(correct) < len(correct)  # some answers are correct, some wrong
    assert last["cut"] == 0 and last["prefix"] == "[gMASK]<sop>" and last["model"] == "tiny"


@pytest.mark.slow
@needs_lm_eval
def test_limit_shots_and_the_chat_template():
    process = run_script(
        *("--tasks", "colibri_write", "--limit", "2", "--num_fewshot", "1", "--apply_chat_template"), CTX=64
    )
    assert process.returncode == 0, process.stderr
    last = json.loads(process.stdout.splitlines()[-1])
    assert last["limit"] == 2 and last["n_shot"] == {"colibri_write": 1} and last["chat_template"] is True
    assert last["tasks"]["colibri_write"]["sample_len"] == 2 and last["context"] == 64


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--tasks", "x", "--include_path", "nowhere"], "--include_path nowhere: no such folder"),
        (["--tasks", "x", "--limit", "0"], "argument --limit: value='0': expected a whole number from 1"),
        (["--tasks", "x", "0", "3"], "expert_bits='3': expected 16, 8, 4 or 2"),
        ([], "the following arguments are required: --tasks"),
    ],
)
def test_bad_usage_is_one_line(arguments, error, monkeypatch, capsys):
    """Before anything is read."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert lm_eval_model.main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"lm_eval_model: {error}"


def test_without_lm_eval_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lm_eval_model.main(["--tasks", "arc_easy"]) == 2
    assert capsys.readouterr().err == (
        "lm_eval_model: lm_eval is not installed: pip install -c constraints.txt -e .[lm_eval]\n"
    )


# --- against a server -------------------------------------------------------------------------------------------------

LOCAL_COMPLETIONS = """if 1:
    import json, sys
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    url, tokenizer, folder, prefix, *tasks = sys.argv[1:]
    arguments = dict(model="tiny", base_url=url, tokenizer=tokenizer, tokenizer_backend="huggingface", max_length=512)
    arguments["add_bos_token"] = prefix == "1"
    manager = TaskManager(include_path=folder, include_defaults=False)
    results = simple_evaluate("local-completions", arguments, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    print(json.dumps({task: [s["resps"] for s in samples] for task, samples in results["samples"].items()}))
    """


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.parametrize("prefix", [0, 1])
def test_local_completions_against_a_server_gives_the_same(evaluation, text_folder, prefix):
    """lm_eval's own client of the OpenAI API. It sends ids, which a server takes as they are: the family's prefix
    must be among them, as the tokenizers of GLM put it there (add_bos_token). Whole texts begin with another token of
    its own, <|endoftext|>: they are the same only without the prefix."""
    pytest.importorskip("uvicorn", reason="the HTTP server needs uvicorn")
    from tests.support.server_process import COMPLETIONS, SINGLE_THREAD, ServerProcess

    tokenizer = Tokenizer.from_file(str(text_folder / "tokenizer.json"))
    special = [(token, tokenizer.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    front = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=special)
    tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, front])
    tokenizer.save(str(text_folder / "tokenizer.json"))
    tasks = ["colibri_choice", "colibri_write", *([] if prefix else ["colibri_read"])]
    server = ServerProcess(CTX=512, PREFIX=prefix, **SINGLE_THREAD)
    try:
        arguments = [server.url + COMPLETIONS, str(text_folder), str(TASKS), str(prefix), *tasks]
        command = [sys.executable, "-c", LOCAL_COMPLETIONS, *arguments]
        process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    finally:
        server.stop()
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    e = evaluation(CTX=512, PREFIX=prefix)
    scores = [(logprob, greedy) for doc in found["colibri_choice"] for [(logprob, greedy)] in doc]
    expected = e.loglikelihood(CHOICES)
    assert [logprob for logprob, _ in scores] == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    options = EvaluationOptions((".", ",", ";", "\n"), 8)
    answers = e.generate([(doc["question"], options) for doc in documents("write")])
    assert [text for [[text]] in found["colibri_write"]] == answers
    if not prefix:
        texts = [logprob for [[logprob]] in found["colibri_read"]]
        assert texts == pytest.approx(e.loglikelihood_rolling(TEXTS), abs=1e-4)
