"""scripts/convert.py: the shards it writes, their equality with the source, interruptions, refusals."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

import colibri
from experts.disk import PAGE, ExpertDisk
from forward.kv_cache import make_kv_cache
from forward.step import step_logprobs
from kernels.formats import FORMATS
from kernels.quantize import quantize_fp8
from load import model as load_module
from scripts import convert
from settings import Settings
from snapshot.config_file import read_config
from snapshot.dense import DenseTensors, read_float_tensor, read_stored_weight
from snapshot.index import read_header, read_index
from snapshot.reader import FileReader
from tests.conftest import FIXTURES, ORACLES, ROOT, read_json, reference, write_fused
from tests.forward.test_forward import all_logits, check, greedy
from tests.support.gguf_models import write_as_gguf

TINY = ROOT / "models" / "tiny"
SOURCES = [name for name in ORACLES if name != "glm_moe_dsa_dense"]


def run(source, out, *options):
    """The script in this process -> its exit code."""
    return convert.main([str(source), str(out), *map(str, options)])


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def dequantized(container, out):
    """The same model with every matrix dequantized to F32, under its own names."""
    config, family = read_config(container)
    index, reader, tensors = read_index(container), FileReader(), {}
    dense, disk = DenseTensors(config, family, index), ExpertDisk(config, family, index, reader)
    for name, stored in dense.matrices.items():
        tensors[name] = read_stored_weight(reader, stored).dequantize().clone()
    for name, entry in dense.floats.items():
        tensors[name] = read_float_tensor(reader, entry)
    for layer, expert in disk.layouts:
        for stored in disk.stored_weights(layer, expert):
            tensors[stored.name] = read_stored_weight(reader, stored).dequantize().clone()
    reader.close()
    out.mkdir()
    safetensors.torch.save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text((container / "config.json").read_text())
    return out


OPTIONS = [(), ("--experts", 3), ("--experts", 2, "--dense", 8), ("--group", 0), ("--group", 16, "--scales", "F32")]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "_".join(map(str, options)))
def test_a_container_is_the_model_of_its_dequantized_weights(tmp_path, load, oracle_folder, name, options):
    assert run(oracle_folder(name), tmp_path / "out", "--verify", *options) == 0
    ids, loaded = reference(name)[0]["seq"], load(tmp_path / "out", cap=2, EXACT=1)
    logits = all_logits(loaded.model, ids)
    plain = load(dequantized(tmp_path / "out", tmp_path / "plain"))
    assert {fmt.name for fmt in plain.disk.formats()} == {"f32"}
    torch.testing.assert_close(logits, all_logits(plain.model, ids), atol=2e-5, rtol=0)
    # The C kernels add up in an order of their own for each format; torch dequantizes and does the same arithmetic,
    # up to the last bit: its products depend on where in memory a matrix begins.
    exact = [load(tmp_path / folder, KERNELS="reference", EXACT=1).model for folder in ("out", "plain")]
    torch.testing.assert_close(*(all_logits(model, ids) for model in exact), atol=2e-5, rtol=0)
    assert loaded.model.experts.counters.misses > 0


@pytest.mark.parametrize("name", SOURCES)
def test_sixteen_bits_are_the_source_itself(tmp_path, load, oracle_folder, name):
    bits = [word for role in ("experts", "dense", "embeddings", "mtp") for word in (f"--{role}", 16)]
    assert run(oracle_folder(name), tmp_path / "out", "--verify", *bits) == 0
    before, after = read_index(oracle_folder(name)), read_index(tmp_path / "out")
    reader = FileReader()
    for entry in before.entries.values():
        copy = after.entries[entry.name]
        assert (copy.dtype, copy.shape) == (entry.dtype, entry.shape)
        a, b = bytearray(entry.num_bytes), bytearray(entry.num_bytes)
        reader.read_into(entry.path, entry.offset, memoryview(a), "")
        reader.read_into(copy.path, copy.offset, memoryview(b), "")
        assert a == b
    reader.close()
    check(load(tmp_path / "out", cap=1).model, name)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "glm_moe_dsa_fp8"])
def test_fused_naming_gives_the_same_experts(tmp_path, oracle_folder, name):
    """The same tensors, but for padding, and the MTP layer, which is never fused."""
    fused = write_fused(oracle_folder(name), tmp_path / "fused")
    assert run(oracle_folder(name), tmp_path / "a") == run(fused, tmp_path / "b", "--verify") == 0

    def tensors(folder):
        out = {}
        for path in folder.glob("*.safetensors"):
            out |= safetensors.torch.load_file(path)
        return {key: value for key, value in out.items() if not key.startswith("padding.")}

    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """models/tiny, converted with the defaults."""
    out = tmp_path_factory.mktemp("convert") / "tiny"
    assert run(TINY, out) == 0
    return out


def test_an_expert_is_one_aligned_read(container):
    config, family = read_config(container)
    reader = FileReader()
    disk = ExpertDisk(config, family, read_index(container), reader, (*config.sparse_layers, config.num_layers))
    reader.close()
    assert len(disk.layouts) == (len(config.sparse_layers) + 1) * config.num_experts
    for (layer, _), layout in disk.layouts.items():
        [run] = layout.ranges
        assert run.offset % PAGE == 0 and run.buffer_offset == 0
        weights = 3 * config.hidden_size * config.moe_intermediate_size
        bits = 8.25 if layer == config.num_layers else 4.25
        assert run.num_bytes == layout.stored_bytes == weights * bits / 8
        assert {matrix.format.name for matrix in layout.matrices} == {
            "int8-g64" if layer == config.num_layers else "int4-g64"
        }


def test_the_format_of_each_kind_of_tensor(container):
    index, source = read_index(container), read_index(TINY)
    for name, entry in source.entries.items():
        copy = index.entries[name]
        if len(entry.shape) == 1 or name.endswith("mlp.gate.weight"):
            assert (copy.dtype, copy.shape) == (entry.dtype, entry.shape)
            continue
        at_eight = ("embed_tokens", "lm_head", "indexer", "layers.5.")
        expected = "int8-g64" if any(word in name for word in at_eight) else "int4-g64"
        assert index.declared_format(name) == expected and copy.dtype == "U8" and len(copy.shape) == 1
        assert index.entries[name + ".qs"].dtype == "F16"
        fmt = FORMATS[expected]
        assert copy.num_bytes == entry.shape[0] * fmt.row_bytes(entry.shape[1])
    assert {name.split(".")[0] for name in set(index.entries) - set(source.entries)} == {"padding", "model", "lm_head"}


def test_files_are_ordinary_safetensors(container):
    """The library reads every tensor, at the bytes where the engine reads it."""
    reader = FileReader()
    for path in container.glob("*.safetensors"):
        entries, metadata = read_header(path)
        tensors = safetensors.torch.load_file(path)
        assert set(tensors) == set(entries) and metadata["format"] == "pt"
        for name, entry in entries.items():
            data = bytearray(entry.num_bytes)
            reader.read_into(path, entry.offset, memoryview(data), name)
            assert bytes(data) == tensors[name].flatten().view(torch.uint8).numpy().tobytes()
    reader.close()


def test_the_companion_files_are_copied(container):
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (container / name).read_bytes() == (TINY / name).read_bytes()
    assert (container / "chat_template.jinja").read_bytes() == (TINY / "chat_template.jinja").read_bytes()
    assert not list(container.glob("*.partial"))


def test_further_chat_templates_are_copied(tmp_path, oracle_folder):
    """A template for tools in additional_chat_templates/ would be missing in the container, and tools refused."""
    source = tmp_path / "source"
    shutil.copytree(oracle_folder("glm_moe_dsa"), source)
    (source / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "._tool_use.jinja"):
        (source / "additional_chat_templates" / name).write_text("{{ tools }}")
    assert run(source, tmp_path / "out") == 0 == run(source, tmp_path / "out")
    [copy] = (tmp_path / "out" / "additional_chat_templates").iterdir()
    assert (copy.name, copy.read_text()) == ("tool_use.jinja", "{{ tools }}")


def test_a_container_in_a_process_of_its_own(container, run_colibri):
    process = run_colibri(SNAP=container, PROMPT="In the beginning", NGEN=4, TEMP=0)
    assert process.returncode == 0 and process.stdout and b"[format] experts int4-g64" in process.stderr


def as_fp8(source, out):
    """A snapshot with its matrices as FP8 checkpoints have them."""
    shutil.copytree(source, out)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 2 and name.startswith("model.layers.")]:
        if not name.endswith("mlp.gate.weight"):
            tensors[name], tensors[name + "_scale_inv"] = quantize_fp8(tensors[name].float())
    safetensors.torch.save_file(tensors, out / "model.safetensors")


FORMATS_OF_MODES = {
    "default": ((), "experts int4-g64 | dense int4-g64"),
    "int8": (("--experts", 8, "--dense", 8), "experts int8-g64 | dense int8-g64"),
    "int4_row": (("--group", 0), "experts int4-row | dense int4-row"),
    "int3": (("--experts", 3), "experts int3-g64"),
    "int2": (("--experts", 2, "--dense", 8), "experts int2-g64 | dense int8-g64"),
    "fp8": (None, "experts fp8-b128 | dense fp8-b128"),
}


@pytest.mark.parametrize("name", FORMATS_OF_MODES)
def test_every_mode_runs_on_every_format(name, tmp_path, load, monkeypatch, capsys):
    """Each mode of colibri.run gives the numbers of the same weights dequantized to F32."""
    options, formats = FORMATS_OF_MODES[name]
    folder, plain = tmp_path / "out", tmp_path / "plain"
    if options is None:
        as_fp8(TINY, folder)
    else:
        assert run(TINY, folder, *options) == 0
    model = load(dequantized(folder, plain)).model
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, plain)
    prompt = read_json(TINY / "ref_glm.json")["prompt_ids"]
    continuation = greedy(model, prompt, 8)
    full = prompt + continuation
    predicted = all_logits(model, full).argmax(-1).tolist()
    reference = {"prompt_ids": prompt, "full_ids": full, "tf_pred": predicted}
    (tmp_path / "ref.json").write_text(json.dumps(reference))
    (tmp_path / "requests.txt").write_text(f"{len(prompt)} 8 {' '.join(map(str, full))}\n")
    logprobs, _ = step_logprobs(model, [(full[:-1], make_kv_cache(model.config, len(full)))], full[1:])

    opened, plain_open = [], load_module.open_snapshot
    monkeypatch.setattr(
        load_module, "open_snapshot", lambda settings: opened.append(plain_open(settings)) or opened[-1]
    )

    def mode(snapshot=folder, **variables):
        environ = {"SNAP": snapshot, "EXACT": 1, **variables}
        try:
            code = colibri.run(Settings.read([], {key: str(value) for key, value in environ.items()}))
        finally:
            while opened:  # which the end of the process does otherwise
                opened.pop().close()
        printed = capsys.readouterr()
        assert code == 0, printed.err
        assert (formats if snapshot == folder else "experts f32") in printed.err
        return printed.out

    capsys.readouterr()
    ref, report = tmp_path / "ref.json", tmp_path / "report.json"
    assert "oracle: 8/8 tokens equal" in mode(REF=ref)
    assert f"{len(full)}/{len(full)} positions equal" in mode(TF=1, REF=ref)
    [line] = mode(SCORE=tmp_path / "requests.txt").splitlines()
    logprob, count, is_greedy = line.split()
    assert float(logprob) == pytest.approx(logprobs[-8:].sum().item(), abs=1e-4) and (count, is_greedy) == ("8", "1")
    assert mode(REPLAY=1, REF=ref, REPORT=report).startswith("REPLAY decode: 8 token in ")
    assert read_json(report)["argmax_equal"] == 8
    text = {"PROMPT": "In the beginning", "NGEN": 8, "TEMP": 0, "CTX": 64}
    assert mode(**text) == mode(plain, **text) != ""


# --- stopping, starting again, reading back ---------------------------------------------------------------------------


def test_killed_and_started_again_the_bytes_are_the_same(container, tmp_path):
    out, command = tmp_path / "out", [sys.executable, str(ROOT / "scripts" / "convert.py"), str(TINY)]
    for _ in range(5):
        process = subprocess.Popen([*command, str(out), "--threads", "1"], stderr=subprocess.DEVNULL)
        while not (out / "model-00002-of-00007.safetensors").exists() and process.poll() is None:
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        files = {path.name for path in out.glob("*.safetensors")}
        if len(files) < 7:
            break
        for path in out.iterdir():  # it ended before the signal
            path.unlink()
    assert 2 <= len(files) < 7
    times = {name: (out / name).stat().st_mtime_ns for name in files}
    assert run(TINY, out, "--threads", 3) == 0
    assert {name: (out / name).stat().st_mtime_ns for name in files} == times  # complete files are not written again
    assert contents(out) == contents(container)


def test_an_interruption_in_the_middle_of_a_file(container, tmp_path, monkeypatch, capsys):
    plain, asked = convert.Conversion.expert_group, []

    def interrupted(self, layer, expert, role):
        group = plain(self, layer, expert, role)
        if (layer, expert) == (2, 7):
            read_contents = group.read_contents
            group.read_contents = lambda reader: (
                asked.append(1) or (_ for _ in ()).throw(KeyboardInterrupt) or read_contents(reader)
            )
        return group

    monkeypatch.setattr(convert.Conversion, "expert_group", interrupted)
    assert run(TINY, tmp_path / "out") == 130 and asked
    assert "continues with the file it was at" in capsys.readouterr().err
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert len(list((tmp_path / "out").glob("*.partial"))) == 1
    monkeypatch.undo()
    assert run(TINY, tmp_path / "out") == 0
    assert contents(tmp_path / "out") == contents(container)


def test_another_conversion_in_the_folder_is_refused(container, tmp_path, capsys):
    before = contents(container)
    assert run(TINY, container, "--experts", 8) == 2
    assert "of another source or other options" in capsys.readouterr().err
    assert run(FIXTURES / "glm_moe_dsa", container) == 2 and contents(container) == before
    assert "is no file of this container" in capsys.readouterr().err
    assert run(TINY, container) == 0 and "7 of 7 files are there already" in capsys.readouterr().err
    assert contents(container) == before


@pytest.mark.parametrize(("first", "second"), [
    (("--experts", 4), ("--experts", 3)),
    (("--scales", "F32"), ("--group", 32)),  # as many bytes, and as many scales of half the width
])  # fmt: skip
def test_files_of_other_options_are_refused(tmp_path, first, second, capsys):
    """Also where the existing files have the size of those that would be written."""
    assert run(TINY, tmp_path / "out", *first) == 0
    for path in sorted((tmp_path / "out").glob("*.safetensors"))[4:]:
        path.unlink()
    before = contents(tmp_path / "out")
    capsys.readouterr()
    assert run(TINY, tmp_path / "out", *second) == 2
    assert "of another source or other options" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_source_that_changed_is_noticed(tmp_path, place, capsys):
    """The header stays equal: the first byte of data, the last, or a fifteenth of the data in the middle changes."""
    source = copy_of("glm_moe_dsa", tmp_path / "source", lambda tensors: None)
    assert run(source, tmp_path / "out") == 0
    path = source / "model.safetensors"
    start = min(entry.offset for entry in read_header(path)[0].values())
    data = bytearray(path.read_bytes())
    step = -(-(len(data) - start) // 15)
    middle = start + 7 * step + step // 2
    changed = {
        "first": slice(start, start + 1), "middle": slice(middle, middle + step), "last": slice(len(data) - 1, None)
    }[place]  # fmt: skip
    data[changed] = bytes(byte ^ 1 for byte in data[changed])
    path.write_bytes(data)
    (tmp_path / "out" / "model-00002-of-00006.safetensors").unlink()
    capsys.readouterr()
    assert run(source, tmp_path / "out") == 2
    assert "of another source or other options" in capsys.readouterr().err


def test_a_second_conversion_into_one_folder_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run(FIXTURES / "glm_moe_dsa", out) == 2
    printed = capsys.readouterr().err
    assert f"{out}: another conversion is writing there" in printed and len(printed.splitlines()) == 1
    assert not list(out.iterdir())
    os.close(descriptor)
    assert run(FIXTURES / "glm_moe_dsa", out) == run(FIXTURES / "glm_moe_dsa", out) == 0
    assert not [name for name in contents(out) if not name.endswith((".safetensors", ".json"))]


def test_a_file_that_is_cut_off_or_foreign_is_to_be_deleted(container, tmp_path, capsys):
    out = shutil.copytree(container, tmp_path / "out")
    path = out / "model-00003-of-00007.safetensors"
    os.truncate(path, path.stat().st_size - 5)
    for _ in range(2):
        capsys.readouterr()
        assert run(TINY, out) == 2
        printed = capsys.readouterr().err
        assert "delete" in printed and "download" not in printed and str(path) in printed
        path.write_bytes(b"no safetensors")


def test_an_index_of_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert run(FIXTURES / "glm_moe_dsa", tmp_path) == 2
    assert "model.safetensors.index.json: belongs to another snapshot" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_partial_files_of_others_are_left_alone(tmp_path, monkeypatch, capsys):
    """They do not count as free either."""
    (tmp_path / "film.partial").write_bytes(bytes(2_000_000))
    usage = shutil.disk_usage(tmp_path)
    free = convert.SPARE_BYTES + 1000
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage._replace(free=free))
    assert run(FIXTURES / "glm_moe_dsa", tmp_path) == 2 and "the disk has 1.07 GB" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(FIXTURES / "glm_moe_dsa", tmp_path) == 0
    assert (tmp_path / "film.partial").stat().st_size == 2_000_000


def test_an_interrupted_verify_says_that_it_starts_anew(container, monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "checksum", interrupted)
    assert run(TINY, container, "--verify") == 130
    printed = capsys.readouterr().err
    assert "verifying starts anew" in printed and "continues with the file" not in printed


@pytest.mark.parametrize("name", ["data", "scales", "copy"])
def test_verify_finds_what_was_changed(container, tmp_path, name, capsys):
    out = tmp_path / "out"
    out.mkdir()
    for file, data in contents(container).items():
        (out / file).write_bytes(data)
    layer = "model.layers.2."
    tensor = {
        "data": layer + "mlp.experts.3.up_proj.weight",
        "scales": layer + "mlp.experts.3.up_proj.weight.qs",
        "copy": layer + "input_layernorm.weight",
    }[name]
    entry = read_index(out).entries[tensor]
    with open(entry.path, "r+b") as file:
        file.seek(entry.offset + 8)
        byte = file.read(1)[0]
        file.seek(entry.offset + 8)
        file.write(bytes([byte ^ 1]))
    assert run(TINY, out, "--verify") == 1
    printed = capsys.readouterr().out
    assert f"DIFFERS {entry.path.name}: its bytes do not have the checksum" in printed
    assert f"DIFFERS {tensor.removesuffix('.qs')}" in printed and "verify: 2 differences" in printed


def test_verify_prints_the_relative_error(container, capsys):
    assert run(TINY, container, "--verify") == 0
    lines = dict(line.split(": relative error ") for line in capsys.readouterr().out.splitlines() if "relative" in line)
    errors = {role: float(text.split()[0]) for role, text in lines.items()}
    assert set(errors) == {
        "experts int4-g64", "dense int4-g64", "embeddings int8-g64", "indexer int8-g64", "mtp int8-g64"
    }  # fmt: skip
    assert all((0.08 < error < 0.1) if "int4" in role else (0.004 < error < 0.008) for role, error in errors.items())


# --- sources of other kinds -------------------------------------------------------------------------------------------


def test_a_container_is_not_quantized_twice(container, tmp_path, capsys):
    """A matrix with as few bits already is copied; only the layout changes."""
    assert run(container, tmp_path / "again", "--verify") == 0
    before, after = read_index(container), read_index(tmp_path / "again")
    reader = FileReader()
    for name, entry in before.entries.items():
        if not name.startswith("padding."):
            copy = after.entries[name]
            data = [bytearray(entry.num_bytes) for _ in range(2)]
            reader.read_into(entry.path, entry.offset, memoryview(data[0]), name)
            reader.read_into(copy.path, copy.offset, memoryview(data[1]), name)
            assert data[0] == data[1]
    reader.close()
    assert run(container, tmp_path / "fewer", "--experts", 2, "--verify") == 0
    assert read_index(tmp_path / "fewer").declared_format("model.layers.2.mlp.experts.0.up_proj.weight") == "int2-g64"


def test_a_container_of_the_c_engine_is_laid_out_anew(tmp_path, load):
    from tests.snapshot.test_formats import c_container

    c_container(FIXTURES / "glm_moe_dsa_mtp", tmp_path / "c", 16)
    assert run(tmp_path / "c", tmp_path / "out", "--verify") == 0
    loaded, ids = load(tmp_path / "out", cap=1, EXACT=1), reference("glm_moe_dsa_mtp")[0]["seq"]
    assert {fmt.name for fmt in loaded.disk.formats()} == {"int4-g16"}
    assert {len(layout.ranges) for layout in loaded.disk.layouts.values()} == {1}
    expected = all_logits(load(tmp_path / "c", EXACT=1).model, ids)
    torch.testing.assert_close(all_logits(loaded.model, ids), expected, atol=1e-5, rtol=0)


def test_the_mtp_layer_can_be_left_out_and_unknown_tensors_come_along(tmp_path, oracle_folder):
    source = tmp_path / "source"
    source.mkdir()
    tensors = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa_mtp" / "model.safetensors")
    tensors["rotary.inv_freq"] = torch.arange(5)
    safetensors.torch.save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text((FIXTURES / "glm_moe_dsa_mtp" / "config.json").read_text())
    assert run(source, tmp_path / "out", "--mtp", 0, "--verify") == 0
    index = read_index(tmp_path / "out")
    assert not index.has_layer("model.layers.5.")
    entry = index.entries["rotary.inv_freq"]
    assert entry.path.read_bytes()[entry.offset :][: entry.num_bytes] == torch.arange(5).numpy().tobytes()


# --- refusals ---------------------------------------------------------------------------------------------------------


def copy_of(name, out, change):
    out.mkdir()
    tensors = safetensors.torch.load_file(FIXTURES / name / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text((FIXTURES / name / "config.json").read_text())
    return out


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, capsys):
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    source = copy_of("glm_moe_dsa", tmp_path / "source", lambda tensors: tensors[name].view(-1)[5].fill_(torch.nan))
    assert run(source, tmp_path / "out") == 2
    assert f"tensor {name} holds a NaN or infinity" in capsys.readouterr().err


def test_a_companion_that_is_a_link_to_nothing_is_refused(tmp_path, capsys):
    source = copy_of("glm_moe_dsa", tmp_path / "source", lambda tensors: None)
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    assert run(source, tmp_path / "out") == 2
    assert "tokenizer.json: links to a file that is not there" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("expert", [0, 5])
def test_experts_that_are_there_twice(tmp_path, expert, capsys):
    fused = write_fused(FIXTURES / "glm_moe_dsa", tmp_path / "fused")
    tensors = safetensors.torch.load_file(fused / "model.safetensors")
    name = f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"
    tensors[name] = torch.zeros(2, 2)
    safetensors.torch.save_file(tensors, fused / "model.safetensors")
    assert run(fused, tmp_path / "out") == 2
    assert f"has its experts twice, as {name} and fused" in capsys.readouterr().err


def test_folders_whose_names_are_no_text(tmp_path):
    name = os.fsdecode(b"s\xff")
    source = copy_of("glm_moe_dsa", tmp_path / name, lambda tensors: None)
    assert run(source, tmp_path / "out") == run(source, tmp_path / (name + "out"), "--verify") == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        safetensors.torch.load_file(path)
        assert read_header(path)[1]["colibri.source"].startswith("s\\udcff ")


@pytest.mark.parametrize("name", ["eh_proj.weight", "mlp.experts.3.up_proj.weight"])
def test_an_mtp_layer_that_is_not_whole_can_be_left_out(tmp_path, name, capsys):
    name = "model.layers.5." + name
    source = copy_of("glm_moe_dsa_mtp", tmp_path / "source", lambda tensors: tensors.pop(name))
    assert run(source, tmp_path / "out") == 2
    expected = f"{name} is missing; is the download complete? Or leave the MTP layer out with --mtp 0"
    assert expected in capsys.readouterr().err
    assert run(source, tmp_path / "out", "--mtp", 0, "--verify") == 0


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_weights_whose_scales_do_not_fit_f16(tmp_path, factor, capsys):
    name = "model.layers.0.self_attn.o_proj.weight"
    source = copy_of("glm_moe_dsa", tmp_path / "source", lambda tensors: tensors[name].mul_(factor))
    assert run(source, tmp_path / "out") == 2
    assert f"tensor {name}: its scales are outside the range of F16; use --scales F32" in capsys.readouterr().err
    assert run(source, tmp_path / "out32", "--scales", "F32", "--verify") == 0


def test_bad_folders_and_a_full_disk(tmp_path, capsys, monkeypatch):
    source = FIXTURES / "glm_moe_dsa"
    (tmp_path / "file").write_text("x")
    gguf = write_as_gguf(FIXTURES / "olmoe", tmp_path / "model.gguf")
    for arguments, message in [
        ((tmp_path / "none", tmp_path / "out"), "none: no such folder"),
        ((tmp_path / "file", tmp_path / "out"), "file: no such folder"),
        ((gguf, tmp_path / "out"), "model.gguf: is a GGUF, which runs as it is (SNAP) and is not converted yet"),
        ((source, tmp_path / "file"), "is a file; DST must name a folder"),
        ((source, source), "is SRC itself"),
        ((source, tmp_path / "file" / "out"), "file/out: Not a directory"),
    ]:
        assert run(*arguments) == 2
        printed = capsys.readouterr().err
        assert message in printed and len(printed.splitlines()) == 1
    usage = convert.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000_000))
    assert run(source, tmp_path / "out") == 2
    assert "the disk has 1.00 GB" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_source_that_is_cut_off(tmp_path, capsys):
    source = copy_of("glm_moe_dsa", tmp_path / "source", lambda tensors: None)
    os.truncate(source / "model.safetensors", 300_000)
    assert run(source, tmp_path / "out") == 2
    assert "is shorter than its header says" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_checksum_is_that_of_the_data(container):
    import hashlib

    for path in container.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % PAGE == 0 and len(data) % PAGE == 0
        assert json.loads(data[8:start])["__metadata__"]["colibri.sha256"] == hashlib.sha256(data[start:]).hexdigest()
    assert read_json(container / "config.json")["model_type"] == "glm_moe_dsa"
