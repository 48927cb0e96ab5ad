"""The NEON kernels, compiled for AArch64 and run in an emulator, give the bits of plain C on this machine."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.build import (
    NEON,
    NEONDOT,
    SOURCES,
    NoCompiler,
    find_library,
    machine_flags,
    usable_variants,
)
from kernels.formats import FORMATS, FP8
from kernels.kv_rows import Int8Rows, int8_row_bytes
from kernels.native import KV_KINDS, Native, struct_of
from kernels.reference import rope_angles
from kernels.structs import CALLS, STRUCTS
from kernels.weight import Weight
from snapshot.rope import plain_frequencies
from tests.conftest import FIXTURES
from tests.kernels.test_family_kernels import clamped_case
from tests.kernels.test_kernels import FOLDER, attention_case, experts_case, randn, weights_of

COMPILER = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
OLD, NEW = "cortex-a57", "max"  # processors of the emulator, without and with dot products
REFUSED = 2  # what fixtures/neon_check.c says where colibri_kernels() gives NULL
COUNTS = (1, 2, 7, 16, 26)
INTEGERS = ("int8-row", "int8-g64", "int4-row", "int4-g64", "int4-g128", "int3-g64", "int2-row", "int2-g64")
OTHERS = ("f32", "bf16", "f16", "fp8-b128", "int4-g16", "int8-g96")


# In the order of fixtures/neon_check.c.
OPERATIONS = (
    *("linear", "experts", "mla", "index_scores", "gated_mlp", "add_weighted", "rms_norm", "layer_norm", "rope"),
    *("route", "top_k_positions", "logprobs", "gqa", "quantize_kv"),
)


WEIGHT = STRUCTS["weight_t"]


class Memory:
    """What fixtures/neon_check.c works on: tensors and structs at places, pointers between them, calls to make."""

    def __init__(self):
        self.data, self.pointers, self.calls, self.results = bytearray(), [], [], []

    def put(self, raw):
        """-> the place, behind the head."""
        self.data += bytes(-len(self.data) % 64)
        self.data += raw
        return len(self.data) - len(raw)

    def put_tensor(self, tensor):
        return self.put(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def put_weights(self, weights):
        at = self.put(b"".join(bytes(struct_of(weight)) for weight in weights))
        for weight in weights:
            self.point(at + WEIGHT.data.offset, self.put_tensor(weight.data))
            if weight.scales is not None:
                self.point(at + WEIGHT.scales.offset, self.put_tensor(weight.scales))
            at += len(bytes(struct_of(weight)))
        return at - len(weights) * len(bytes(struct_of(weights[0])))

    def point(self, place, target):
        self.data[place : place + 8] = struct.pack("<q", target)
        self.pointers.append(place)

    def call(self, name, operation, expected, **fields):
        """A call of fields: numbers as they are, tensors and lists of weights by pointers. Its result in `out`, or in
        the fields of a dict, must be `expected`."""
        expected, kind = expected if isinstance(expected, dict) else {"out": expected}, CALLS[operation]
        fields = {key: torch.zeros_like(value) for key, value in expected.items()} | fields
        numbers = {key: value for key, value in fields.items() if isinstance(value, int | float)}
        places = {key: self.put_weights(value) for key, value in fields.items() if isinstance(value, list)}
        places |= {key: self.put_tensor(value) for key, value in fields.items() if isinstance(value, torch.Tensor)}
        at = self.put(bytes(kind(**numbers)))
        for key, target in places.items():
            self.point(at + getattr(kind, key).offset, target)
        self.calls.append((OPERATIONS.index(operation), at))
        self.results += [(name, places[key], value) for key, value in expected.items()]

    def write(self, path):
        """-> bytes of the head: from there on places count."""
        size = 16 + 8 * len(self.pointers) + 16 * len(self.calls)
        size += -size % 64
        data = bytearray(self.data)
        for place in self.pointers:
            data[place : place + 8] = struct.pack("<q", struct.unpack_from("<q", data, place)[0] + size)
        calls = [number for operation, at in self.calls for number in (operation, at + size)]
        head = [len(self.pointers), len(self.calls), *(place + size for place in self.pointers), *calls]
        path.write_bytes(struct.pack(f"<{len(head)}q", *head).ljust(size, b"\0") + data)
        return size

    def differing(self, data):
        """Names of the calls whose results in `data` have other bits. One NaN is as good as another."""
        names = []
        for name, at, expected in self.results:
            got = torch.frombuffer(data, dtype=expected.dtype, count=expected.numel(), offset=at).view(expected.shape)
            if expected.is_floating_point():
                got, expected = (torch.where(x.isnan(), torch.nan, x).view(torch.uint8) for x in (got, expected))
            if not torch.equal(got, expected):
                names.append(name)
        return names


def add_linear(memory, native, name, x, weight, bias=None):
    fields = dict(count=len(x), x_stride=x.shape[1], out_stride=weight.rows)
    memory.call(name, "linear", native.linear(x, weight, bias), weight=[weight], x=x, bias=bias, **fields)


def add_linears(memory, native):
    for fmt in (FORMATS[name] for name in (*INTEGERS, *OTHERS)):
        for rows, columns, counts in ((37, 191, COUNTS), (5, 1, COUNTS), (34, 1100, (3, 17))):
            x, bias = randn(max(counts), columns, seed=2) * 3, randn(rows, seed=3)
            for i, weight in enumerate(weights_of(fmt, rows, columns)):
                for count in counts:
                    add_linear(memory, native, f"linear {fmt} {rows} {columns} {count} {i}", x[:count], weight, bias)


def odd_rows(columns):
    """Ties between whole numbers, furthest codes, numbers near zero, zeros, infinities, NaN; then ordinary rows.

    A scale is at least the smallest float, so numbers near zero have codes beyond 127, which wrap around.
    """
    x = randn(20, columns, seed=5)
    x[0] = (torch.arange(columns) % 254 - 126.5).clamp(max=126.5)
    x[0, ::64] = 127
    x[1], x[2] = x[1].sign() * 127, x[2].sign() * 1e30
    x[3], x[4] = x[3] * 1e-43, -128 * 2.0**-149
    x[5], x[6] = 0, -0.0
    x[7, 3], x[8, 70], x[9, 5] = torch.nan, torch.inf, -torch.inf
    return x


def add_odd_numbers(memory, native):
    """Any bytes as codes, any float above and below the subnormal border, against rows that are odd themselves."""
    columns, g = 1200, torch.Generator().manual_seed(6)
    for name in ("int8-row", "int8-g64", "int4-g64", "int3-g64", "int2-g64", "int8-g48", "f16", "bf16", "fp8-b128"):
        fmt = FORMATS[name]
        for weight in weights_of(fmt, 17, columns):
            data = torch.randint(256, weight.data.view(torch.uint8).shape, generator=g, dtype=torch.uint8)
            data[0], data[1] = 128, 127  # of int8 the furthest codes
            if not fmt.has_scales:
                data[:, 1::2] &= 0xBF  # no infinity, no NaN
            if fmt is FP8:
                data &= 0xF7
            scales = weight.scales * 1024 if fmt.has_scales else None  # numbers near zero are not lost
            weight = Weight(data.view(weight.data.dtype), columns, fmt, scales, weight.exact)
            for count in (10, 20):
                add_linear(memory, native, f"odd numbers {fmt} {count}", odd_rows(columns)[:count], weight)


def add_experts(memory, native):
    for name in ("int4-g64", "bf16", "int4-row", "int8-g64", "int3-g64", "int2-g64", "fp8-b128", "int4-g16"):
        for hidden, width in ((96, 37), (50, 1100)) if name == "int4-g64" else ((96, 37),):
            experts, starts, rows, topk_weights = experts_case(FORMATS[name], 18, hidden, width)
            for factor in (1, 40):
                x = randn(18, hidden, seed=4) * factor
                x[3, 7] = torch.nan if factor == 40 else 0
                expected = native.add_experts(torch.zeros_like(x), x, experts, starts, rows, topk_weights)
                numbers = dict(experts=len(experts), count=18, hidden=hidden, width=width)
                memory.call(
                    f"experts {name} {hidden} {width} {factor}", "experts", expected, x=x, starts=starts, rows=rows,
                    topk_weights=topk_weights, matrices=[matrix for three in experts for matrix in three], **numbers,
                )  # fmt: skip


def add_attention(memory, native):
    for name in ("f32", "bf16", "int4-g64", "int8-row", "fp8-b128"):
        for H, N, R, V, L, S, T in (
            (3, 16, 8, 20, 24, 90, 70),
            (3, 32, 32, 32, 64, 77, 5),
            (9, 12, 16, 9, 130, 200, 1),
        ):
            queries, kv_b, latents, rope_keys = attention_case(H, N, R, V, L, S, T, FORMATS[name])
            first, scale = S - T, (N + R) ** -0.5
            chosen = torch.tensor([[*range(t % 3, t % 3 + 12), first + t, -1, -1] for t in range(T)])
            spoilt = latents.clone()
            spoilt[5, 3], spoilt[first, 1] = torch.nan, torch.inf
            for selection in (None, chosen):
                for known in (latents, spoilt, spoilt.bfloat16()):
                    keys = known, rope_keys.to(known.dtype)
                    expected = native.absorbed_attention(queries, kv_b, *keys, first, selection, V, scale)
                    topk = 0 if selection is None else selection.shape[1]
                    numbers = dict(count=T, position=first, topk=topk, heads=H, nope=N, rope=R, value=V, latent=L)
                    memory.call(
                        f"mla {name} {L} {topk} {known is latents} {known.dtype}", "mla", expected, kv_b=[kv_b],
                        queries=queries, latents=known, rope_keys=keys[1], selection=selection, scale=scale,
                        kind=KV_KINDS[known.dtype], **numbers,
                    )  # fmt: skip


def add_gqa(memory, native):
    """The families that keep keys and values: GQA, RoPE by halves, the softmax router, clamped SwiGLU."""
    for H, G, D, V, T, S, window in ((8, 2, 64, 48, 5, 40, 7), (5, 1, 20, 9, 1, 30, 0)):
        for dtype in (torch.float32, torch.bfloat16):
            queries, sinks = randn(T, H, D), randn(H, seed=1)
            keys, values = (randn(S, G, width, seed=width).to(dtype) for width in (D, V))
            expected = native.grouped_attention(queries, keys, values, S - T, window, sinks, 0.3)
            sizes = dict(count=T, position=S - T, window=window, heads=H, groups=G, width=D, value=V, scale=0.3)
            tensors = dict(queries=queries, keys=keys, values=values, sinks=sinks, kind=int(dtype == torch.bfloat16))
            memory.call(f"grouped {H} {dtype}", "gqa", expected, **sizes, **tensors)
    x, (cos, sin) = randn(9, 3, 50), rope_angles(torch.arange(9), plain_frequencies(1e4, 16))
    expected = {"x": native.apply_rope(x.clone(), 20, cos, sin, interleaved=False)}
    numbers = dict(rows=9, heads=3, width=50, first=20, rotary=16, halves=1)
    memory.call("rope halves", "rope", expected, x=x, cos=cos, sin=sin, **numbers)
    logits = odd_rows(96).clamp(-60, 60)
    topk_ids, weights = native.route_softmax(logits, 6, True, 1.0)
    sizes = dict(rows=20, experts=96, active=6, groups=1, active_groups=1, scaling=1.0, normalize=1)
    memory.call("softmax", "route", {"topk_ids": topk_ids, "weights": weights}, logits=logits, bias=None, **sizes)
    experts, swiglu = clamped_case(FORMATS["mxfp4"])
    x, starts, rows, topk_weights = (
        randn(18, 96) / 9,
        torch.tensor([0, 1, 1, 18, 20, 23]),
        torch.arange(23) % 18,
        randn(23),
    )
    expected = native.add_experts(torch.zeros_like(x), x, experts, starts, rows, topk_weights, swiglu)
    biases = dict(gate_bias=swiglu.gate_bias, up_bias=swiglu.up_bias, down_bias=swiglu.down_bias)
    matrices = [matrix for three in experts for matrix in three]
    numbers = dict(experts=5, count=18, hidden=96, width=64, limit=swiglu.limit, alpha=swiglu.alpha)
    tensors = dict(x=x, starts=starts, rows=rows, topk_weights=topk_weights, matrices=matrices)
    memory.call("clamped", "experts", expected, **tensors, **biases, **numbers)


def add_indexer(memory, native):
    for T, H, D, S in ((5, 8, 16, 40), (20, 32, 128, 130), (1, 3, 20, 1)):
        for dtype, kind in KV_KINDS.items():
            tensors = dict(queries=randn(T, H, D), weights=randn(T, H, seed=1), keys=randn(S, D, seed=2))
            if dtype == torch.int8:
                data = torch.empty(S, int8_row_bytes(D), dtype=torch.uint8)
                native.quantize_kv(tensors["keys"], 1, data)
                expected = native.index_scores(tensors["queries"], tensors["weights"], Int8Rows(data, D))
                memory.call(f"quantize {S} {D}", "quantize_kv", data, x=tensors["keys"], rows=S, width=D)
                tensors["keys"] = data
            else:
                tensors["keys"] = tensors["keys"].to(dtype)
                expected = native.index_scores(*tensors.values())
            sizes = dict(count=T, heads=H, width=D, positions=S)
            memory.call(f"index {T} {H} {D} {S} {dtype}", "index_scores", expected, kind=kind, **sizes, **tensors)


def add_rows(memory, native):
    """Operations on rows, with odd numbers in the rows."""
    for columns in (1, 37, 100, 2000):
        x, weight, bias = odd_rows(100)[:, :columns], randn(columns, seed=7), randn(columns, seed=8)
        x = x if columns <= 100 else randn(20, columns)
        x, added = x.contiguous(), randn(20, columns, seed=9)
        shape = dict(rows=20, columns=columns, x_stride=columns, eps=1e-5)
        total = x.clone()
        expected = native.rms_norm(total, weight, 1e-5, added)
        memory.call(
            f"rms_norm {columns}", "rms_norm", {"x": total, "out": expected}, x=x, added=added, weight=weight, **shape
        )
        expected = native.layer_norm(x, weight, bias, 1e-5)
        memory.call(f"layer_norm {columns}", "layer_norm", expected, x=x, weight=weight, bias=bias, **shape)
        rows, topk_weights = torch.arange(20) * 7 % 5, randn(20, seed=3)
        expected = native.add_weighted(added[:5].clone(), x, rows, topk_weights)
        fields = dict(outputs=x, topk_weights=topk_weights, rows=rows, out=added[:5])
        memory.call(f"add_weighted {columns}", "add_weighted", expected, count=20, columns=columns, **fields)
    x, (cos, sin) = randn(9, 3, 50), rope_angles(torch.arange(9), plain_frequencies(1e4, 16))
    expected = {"x": native.apply_rope(x.clone(), 20, cos, sin)}
    memory.call("rope", "rope", expected, x=x, cos=cos, sin=sin, rows=9, heads=3, width=50, first=20, rotary=16)
    for fmt in ("int4-g64", "bf16"):
        [gate, up, down] = [weights_of(FORMATS[fmt], *shape)[0] for shape in ((70, 100), (70, 100), (100, 70))]
        for count in (1, 20):
            x = odd_rows(100)[:count]
            expected = native.gated_mlp(x, gate, up, down)
            memory.call(
                f"mlp {fmt} {count}", "gated_mlp", expected, gate=[gate], up=[up], down=[down], x=x, count=count
            )


def add_choices(memory, native):
    logits, bias = odd_rows(96).clamp(-60, 60), randn(96, seed=7) / 10
    for groups, open_groups, mass in ((1, 1, 0.0), (8, 3, 0.7)):
        topk_ids, weights = native.route(logits, bias, 6, groups, open_groups, True, 2.5, mass)
        sizes = dict(rows=20, experts=96, active=6, groups=groups, active_groups=open_groups)
        memory.call(
            f"route {groups}", "route", {"topk_ids": topk_ids, "weights": weights}, logits=logits, bias=bias,
            mass=mass, scaling=2.5, normalize=1, **sizes,
        )  # fmt: skip
    scores = odd_rows(500)
    expected = {"selected": native.top_k_positions(scores, 300, 40)}
    memory.call("top", "top_k_positions", expected, scores=scores, rows=20, positions=500, first=300, topk=40)
    for vocab in (7, 500):
        logits, targets = (odd_rows(vocab) if vocab > 200 else randn(20, vocab)) * 9, torch.arange(20) % vocab
        logprobs, best = native.logprobs(logits, targets)
        expected = {"logprobs": logprobs, "best": best}
        memory.call(f"logprobs {vocab}", "logprobs", expected, logits=logits, targets=targets, rows=20, vocab=vocab)


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """(variant, processor, file in, file out, threads) -> what the driver says; skips where a tool is missing."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if not shutil.which(COMPILER) or not emulator:
        pytest.skip(f"{COMPILER} or {EMULATORS[0]} is missing")
    libc = subprocess.run([COMPILER, "-print-file-name=libc.so.6"], capture_output=True, text=True).stdout.strip()
    driver = tmp_path_factory.mktemp("neon") / "neon_check"
    line = [COMPILER, "-O1", f"-I{SOURCES}", str(FIXTURES / "neon_check.c"), "-o", str(driver), "-ldl"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{COMPILER} finds no libc: {done.stderr.strip()[-200:]}")

    def run(variant, processor, *words):
        library = find_library(FOLDER, variant, [COMPILER])
        root = Path(libc).resolve().parents[1]
        line = [emulator, "-cpu", processor, "-L", root, driver, library, *words]
        return subprocess.run([str(word) for word in line], capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="module")
def memory(emulate):
    try:
        native = Native(find_library(FOLDER, "portable"))
    except NoCompiler as error:
        pytest.skip(str(error))
    out = Memory()
    adders = add_linears, add_odd_numbers, add_experts, add_attention, add_gqa, add_indexer, add_rows
    for add in (*adders, add_choices):
        add(out, native)
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("variant", "processor"), [("neon", OLD), ("neondot", NEW)])
def test_the_bits_are_the_same(emulate, memory, tmp_path, variant, processor, threads):
    head = memory.write(tmp_path / "in")
    done = emulate(variant, processor, tmp_path / "in", tmp_path / "out", threads)
    assert (done.returncode, done.stdout) == (0, f"{variant}\n"), done.stderr
    assert memory.differing(bytearray((tmp_path / "out").read_bytes()[head:])) == []


def test_a_processor_without_dot_products_is_detected(emulate, tmp_path):
    Memory().write(tmp_path / "in")
    assert emulate("neondot", OLD, tmp_path / "in", tmp_path / "out", 1).returncode == REFUSED


def test_the_best_set_of_instructions(monkeypatch):
    for has, best in [(set(NEON), "neon"), (set(NEONDOT), "neondot")]:
        monkeypatch.setattr("kernels.build.processor_flags", lambda has=has: has)
        assert usable_variants()[0] == best


def test_each_compiler_in_its_words():
    assert machine_flags("neon", ["cc"]) == machine_flags("portable", ["cc"]) == []
    assert machine_flags("neondot", ["cc"]) == ["-march=armv8.2-a+dotprod"]
    assert machine_flags("neondot", ["python", "-m", "ziglang", "cc"]) == ["-mcpu=generic+dotprod"]
    assert machine_flags("portable", ["python", "-m", "ziglang", "cc"]) == ["-mcpu=baseline"]
    assert machine_flags("avx2", ["cc"]) == ["-mavx2", "-mfma", "-mf16c"]
