"""dev/quality.py: order of the results, numbers against their definitions, refusals."""

import json
import math
import random
import re
import shutil

import pytest
import torch
import torch.nn.functional as F

from dev import quality
from errors import Refused
from forward.kv_cache import make_kv_cache
from forward.step import step_logprobs
from kernels.quantize import SEARCH_STEPS
from scripts import conversion
from scripts.conversion import ConversionOptions
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES

TOKENS = 320
VERSES = """
And the king said unto his servants, Go ye forth into the field, and bring me word again.
In the morning the people came together at the gate of the city, and spake one to another.
The son of the old man took the bread and the water, and gave them to his brother.
Behold, a great wind came from the sea, and the ships were broken upon the rocks.
Then answered the woman and said, My lord, thy servant hath nothing in the house.
He that keepeth his mouth keepeth his life; but the fool speaketh before he thinketh.
Now it came to pass in the third year that there was a famine over all the land.
They built a house of stone, and set watchmen upon the wall by day and by night.
""".split("\n")[1:-1]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder as --texts names it. The eighth chapter is the only text that is held out."""
    folder, lines = tmp_path_factory.mktemp("texts"), random.Random(0).choices(VERSES, k=100)
    short = [f"Ge{chapter}:1 In the beginning." for chapter in range(1, 8)]
    long = [f"Ge8:{verse} {line}" for verse, line in enumerate(lines, 1)]
    (folder / "kjv.txt").write_text("\n".join(short + long))
    (folder / "jargon.txt").write_text("no entries")
    (folder / "plays" / "texts").mkdir(parents=True)
    (folder / "plays" / "texts" / "hamlet_gut.txt").write_text("no scenes")
    return folder


def run(capsys, *arguments):
    """The script in this process -> its exit code, and its lines on stdout and stderr."""
    code = quality.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


@pytest.mark.slow
def test_fewer_bits_cost_more_and_quantized_activations_little(texts, capsys):
    names = "int8-g64 int4-g64 int4-g64:max int4-row int2-g64".split()
    code, out, _ = run(capsys, "--texts", texts, "--tokens", TOKENS, "--json", "--kv-dtypes", "--formats", *names)
    assert code == 0
    numbers = json.loads("\n".join(out))
    assert numbers["tokens"] == TOKENS
    lines = {line["format"]: line for line in numbers["formats"]}
    assert list(lines) == ["16", *names]
    source, eight, four, plain, row, two = lines.values()

    assert source["kl"] == 0 and source["same_argmax"] == 1 and source["rounded"] is None and source["bits"] == 16
    assert 0 < eight["kl"] < four["kl"] < row["kl"] < two["kl"]
    assert four["weight_error"] < plain["weight_error"] and four["bits"] == plain["bits"]
    assert eight["bits"] == 8.25 and 4.25 < four["bits"] < 4.4  # the indexer's are 8
    assert conversion.SEARCH_STEPS is SEARCH_STEPS  # the converter is as it was
    for line in (eight, four, plain, row, two):
        assert 0 < line["rounded"]["kl_alone"] < 0.1 * four["kl"]
        assert line["rounded"]["kl"] == pytest.approx(line["kl"] + line["rounded"]["kl_more"])
        for key in ("kl_more", "kl_alone"):
            assert line["rounded"][f"{key}_of_base"] == pytest.approx(line["rounded"][key] / four["kl"])


def test_the_perplexity_is_the_one_of_the_engine(texts, capsys, load):
    """The rest of a sequence of 1,024 counts too, and routed experts alone can be quantized."""
    arguments = ("--texts", texts, "--tokens", 100, "--formats", "int4-g64", "--experts-alone", "--kv-dtypes")
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and out[0] == "tiny, 100 held-out tokens, routed experts alone quantized"
    [ids] = quality.load_sequences(texts, EMBEDDED_SNAPSHOT, 100)
    loaded = load(EMBEDDED_SNAPSHOT, KERNELS="reference")
    logprobs, _ = step_logprobs(loaded.model, [(ids[:-1], make_kv_cache(loaded.config, 100))], ids[1:])
    sequences = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out if line.startswith("|")]
    weights, activations = sequences[2:4], sequences[6:]
    assert [row[0] for row in weights] == ["16", "int4-g64"] and [row[0] for row in activations] == ["int4-g64"]
    assert len(ids) == 101 and float(weights[0][4]) == pytest.approx(math.exp(-logprobs.mean()), abs=0.001)
    assert 8 < float(weights[1][1]) < 12  # most weights are the experts'


def test_kv_cache_in_fewer_bits(texts, capsys):
    """The same texts with a KV cache in bfloat16 and in 8 bits, no weight format beside them."""
    code, out, _ = run(capsys, "--texts", texts, "--tokens", TOKENS, "--json", "--formats")
    assert code == 0
    numbers = json.loads("\n".join(out))
    assert numbers["formats"] == [] and [line["kv_dtype"] for line in numbers["kv_dtypes"]] == ["f32", "bf16", "int8"]
    exact, half, quarter = numbers["kv_dtypes"]
    assert exact["kl"] == 0 and exact["same_argmax"] == 1 and 0 < half["kl"] < quarter["kl"] < 0.01
    assert exact["position_bytes"] == 2 * half["position_bytes"] > 3 * quarter["position_bytes"]
    _, out, _ = run(capsys, "--texts", texts, "--tokens", 100, "--formats", "--kv-dtypes", "int8")
    assert [line.split("|")[1].strip() for line in out if line.startswith("|")] == ["KV_DTYPE", "---", "f32", "int8"]


def test_divergence_and_error_are_as_defined():
    p, q = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert quality.divergence(p, q) == pytest.approx(float(F.kl_div(q, p, log_target=True, reduction="sum")))
    assert quality.divergence(p, p) == 0
    differences = torch.tensor([1.0, 4.0, 2.0]).double()  # of sequences of 10 tokens
    error = quality.paired_error([3.0, 5.0, 2.0], [2.0, 1.0, 0.0], [10, 10, 10])
    assert error == pytest.approx(float(differences.std() / 10 / 3**0.5))
    assert quality.paired_error([3.0], [2.0], [10]) is None


def test_sequences_are_sampled_from_all_of_the_texts(texts):
    sequences = quality.load_sequences(texts, EMBEDDED_SNAPSHOT, 0)
    assert len(sequences) > 1 and {len(ids) for ids in sequences} == {1025}
    assert quality.load_sequences(texts, EMBEDDED_SNAPSHOT, 10**9) == sequences
    assert quality.load_sequences(texts, EMBEDDED_SNAPSHOT, 1000) == [sequences[0][:1001]]
    assert quality.load_sequences(texts, EMBEDDED_SNAPSHOT, 1025) == [sequences[0], sequences[len(sequences) // 2][:2]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--texts is missing: a folder with kjv.txt, .* dev/train_tiny.py say where"),
        (("--texts", "{tmp}/nowhere"), "no such folder"),
        (("--texts", "{tmp}"), r"holds no kjv.txt and no jargon.txt and no \*_gut.txt"),
        (("--texts", "{texts}", "--formats", "int5"), "--formats int5: no packed format"),
        (("--texts", "{texts}", "--formats", "bf16"), "--formats bf16: no packed format"),
        (("--texts", "{texts}", "--formats", "int4-g64:best"), "no packed format"),
        (("--texts", "{texts}", "--tokens", "many"), "--tokens='many': expected a whole number"),
        (("{tmp}/nowhere", "--texts", "{texts}"), "nowhere: no such folder"),
        (("{tmp}", "--texts", "{texts}"), "config.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message, texts, tmp_path, capsys):
    code, out, err = run(capsys, *(word.format(texts=texts, tmp=tmp_path) for word in arguments))
    assert code == 2 and out == [] and len(err) == 1
    assert err[0].startswith("quality: ") and re.search(message, err[0])


def test_bad_texts_are_one_line(texts, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(texts, broken)
    (broken / "jargon.txt").write_bytes(b"\xff\xfe\xff")
    few = tmp_path / "few"
    shutil.copytree(texts, few)
    (few / "kjv.txt").write_text("Ge1:1 In the beginning.")
    twice = tmp_path / "twice"
    shutil.copytree(texts, twice)
    (twice / "copy_gut.txt").write_text("no scenes")
    for folder, message in ((broken, "cannot be read"), (few, "do not fill one sequence"), (twice, "in 2 folders")):
        code, out, err = run(capsys, "--texts", folder)
        assert code == 2 and out == [] and len(err) == 1 and message in err[0]


def test_a_snapshot_that_is_packed_already_is_refused(tmp_path):
    options = quality.make_options("int4-g64", False)
    numbers = quality.make_container(FIXTURES / "glm_moe_dsa", options, tmp_path / "four")
    assert 0 < numbers["weight_error"] < 0.1 and numbers["bytes"] > 0
    with pytest.raises(Refused, match="holds packed matrices already"):
        quality.make_container(tmp_path / "four", ConversionOptions(16, 16, 16, 16), tmp_path / "again")
