"""Tools for tests with hostile snapshots: limits on time and memory, malformed values, changed copies of a fixture."""

import json
import shutil
import signal
import tracemalloc
from contextlib import contextmanager

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from errors import MAX_LINE, Refused
from load.model import load_model, open_snapshot
from settings import Settings
from snapshot.config_file import read_config
from snapshot.index import INDEX_FILE
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
few = settings(max_examples=70, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@contextmanager
def bounded(num_bytes, seconds=30):
    """Fail if the block takes longer, or if Python or torch allocate more than num_bytes + SPARE_BYTES."""

    def ring(*_):
        raise AssertionError(f"not done after {seconds} s")

    def empty(*shape, **options):
        tensor = plain_empty(*shape, **options, device="meta")  # allocates nothing, but knows its size
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
    """Run an action within the limits -> the message of its refusal, or None."""
    try:
        with bounded(size):
            action()
    except Refused as error:
        line = str(error)
        assert line and line.isprintable() and len(line) <= MAX_LINE, repr(line)
        return line
    return None


def open_headers(folder):
    """Open a snapshot without reading weights."""
    open_snapshot(Settings.read([], {"SNAP": str(folder), "RAM_GB": "4"})).reader.close()


def load(folder):
    """Open and load a snapshot with RAM_GB=4."""
    load_model(Settings.read([], {"SNAP": str(folder), "RAM_GB": "4"})).close()


def opened(folder, action=open_headers):
    return attempt(lambda: action(folder), sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))


def refused(folder, *patterns, action=open_headers):
    line = opened(folder, action)
    assert line, "nothing was refused"
    for pattern in patterns:
        assert pattern in line
    return line


# Values that json.dumps cannot write: numbers and nesting beyond every limit, and near the limit of the parser.
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


@contextmanager
def replaced(path, data):
    """The file with other bytes inside the block."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def text_of(folder):
    """Use a tokenizer as the text modes do."""
    tokenizer = TextTokenizer(folder, read_config(folder)[0])
    tokenizer.decode(tokenizer.encode("In the beginning"))
    tokenizer.render_chat([{"role": "user", "content": "x"}])
    return tokenizer.stop_ids
