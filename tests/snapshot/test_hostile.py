"""Hostile headers and configs, generated and chosen: they load or are refused in one line.

No other exception, no hang, no memory beyond the size of the files.
"""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.config_fields import ConfigFields
from snapshot.config_file import read_config
from snapshot.families import glm_moe_dsa
from snapshot.index import INDEX_FILE, MAX_HEADER_BYTES, read_header
from snapshot.reader import MAX_TEXT_BYTES
from tests.support.hostile import (
    CONFIG,
    DATA_START,
    FIXED,
    HEADER,
    MODEL_BYTES,
    NAMES,
    attempt,
    dump,
    few,
    load,
    odd,
    open_headers,
    opened,
    refused,
    replaced,
    write_config,
    write_model,
)

# --- generated --------------------------------------------------------------------------------------------------------


# Mostly bytes that JSON may hold: others are refused at once.
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
    """A file cut anywhere is refused, also with other bytes behind the cut."""
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


def test_every_key_of_a_config_absent_or_malformed(folder):
    """Every key that is read, one at a time, null first; except values that the JSON parser refuses for every key."""
    asked = {"model_type", "quantization_config"}

    class Recording(dict):
        def get(self, key, *default):
            asked.add(key)
            return super().get(key, *default)

    normal = glm_moe_dsa.parse_config(ConfigFields(Recording(CONFIG), "config.json"))
    assert asked <= {*KEYS} | {"type", "num_mtp_layers"}
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
    file = "weights.safetensors"  # beside a model.safetensors the index does not count
    if (folder / "model.safetensors").exists():
        (folder / "model.safetensors").rename(folder / file)
    good = dict.fromkeys(NAMES, file)
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
INCOMPLETE = ["@deep900", entry("", 0, 4), entry(2, 0, 8), entry([2], 0, 8, 4), {"dtype": "F32", "shape": [2]}]
BAD_HEADERS = [
    *(({"a": entry(shape, 0, 8)}, "tensor a has an impossible shape") for shape in SHAPES),
    *(({"a": entry(shape, 0, 8, "X9")}, "tensor a has an impossible shape") for shape in SHAPES),
    *(({"a": entry([2], *offsets)}, "tensor a has an impossible shape or offsets") for offsets in OFFSETS),
    *(({"a": fields}, "tensor a lacks a dtype, a shape or data_offsets") for fields in INCOMPLETE),
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


def test_malformed_headers_are_refused(tmp_path):
    path = tmp_path / "bad.safetensors"
    for header, message in BAD_HEADERS:
        write_model(path, header, b"\0" * 8)
        line = attempt(lambda: read_header(path))
        assert line and str(path) in line and message in line, f"{message}: {line}"


def test_a_header_length_beyond_the_file_or_the_limit(tmp_path):
    """A sparse file, large enough for such a header: none of it is read."""
    path = tmp_path / "bad.safetensors"
    for length in (MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little"))
        os.truncate(path, MAX_HEADER_BYTES + 1000)
        line = attempt(lambda: read_header(path))
        assert f"bad.safetensors: says its header has {length} bytes, above the limit" in line
    path.write_bytes((50_000_000).to_bytes(8, "little") + b"{}")
    assert "bad.safetensors: is shorter than its header says (10 bytes)" in attempt(lambda: read_header(path))


def test_any_tensor_name_gives_one_printable_line(folder):
    """Names are untrusted text: they must not fill the screen, break the line or move the cursor."""
    for name in ("x" * 100_000, "a\nb\r\x1b[2J\u202e\u2028", "\U0001f600" * 5000, " "):
        write_model(folder / "model.safetensors", {name: 5})
        assert "..." in refused(folder, "model.safetensors: tensor ") or len(name) < 100


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


def test_contradictory_and_huge_values_in_a_config(folder):
    for fields, message in BAD_FIELDS:
        write_config(folder, fields)
        refused(folder, "config.json", message)
    text = json.dumps(CONFIG).replace('"hidden_size": 64', '"hidden_size": 64, "hidden_size": 32')
    (folder / "config.json").write_text(text)
    refused(folder, "config.json: holds hidden_size twice")
    os.truncate(folder / "config.json", MAX_TEXT_BYTES + 1)
    assert "config.json: has 100000001 bytes, above the limit" in attempt(lambda: open_headers(folder))


def test_a_model_of_a_thousand_layers(folder):
    """Counts that no tensors back are refused at the first missing tensor, before a list of all names is made."""
    many = dict(num_hidden_layers=1024, mlp_layer_types=None, indexer_types=None, first_k_dense_replace=1)
    for num_experts in (8, 128):
        write_config(folder, many | {"n_routed_experts": num_experts})
        refused(folder, "layer 5 has no tensors")
    write_config(folder, many | {"n_routed_experts": 65536})
    refused(folder, "n_routed_experts makes 65536 experts in 1023 layers")
