"""Synthetic snapshots: every format runs, bytes follow from the seed, and the routing is as described."""

import errno
import hashlib
import json

import numpy as np
import pytest
import torch

import dev.make_synthetic
from dev.make_synthetic import main
from dev.synthetic.report import measure_folder, record_routes
from dev.synthetic.structure import popularity
from dev.synthetic.tensors import SILU_RMS
from dev.synthetic.text import topic_ids
from experts.disk import PAGE
from forward.kv_cache import make_kv_cache
from forward.step import step, step_all
from kernels.dispatch import gated_mlp
from kernels.formats import FORMATS
from scripts.container import Shard

NAMES = "f32 f16 bf16 fp8-b128 int8-row int8-g64 int4-row int4-g64 int3-g64 int2-row int2-g64".split()
# Sizes that are no multiples of 64 where a format allows it.
SMALL = "--hidden 192 --moe-width 80 --experts 16 --active 4 --layers 3 --vocab 300 --prompt 20 --tokens 10".split()
HIDDEN, WIDTH = 192, 80


def make(folder, *arguments, report_tokens=0):
    assert main(["small", str(folder), *arguments, "--report-tokens", str(report_tokens)]) == 0
    return folder


def full_ids(folder):
    return json.loads((folder / "ref_glm.json").read_text())["full_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_runs_and_has_its_size(name, load, tmp_path):
    folder = make(tmp_path / "s", *SMALL, "--format", name)
    loaded, fmt = load(folder, cap=16), FORMATS[name]
    assert set(loaded.disk.formats()) == {fmt}
    for (layer, _), layout in loaded.disk.layouts.items():
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        scale_bytes = 2 if fmt.is_integer else 4
        assert layout.stored_bytes == sum(fmt.num_bytes(*shape, scale_bytes) for shape in shapes)
        assert len(layout.ranges) == 1 and layout.ranges[0].offset % PAGE == 0
        assert loaded.disk.expert_bytes[layer] == layout.num_bytes == -(-layout.stored_bytes // 4096) * 4096
    ids = full_ids(folder)
    logits = step_all(loaded.model, [(ids, make_kv_cache(loaded.config, len(ids)))])
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3  # of sane size, and not the same for every token
    assert logits.std(0).mean() > 0.3


def test_experts_and_the_rest_in_different_formats(load, tmp_path):
    folder = make(tmp_path / "s", *SMALL, "--format", "int2-g64", "--dense-format", "bf16")
    loaded = load(folder)
    assert [str(fmt) for fmt in loaded.disk.formats()] == ["int2-g64"]
    assert {str(stored.format) for stored in loaded.dense.matrices.values()} == {"bf16"}


def test_without_an_indexer(load, tmp_path):
    folder = make(tmp_path / "s", *SMALL, "--no-indexer")
    assert not any(key.startswith("index_") for key in json.loads((folder / "config.json").read_text()))
    loaded, ids = load(folder, cap=16), full_ids(folder)
    assert not loaded.model.weights.has_indexer
    assert step_all(loaded.model, [(ids, make_kv_cache(loaded.config, len(ids)))]).isfinite().all()


def digest(folder):
    files = sorted(path for path in folder.iterdir())
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


def test_the_seed_decides_every_byte(tmp_path):
    first, second = (make(tmp_path / name, *SMALL, "--seed", "7") for name in "ab")
    assert digest(first) == digest(second)
    assert digest(make(tmp_path / "c", *SMALL, "--seed", "8"))[1:] != digest(first)[1:]


def test_all_formats_get_the_same_text_and_routers(load, tmp_path):
    a, b = (make(tmp_path / name, *SMALL, "--format", name) for name in ("f32", "int4-g64"))
    assert (a / "ref_glm.json").read_text() == (b / "ref_glm.json").read_text()
    for one, other in zip(load(a).model.weights.layers[1:], load(b).model.weights.layers[1:], strict=True):
        assert torch.equal(one.mlp.router.data, other.mlp.router.data)
        assert torch.equal(one.mlp.router_bias, other.mlp.router_bias)


@pytest.mark.parametrize("name", ["bf16", "fp8-b128", "int8-row", "int4-g64", "int3-g64", "int2-g64"])
def test_weights_have_mean_zero_and_experts_are_independent(name, load, tmp_path):
    """Random bytes have not: nibbles of mean -0.5 add one direction to everything, and all tokens route alike."""
    folder = make(tmp_path / "s", *SMALL, "--hidden", "256", "--moe-width", "256", "--format", name)
    model = load(folder, cap=16).model
    x, outputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), []
    with model.experts.request(1, dict.fromkeys(range(16), 1)) as request:
        experts = [one for batch in request.ready(0, 16) for one in batch]  # each has an expert slot of its own
    for _, matrices in experts:
        for weight in matrices:
            values = weight.dequantize()
            assert abs(values.mean()) < 0.02 * values.std()
        outputs.append(gated_mlp(x, *matrices).flatten())
    cosines = torch.corrcoef(torch.stack(outputs)) - torch.eye(16)
    assert cosines.abs().max() < 0.1
    # The size that the layer was scaled for: MLPs of the sparse layers add 0.4 with the shared expert.
    routed = torch.stack(outputs).square().mean().sqrt()
    assert routed == pytest.approx(0.4 * (1 + 2.5**2 / 4) ** -0.5, rel=0.25)


# --- routing ----------------------------------------------------------------------------------------------------------

ROUTING = "--hidden 256 --moe-width 32 --experts 256 --layers 3 --vocab 8192 --prompt 1000 --tokens 280".split()


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """routing -> what it did over 1,280 tokens, means over the layers, and the folder."""
    known = {}

    def routed(name):
        if name not in known:
            folder = make(tmp_path_factory.mktemp("synthetic") / name, *ROUTING, "--routing", name)
            rows = measure_folder(folder, 1280)[1]
            known[name] = {what.strip(): np.nanmean(values) for what, values in rows}, folder
        return known[name]

    return routed


def test_trace_routing_is_skewed_and_changes_slowly(routed):
    numbers, _ = routed("trace")
    assert 0.09 < numbers["new experts per 128 tokens"] < 0.18
    assert 0.45 < numbers["Zipf exponent"] < 0.85
    assert numbers["distinct experts"] > 245
    assert 0.1 < numbers["overlap, neighbors"] < 0.25
    assert numbers["hit rate, cap 64, LRU"] > 0.5 > 64 / 256
    assert 0.5 < numbers["predicted one layer early"] < 0.9


def test_trace_routing_follows_the_context(routed, load):
    """Too large embeddings would make the route a function of the token id, and any predictor perfect."""
    numbers, folder = routed("trace")
    model, ids = load(folder, cap=256).model, full_ids(folder)
    far = numbers["overlap, same id beyond 256"]
    assert far < 0.4 and far < 0.75 * numbers["overlap, same id within 16"]
    assert far > 1.5 * numbers["overlap, other id 256 apart"]  # the token matters too
    # One id at the end of two different texts, at the same position.
    routes = [record_routes(model, text + [5])[0] for text in (ids[:200], ids[500:700])]
    shared = [len(set(a[-1]) & set(b[-1])) / 8 for a, b in zip(*routes, strict=True)]
    assert np.mean(shared) < 0.6


def test_uniform_routing_is_even(routed):
    numbers, _ = routed("uniform")
    assert numbers["entropy of use, 1 = even"] > 0.97
    assert numbers["distinct experts in 128 tokens"] > 240
    assert numbers["overlap, neighbors"] < 0.1
    assert numbers["hit rate, cap 64, LRU"] < 0.35


def test_activations_keep_their_size(routed, load, monkeypatch):
    import forward.layers_forward

    folder = routed("trace")[1]
    loaded, ids = load(folder), full_ids(folder)
    plain, sizes = forward.layers_forward.layer_forward, []

    def recording(model, layer, weights, x, *rest):
        out = plain(model, layer, weights, x, *rest)
        sizes.append(out.square().mean(-1).sqrt())
        return out

    monkeypatch.setattr(forward.layers_forward, "layer_forward", recording)
    step(loaded.model, [(ids[:300], make_kv_cache(loaded.config, 300))])
    for size in sizes:
        assert size.min() > 0.8 and size.max() < 6
        assert 1 < size[100:].mean() < 2.5


def test_popularity_sums_to_the_experts_of_a_token():
    for experts, active, exponent in ((256, 8, 0.0), (256, 8, 0.55), (256, 8, 1.5), (4, 3, 1.0), (8, 1, 2.0)):
        chances = popularity(experts, active, exponent)
        assert chances.sum() == pytest.approx(active, rel=1e-3) and chances.max() < 1
        assert (np.diff(chances) <= 0).all()


def test_silu_rms():
    a, b = torch.randn(2, 1_000_000, generator=torch.Generator().manual_seed(0))
    assert (torch.nn.functional.silu(a) * b).square().mean().sqrt() == pytest.approx(SILU_RMS, rel=0.01)


def test_a_text_has_frequent_words_and_topics():
    ids = topic_ids(4096, 4000, np.random.default_rng(0))
    counts = np.sort(np.bincount(ids, minlength=4096))[::-1]
    assert 0.005 < counts[0] / 4000 < 0.1 and counts[:100].sum() > 1000
    first, near, far = (set(ids[at : at + 200]) for at in (0, 200, 3800))
    assert len(first & near) > 1.5 * len(first & far)


def test_the_report_is_a_table(tmp_path, capsys):
    make(tmp_path / "s", *SMALL, report_tokens=30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 's'}: 0.00 GB in ")
    assert lines[1] == "routing over 30 tokens, 16 experts, 4 a token"
    assert lines[2].split() == "layer 1 layer 2 mean".split()
    assert len({len(line) for line in lines[2:]}) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--seed", "-1"), "--seed is -1, it must be 0 or more"),
        (("--report-tokens", "-3"), "--report-tokens is -3, it must be 0 or more"),
        (("--layers", "0"), "--layers is 0, it must be 1 or more"),
        (("--hidden", "63"), "--hidden is 63, it must be 64 or more"),
        (("--vocab", "15"), "--vocab is 15, it must be 16 or more"),
        (("--experts", "70000"), "n_routed_experts is 70000, expected a whole number from 1 to 65536"),
        (("--experts", "65536", "--layers", "4"), "n_routed_experts makes 65536 experts in 3 layers, above 131072"),
        (("--layers", "1100"), "num_hidden_layers is 1100, expected a whole number from 1 to 1024"),
        (("--layers", "100000"), "num_hidden_layers is 100000, expected"),
    ],
)
def test_bad_sizes_are_refused_before_anything_is_written(arguments, message, tmp_path, capsys):
    assert main(["small", str(tmp_path / "s"), *SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("make_synthetic: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_bad_usage_is_refused(tmp_path, capsys):
    folder = make(tmp_path / "s", *SMALL)
    for arguments, message in (
        (["small", str(folder), *SMALL], "holds weights already"),
        (["small", str(folder / "config.json"), *SMALL], "is a file; DST must name a folder"),
        (["small", str(folder / "config.json" / "s"), *SMALL], "config.json/s: Not a directory"),
        (["glm-5.2", str(tmp_path / "t"), "--hidden", "64"], "--hidden is for the model small, glm-5.2 has its own"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("make_synthetic: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "error, code, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "make_synthetic: {}: No space left on device; {}"),
        (KeyboardInterrupt(), 130, "make_synthetic: interrupted; {}"),
    ],
)
def test_a_failed_run_is_one_line(error, code, message, tmp_path, capsys, monkeypatch):
    plain, folder = Shard.write, tmp_path / "s"

    def breaking_off(shard, *rest, **options):
        if "00002" in shard.name:
            raise error
        plain(shard, *rest, **options)

    monkeypatch.setattr(Shard, "write", breaking_off)
    assert main(["small", str(folder), *SMALL]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.strip() == message.format(*[folder] * message.count("{}")) + " is unfinished, delete it"


def test_an_interrupted_report_leaves_the_snapshot(tmp_path, capsys, monkeypatch):
    def breaking_off(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(dev.make_synthetic, "print_report", breaking_off)
    assert main(["small", str(tmp_path / "s"), *SMALL]) == 130
    assert capsys.readouterr().err.strip() == "make_synthetic: interrupted"
    assert (tmp_path / "s" / "config.json").exists()
