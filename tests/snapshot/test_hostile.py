"""Hostile and broken snapshots: generated headers and configs load or are refused in one line.

Nothing else may happen: no other exception, no hang, no memory beyond what the files themselves are large.
"""

import json
import os
import shutil
import signal
import tracemalloc
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import MAX_LINE, Refused
from load.model import load_model, open_snapshot
from settings import Settings
from snapshot.config import read_config
from snapshot.config_fields import ConfigFields
from snapshot.families import glm_moe_dsa
from snapshot.index import INDEX_FILE, MAX_HEADER_BYTES, read_header
from snapshot.reader import MAX_TEXT_BYTES
from tests.conftest import FIXTURES, read_json
from text.tokenizer import TextTokenizer

ORIGINAL = FIXTURES / "glm_moe_dsa"
CONFIG = read_json(ORIGINAL / "config.json")
MODEL_BYTES = (ORIGINAL / "model.safetensors").read_bytes()
DATA_START = 8 + int.from_bytes(MODEL_BYTES[:8], "little")
HEADER, DATA = json.loads(MODEL_BYTES[8:DATA_START]), MODEL_BYTES[DATA_START:]
NAMES = [name for name in HEADER if name != "__metadata__"]
MODEL_FILES = ("config.json", "generation_config.json", INDEX_FILE, "model.safetensors")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SPARE_BYTES = 64_000_000
shared_folder = [HealthCheck.function_scoped_fixture]
few = settings(max_examples=70, deadline=None, derandomize=True, database=None, suppress_health_check=shared_folder)


# --- tools ------------------------------------------------------------------------------------------------------------


@contextmanager
def bounded(num_bytes, seconds=30):
    """No hang, and neither Python nor torch takes more than num_bytes + SPARE_BYTES."""

    def ring(*_):
        raise AssertionError(f"not done after {seconds} s")

    def empty(*shape, **options):
        tensor = plain_empty(*shape, **options, device="meta")  # takes no memory, knows how much it would be
        assert tensor.numel() * tensor.element_size() <= num_bytes + SPARE_BYTES, f"torch.empty{shape}"
        return plain_empty(*shape, **options)

    plain_empty, torch.empty = torch.empty, empty
    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak <= num_bytes + SPARE_BYTES, f"{peak} bytes of Python objects"
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        torch.empty = plain_empty


def attempt(action, size=0):
    """Run an action within bounds -> the one line of its refusal, or None when it works."""
    try:
        with bounded(size):
            action()
    except Refused as error:
        line = str(error)
        assert line and line.isprintable() and len(line) <= MAX_LINE, repr(line)
        return line
    return None


def open_headers(folder):
    """Everything up to the first weight."""
    open_snapshot(Settings.read([], {"SNAP": str(folder), "RAM_GB": "4"})).reader.close()


def load(folder):
    """The whole way, on a machine of 4 GB."""
    load_model(Settings.read([], {"SNAP": str(folder), "RAM_GB": "4"})).close()


def opened(folder, action=open_headers):
    return attempt(lambda: action(folder), sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))


def refused(folder, *patterns, action=open_headers):
    line = opened(folder, action)
    assert line, "nothing was refused"
    for pattern in patterns:
        assert pattern in line
    return line


# What json.dumps cannot write: numbers and brackets beyond every limit, and near the limit of the parser.
RAW = {"@digits": "9" * 5000, "@deep": "[" * 50_000 + "]" * 50_000, "@inf": "1e999"}
RAW |= {f"@deep{n}": "[" * n + "]" * n for n in (600, 800, 900, 950)}


def dump(value):
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def write_model(path, header, data=DATA):
    """A safetensors file from a header, as JSON value or as bytes."""
    header = header if isinstance(header, bytes) else dump(header)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


FIXED = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 1.5, -0.0, 1e308, float("nan"), "", "8", "x" * 10_000]
FIXED += ["a\nb\x1b[2J", "\ud800", [], [[]], [1] * 100, [10**4000] * 3, {}, {"": {}}, *RAW]
odd = st.sampled_from(FIXED) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def copy_files(source, names, out):
    out.mkdir()
    for name in names:
        shutil.copy(source / name, out)
    return out


def write_config(folder, fields):
    """config.json with other values, null for none."""
    (folder / "config.json").write_bytes(dump(CONFIG | fields))


def write_index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path):
    """A small model; the examples of one property share it, and each puts back what it changed."""
    return copy_files(ORIGINAL, ("config.json", "model.safetensors"), tmp_path / "snapshot")


@contextmanager
def replaced(path, data):
    """The file with other bytes, for a while."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


# --- generated --------------------------------------------------------------------------------------------------------


# Mostly bytes that JSON may hold, for others are found out at once.
bytes_of_json = st.sampled_from(list(b'0123456789-.e,:"[]{} Fu')) | st.integers(32, 126) | st.integers(0, 255)


@pytest.mark.parametrize(("name", "length"), [("model.safetensors", DATA_START), ("config.json", 1800)])
@few
@given(data=st.data())
def test_flipped_bytes(folder, name, length, data):
    changed = bytearray((folder / name).read_bytes())
    places = st.integers(0, length - 1)
    for position, byte in data.draw(st.dictionaries(places, bytes_of_json, min_size=1, max_size=3)).items():
        changed[position] = byte
    with replaced(folder / name, changed):
        opened(folder, load)


@few
@given(st.integers(0, len(MODEL_BYTES) - 1) | st.integers(0, DATA_START + 100), st.binary(max_size=20))
def test_truncated_files(folder, length, rest):
    """A file cut anywhere is refused, also with something else behind the cut."""
    if len(rest) != len(MODEL_BYTES) - length:
        with replaced(folder / "model.safetensors", MODEL_BYTES[:length] + rest):
            refused(folder, "model.safetensors")


@few
@given(st.sampled_from(sorted(HEADER)), st.sampled_from(["dtype", "shape", "data_offsets", "", "new"]), odd, st.data())
def test_other_values_in_a_header(folder, name, key, value, data):
    header = json.loads(json.dumps(HEADER))
    if key == "new":
        header[data.draw(st.text(max_size=10))] = value
    elif not key:
        header[name] = value
    elif isinstance(header[name].get(key), list) and data.draw(st.booleans()):
        header[name][key][data.draw(st.integers(0, len(header[name][key]) - 1))] = value
    else:
        header[name][key] = value
    with replaced(folder / "model.safetensors", b""):
        write_model(folder / "model.safetensors", header)
        opened(folder, load)


KEYS = {*CONFIG, "num_experts", "num_local_experts", "rope_scaling", "rope_theta", "index_topk_pattern", "topk_method"}
KEYS = sorted(KEYS | {"quantization_config"})


@few
@given(st.dictionaries(st.sampled_from(KEYS), odd, min_size=1, max_size=3), st.sets(st.sampled_from(KEYS), max_size=2))
def test_other_values_in_a_config(folder, fields, absent):
    config = {key: value for key, value in (CONFIG | fields).items() if key not in absent}
    with replaced(folder / "config.json", dump(config)):
        opened(folder, load)


def test_every_key_of_a_config_absent_or_odd(folder):
    """Every key that is read, one at a time, null first; what the parser itself refuses is the same for all."""
    asked = {"model_type", "quantization_config"}

    class Recording(dict):
        def get(self, key, *default):
            asked.add(key)
            return super().get(key, *default)

    normal = glm_moe_dsa.parse_config(ConfigFields(Recording(CONFIG), "config.json"))
    assert asked <= {*KEYS} | {"type"}
    rope = CONFIG["rope_parameters"]
    for value in [value for value in FIXED if value not in ("@digits", "@deep")]:
        changes = [{key: value} for key in sorted(asked)]
        for fields in changes + [{"rope_parameters": rope | {key: value}} for key in rope]:
            configs = []
            write_config(folder, fields)
            attempt(lambda read=configs: read.append(read_config(folder)[0]))
            if configs not in ([], [normal]):
                opened(folder)


@few
@given(st.dictionaries(st.sampled_from(sorted(HEADER)) | st.text(max_size=5), odd, max_size=3), odd, st.integers(0, 3))
def test_index_files(folder, files, weight_map, which):
    good = dict.fromkeys(NAMES, "model.safetensors")
    value = [{"weight_map": good | files}, {"weight_map": weight_map}, weight_map, {"weight_map": good}][which]
    (folder / INDEX_FILE).write_bytes(dump(value))
    try:
        line = opened(folder)
        assert (line is None) == (which == 3 or (which == 0 and not files))
    finally:
        (folder / INDEX_FILE).unlink()


# --- headers ----------------------------------------------------------------------------------------------------------


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


SHAPES = [[2**63], [2**62, 4], [2**32, 2**32], [10**4000] * 500, [1] * 65 + [2], [1.0, 2], [True, 2], [-2]]
OFFSETS = [(-8, 0), (8, 0), (0, 10**4000), (0, 8.0), (False, 8)]
NO_JSON = [{"a": "@deep"}, {"a": "@digits"}, b'{"\xff": 1}', '{"a": 1}'.encode("utf-16"), b"", b"{"]
LACKING = ["@deep900", entry("", 0, 4), entry(2, 0, 8), entry([2], 0, 8, 4), {"dtype": "F32", "shape": [2]}]
BAD_HEADERS = [
    *(({"a": entry(shape, 0, 8)}, "tensor a has an impossible shape") for shape in SHAPES),
    *(({"a": entry(shape, 0, 8, "X9")}, "tensor a has an impossible shape") for shape in SHAPES),
    *(({"a": entry([2], *offsets)}, "tensor a has an impossible shape or offsets") for offsets in OFFSETS),
    *(({"a": fields}, "tensor a lacks a dtype, a shape or data_offsets") for fields in LACKING),
    *((header, "the safetensors header is not valid JSON") for header in NO_JSON),
    ({"a": entry([4], 0, 8)}, "tensor a of shape [4] and dtype F32 does not fill its 8 bytes"),
    ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "tensor b overlaps its neighbor"),
    ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, "tensor b overlaps its neighbor"),
    ({"a": entry([0], 4, 4), "b": entry([2], 0, 8)}, "tensor a overlaps its neighbor"),
    ({"a": entry([1], 4, 8)}, "tensor a overlaps its neighbor or leaves a gap"),
    ({"a": entry([1], 0, 4)}, "is longer than its header says"),
    ({"a": entry([4], 0, 16)}, "expected, it ends before tensor a does)"),
    ({"\ud800": entry([2], 0, 8)}, "not valid Unicode"),
    ([], "the safetensors header must hold a JSON object"),
    (b'{"a": {}, "a": {}}', "the safetensors header holds a twice"),
    (b'{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}', "holds shape twice"),
]


def test_a_header_that_makes_no_sense(tmp_path):
    path = tmp_path / "bad.safetensors"
    for header, message in BAD_HEADERS:
        write_model(path, header, b"\0" * 8)
        line = attempt(lambda: read_header(path))
        assert line and str(path) in line and message in line, f"{message}: {line}"


def test_a_header_longer_than_its_file_or_than_any(tmp_path):
    """A sparse file, large enough to hold such a header: no byte of it is read."""
    path = tmp_path / "bad.safetensors"
    for length in (MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little"))
        os.truncate(path, MAX_HEADER_BYTES + 1000)
        line = attempt(lambda: read_header(path))
        assert f"bad.safetensors: says its header has {length} bytes, above the limit" in line
    path.write_bytes((50_000_000).to_bytes(8, "little") + b"{}")
    assert "bad.safetensors: is shorter than its header says (10 bytes)" in attempt(lambda: read_header(path))


def test_names_of_any_length_make_one_printable_line(folder):
    """A name is the snapshot's own text: it must not fill the screen, break the line or move the cursor."""
    for name in ("x" * 100_000, "a\nb\r\x1b[2J\u202e\u2028", "\U0001f600" * 5000, " "):
        write_model(folder / "model.safetensors", {name: 5})
        assert "..." in refused(folder, "model.safetensors: tensor ") or len(name) < 100


# --- files of a snapshot ----------------------------------------------------------------------------------------------


def save(path, names):
    """A safetensors file with some tensors of the fixture; a dict renames them: new name -> name."""
    tensors = safetensors.torch.load(MODEL_BYTES)
    names = names if isinstance(names, dict) else {name: name for name in names}
    safetensors.torch.save_file({new: tensors[name].clone() for new, name in names.items()}, path)


def names_of(*layers):
    """The names of some layers; None means what stands in no layer."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers if layer is not None)
    inside = [name for name in NAMES if name.startswith(prefixes)]
    return inside + [name for name in NAMES if None in layers and not name.startswith("model.layers.")]


def split(folder, pattern):
    """Shards of layer 0 and what is in no layer, of layers 1 and 2, of 3 and 4 -> [(path, names), ...]."""
    (folder / "model.safetensors").unlink()
    shards = []
    for number, layers in enumerate([(None, 0), (1, 2), (3, 4)]):
        shards.append((folder / pattern.format(number, number + 1), names_of(*layers)))
        save(*shards[-1])
    return shards


@pytest.mark.parametrize("pattern", ["model-{1:05d}-of-00003.safetensors", "out-{0:05d}.safetensors"])
def test_a_shard_is_missing(folder, pattern):
    """The line tells how many there are, which number is absent where that can be known, and what is missing with it.

    The C engine's containers do not say how many there should be: without the last, only a tensor tells. A file of the
    MTP layer is not counted.
    """
    shards = split(folder, pattern)
    for (path, names), layer in [*zip(shards, (0, 1, 3), strict=True)] * 2:
        assert opened(folder) is None
        path.rename(folder / "aside")
        there = f"2 of 3 shards are there, {path.name} is not"
        if path.name == "out-00002.safetensors":
            there = "2 shards are there, out-00000.safetensors to out-00001.safetensors"
        tensor = f"model.layers.{layer}.input_layernorm.weight"
        assert tensor in names
        refused(folder, f"layer {layer} has no tensors, {tensor} for one", there)
        (folder / "aside").rename(path)
        if layer == 3:
            save(folder / "out-mtp-00000.safetensors", {"model.layers.5.eh_proj.weight": "lm_head.weight"})
    for path, _ in shards:
        path.unlink()
    save(folder / "model-00002-of-00002.safetensors", NAMES)  # every tensor is there, and yet a file is not
    refused(folder, "1 of 2 shards are there, model-00001-of-00002.safetensors is not")


def test_a_shard_of_an_index_is_missing(folder):
    shards = split(folder, "model-{1:05d}-of-00003.safetensors")
    write_index(folder, {name: path.name for path, names in shards for name in names})
    assert opened(folder) is None
    for path, names in shards:
        path.rename(folder / "aside")
        refused(folder, f"{path.name} is missing (2 of 3 files are there) and with it tensor {names[0]}")
        (folder / "aside").rename(path)


def test_a_layer_without_tensors(folder):
    """config.json says 6 layers, the file has 0 to 2 and 4 to 5."""
    names = {name: name for name in names_of(None, 0, 1, 2, 4)}
    names |= {name.replace(".4.", ".5."): name for name in names_of(4)}
    save(folder / "model.safetensors", names)
    fields = dict(num_hidden_layers=6, mlp_layer_types=None, indexer_types=["full", "full", *["shared"] * 4])
    write_config(folder, fields)
    tensor = "model.layers.3.input_layernorm.weight"
    refused(folder, f"layer 3 has no tensors, {tensor} for one; config.json asks for 6 layers")


def test_more_layers_than_config_asks_for(folder):
    """Leaving a layer out in silence is another model; the MTP layer alone may follow."""
    save(folder / "model.safetensors", [name for name in NAMES if ".indexer." not in name])
    for layers in (3, 4):
        fields = dict(indexer_types=["full", *["shared"] * (layers - 1)], mlp_layer_types=None)
        write_config(folder, fields | {"num_hidden_layers": layers})
        refused(folder, f"holds tensors of layer {layers}, config.json asks for {layers} layers")


def test_a_file_of_another_model(folder):
    save(folder / "other.safetensors", {"model.layers.0.self_attn.q_proj.weight": "lm_head.weight"})
    refused(folder, "other.safetensors: holds no tensor of this model; move it out of the folder")
    write_model(folder / "other.safetensors", {}, b"")
    refused(folder, "other.safetensors: holds no tensor of this model")
    write_index(folder, dict.fromkeys(NAMES, "model.safetensors"))  # which says itself what belongs to the snapshot
    assert opened(folder) is None


BAD_FILE_NAMES = ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "", "model.bin"]
BAD_FILE_NAMES += ["a\0.safetensors", "a\n.safetensors", "\ud800.safetensors", "y" * 10_000 + "/x.safetensors", 5, None]


def test_an_index_that_leads_out_of_the_folder(folder):
    """Also when there is such a file."""
    for place in (folder.parent, folder / "sub"):
        place.mkdir(exist_ok=True)
        shutil.copy(folder / "model.safetensors", place / "x.safetensors")
    for file in BAD_FILE_NAMES:
        write_index(folder, dict.fromkeys(NAMES, file))
        refused(folder, f"{INDEX_FILE}: weight_map puts ", "expected the name of a *.safetensors file beside it")
    write_index(folder, {"a": "y" * 300 + ".safetensors"})  # a name longer than the system allows
    refused(folder, "yyy...", "is missing (0 of 1 files are there)")
    write_index(folder, dict.fromkeys(NAMES, "model.safetensors") | {"a": "folder.safetensors"})
    (folder / "folder.safetensors").mkdir()
    refused(folder, "folder.safetensors: is not a regular file")


def text_of(folder):
    """Everything a text mode does with a tokenizer."""
    tokenizer = TextTokenizer(folder, read_config(folder)[0])
    tokenizer.decode(tokenizer.encode("In the beginning"))
    tokenizer.render_chat([{"role": "user", "content": "x"}])
    return tokenizer.stop_ids


NO_FILES = [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name)]


@pytest.mark.parametrize("put", NO_FILES, ids=["fifo", "folder", "link to nothing", "link to itself"])
def test_what_is_no_file(folder, text_folder, put):
    """Nothing is opened that could make the reader wait, and a broken link is not taken for an absent file."""
    for place, action, names in ((folder, open_headers, MODEL_FILES), (text_folder, text_of, TEXT_FILES)):
        for name in names:
            path, aside = place / name, place / "aside"
            if path.exists():
                path.rename(aside)
            put(path)
            refused(place, f"{name}: ", action=action)
            path.rmdir() if path.is_dir() else path.unlink()
            if aside.exists():
                aside.rename(path)
        assert opened(place, action) is None


def test_the_layout_of_the_hub_cache(folder, tmp_path):
    """snapshots/REVISION/name -> ../../blobs/HASH, all of it read-only."""
    blobs, revision = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (blobs / f"{number:064x}").chmod(0o444)
        (revision / path.name).symlink_to(f"../../blobs/{number:064x}")
    for place in (blobs, revision):
        place.chmod(0o555)
    assert opened(revision, load) is None
    for place in (blobs, revision):
        place.chmod(0o755)


# --- config.json ------------------------------------------------------------------------------------------------------

BAD_FIELDS = [
    ({"num_experts": 16}, "n_routed_experts is 8, but num_experts is 16; they mean the same"),
    ({"num_local_experts": [8]}, "n_routed_experts is 8, but num_local_experts is [8]"),
    ({"n_routed_experts": None, "num_experts": 0}, "num_experts is 0, expected a whole number"),
    ({"qk_head_dim": 25}, "qk_head_dim is 25, this engine computes only 24"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2, this engine computes only 4"),
    ({"hidden_size": 10**400}, "hidden_size is 1000"),
    ({"hidden_size": "@deep900"}, "hidden_size is [[[...]]]"),
    ({"hidden_size": "x" * 10_000}, "hidden_size is 'xxx"),
    ({"rms_norm_eps": "@inf"}, "rms_norm_eps is inf"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"vocab_size": "@digits"}, "config.json: is not valid JSON"),
    ({"vocab_size": "@deep"}, "config.json: is not valid JSON"),
    ({"model_type": ["glm_moe_dsa"]}, "model_type is ['glm_moe_dsa'], this engine knows "),
    ({"model_type": "../errors"}, "model_type is '../errors', this engine knows "),
]


def test_a_key_that_contradicts_or_overflows(folder):
    for fields, message in BAD_FIELDS:
        write_config(folder, fields)
        refused(folder, "config.json", message)
    text = json.dumps(CONFIG).replace('"hidden_size": 64', '"hidden_size": 64, "hidden_size": 32')
    (folder / "config.json").write_text(text)
    refused(folder, "config.json: holds hidden_size twice")
    os.truncate(folder / "config.json", MAX_TEXT_BYTES + 1)
    assert "config.json: has 100000001 bytes, above the limit" in attempt(lambda: open_headers(folder))


def test_a_model_of_a_thousand_layers(folder):
    """Numbers of which no tensor speaks are refused by the first that is missing, before a list of all is made."""
    many = dict(num_hidden_layers=1024, mlp_layer_types=None, indexer_types=None, first_k_dense_replace=1)
    for num_experts in (8, 128):
        write_config(folder, many | {"n_routed_experts": num_experts})
        refused(folder, "layer 5 has no tensors")
    write_config(folder, many | {"n_routed_experts": 65536})
    refused(folder, "n_routed_experts makes 65536 experts in 1023 layers")
