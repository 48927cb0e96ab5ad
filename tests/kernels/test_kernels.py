"""The C kernels against their definition in torch, and bit by bit against themselves: rows, threads, instructions."""

import ctypes
import os
import threading

import pytest
import torch

from kernels import dispatch, reference
from kernels.build import AVX2, AVX512, SANITIZE, SOURCES, UNITS, BuildError, NoCompiler, find_library, usable_variants
from kernels.formats import FORMATS, FP8, MXFP4
from kernels.native import Native
from kernels.quantize import quantize, quantize_fp8
from kernels.structs import CALLS, STRUCTS, packer
from kernels.weight import Weight
from settings import KERNELS, Settings

FOLDER = Settings.read([], {}).cache / "kernels"
COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 24, 25, 64)
SOME_COUNTS = (1, 5, 17)  # for instruction sets that give the bits of the first one
MOST = max(COUNTS)


@pytest.fixture(scope="session")
def kernels(request):
    """Every instruction set of this processor, opened; one thread until a test asks for more."""
    extra = SANITIZE if request.config.getoption("--sanitize") else ()
    out = {}
    for name in usable_variants():
        try:
            out[name] = Native(find_library(FOLDER, name, extra=extra))
        except NoCompiler as error:
            pytest.skip(str(error))
        except (BuildError, OSError):  # older compilers do not know these, and not every system lets tiles be used
            if name not in ("avx512amx", "avxvnni"):
                raise
    return out


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(fmt, rows, columns, seed=1):
    """A matrix in some format; of integers also one that keeps activations in float32, and one with float16 scales."""
    matrix = randn(rows, columns, seed=seed)
    if fmt is FP8:
        data, scales = quantize_fp8(matrix)
        return [Weight(data, columns, fmt, scales)]
    if fmt is MXFP4:
        return [mxfp4(rows, columns, seed)]
    if not fmt.is_integer:
        return [Weight(matrix.to(fmt.dtype), columns, fmt)]
    data, scales = quantize(matrix, fmt)
    half = quantize(matrix, fmt, torch.float16)
    return [
        Weight(data, columns, fmt, scales),
        Weight(data, columns, fmt, scales, True),
        Weight(*half[:1], columns, fmt, half[1]),
    ]


def mxfp4(rows, columns, seed):
    """All 16 values, and scales from the least power of two to 16."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(120, 132, (rows, columns // 32), dtype=torch.uint8, generator=g)
    scales[0, 0] = 0
    return Weight(data, columns, MXFP4, scales)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_linear(kernels, fmt):
    """Close to the definition, and the same bits for any number of rows and any instruction set."""
    for rows, columns in ((70, 64), (33, 191), (5, 1), (70, 1024), (40, 1500)):
        columns = columns if fmt is not MXFP4 else -(-columns // 32) * 32
        x, bias = randn(MOST, columns, seed=2) * 3, randn(rows, seed=3)
        for weight in weights_of(fmt, rows, columns):
            expected = reference.linear(x, weight, bias)
            bits = None
            for native in kernels.values():
                out, counts = native.linear(x, weight, bias), COUNTS if bits is None else SOME_COUNTS
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
                bits = out if bits is None else bits
                assert torch.equal(out, bits), native.name
                for count in counts:
                    assert torch.equal(native.linear(x[:count], weight, bias), bits[:count]), (native.name, count)
                one = native.linear(x[7:8], weight, bias)
                assert torch.equal(one[0], bits[7])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_very_many_rows(kernels, fmt):
    """Then more weight rows are processed at a time; the bits stay."""
    for weight in weights_of(fmt, 300, 128):
        x = randn(150, 128)
        bits = next(iter(kernels.values())).linear(x, weight)
        torch.testing.assert_close(bits, reference.linear(x, weight), rtol=1e-5, atol=1e-5 * float(bits.abs().max()))
        for native in kernels.values():
            assert torch.equal(native.linear(x, weight), bits), native.name
            assert torch.equal(native.linear(x[100:103], weight), bits[100:103])


def test_linear_takes_rows_with_gaps(kernels):
    [weight] = weights_of(FORMATS["f32"], 9, 40)
    wide = randn(6, 100)
    for native in kernels.values():
        assert torch.equal(native.linear(wide[:, 10:50], weight), native.linear(wide[:, 10:50].contiguous(), weight))
        assert native.linear(wide[:0, :40], weight).shape == (0, 9)


@pytest.mark.parametrize(
    "fmt", [FORMATS[name] for name in ("f32", "bf16", "int8-row", "int4-g64", "int4-g16", "int2-g64")], ids=str
)
def test_nan_and_infinity_spread_to_the_output(kernels, fmt):
    x = randn(3, 128)
    x[0, 3], x[1, 100] = torch.nan, torch.inf
    for weight in weights_of(fmt, 6, 128):
        for native in kernels.values():
            out = native.linear(x, weight)
            assert not out[0].isfinite().any() and not out[1].isfinite().any() and out[2].isfinite().all()


def test_tiny_activations(kernels):
    """A group whose scale would be subnormal is zero, here as in the definition: its codes would leave 8 bits."""
    x = torch.full((2, 128), 1e-43)
    x[1, :64] = 1e-30
    for weight in weights_of(FORMATS["int8-row"], 5, 128)[:1]:
        for native in kernels.values():
            out = native.linear(x, weight)
            assert not out[0].any()
            torch.testing.assert_close(out, reference.linear(x, weight), rtol=1e-5, atol=0)


def experts_case(fmt, count, hidden, width, seed=0):
    """`count` rows routed to 9 experts of which each has between none and all of them."""
    g = torch.Generator().manual_seed(seed)
    experts = [
        [
            weights_of(fmt, r, c, seed=10 * e + i)[0]
            for i, (r, c) in enumerate([(width, hidden), (width, hidden), (hidden, width)])
        ]
        for e in range(9)
    ]
    chosen = [
        torch.nonzero(torch.rand(count, generator=g) < share)[:, 0]
        for share in (0.05, 0.2, 1, 0.5, 0.1, 0.9, 0.3, 0.6, 0.4)
    ]
    kept = [(three, rows) for three, rows in zip(experts, chosen, strict=True) if len(rows)]
    starts = torch.tensor([0, *torch.tensor([len(rows) for _, rows in kept]).cumsum(0).tolist()])
    rows = torch.cat([rows for _, rows in kept])
    return [three for three, _ in kept], starts, rows, torch.rand(len(rows), generator=g)


@pytest.mark.parametrize(
    "name", ["bf16", "int4-g64", "int4-row", "int8-g64", "int3-g64", "int2-g64", "fp8-b128", "int4-g16"]
)
@pytest.mark.parametrize("sizes", [(96, 70), (64, 32), (200, 1100)])
def test_experts(kernels, name, sizes):
    hidden, width = sizes
    experts, starts, rows, topk_weights = experts_case(FORMATS[name], MOST, hidden, width)
    x = randn(MOST, hidden, seed=4)
    expected = reference.add_experts(torch.zeros_like(x), x, experts, starts, rows, topk_weights)
    bits = None
    for native in kernels.values():
        out = native.add_experts(torch.zeros_like(x), x, experts, starts, rows, topk_weights)
        # Quantized activations sometimes round to either side of a half.
        error = (out - expected).abs().max() / expected.abs().max()
        assert error < (2e-3 if FORMATS[name].is_integer else 1e-5), (native.name, error)
        bits = out if bits is None else bits
        assert torch.equal(out, bits), native.name
        for row in (0, 5, MOST - 1):  # one row alone
            mine = [
                (three, i)
                for three, start, stop in zip(experts, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
                for i in range(start, stop)
                if rows[i] == row
            ]
            alone = native.add_experts(
                torch.zeros(1, hidden),
                x[row : row + 1],
                [three for three, _ in mine],
                torch.arange(len(mine) + 1),
                torch.zeros(len(mine), dtype=torch.int64),
                topk_weights[[i for _, i in mine]],
            )
            assert torch.equal(alone[0], bits[row]), (native.name, row)


def test_experts_of_several_formats(kernels):
    """Each matrix has its own format; an expert gets the same bits beside experts of other formats and alone."""
    experts, starts, rows, topk_weights = experts_case(FORMATS["int4-g64"], 40, 64, 80)
    names = ["bf16", "int8-row", "int4-g16", "fp8-b128", "int4-g64", "int3-g64", "f32", "int2-g64", "int8-g64"]
    for e, three in enumerate(experts):
        for i in range(3):
            rows_of, columns = three[i].rows, three[i].columns
            three[i] = weights_of(FORMATS[names[(e + 2 * i) % 9]], rows_of, columns, seed=10 * e + i)[0]
    x = randn(40, 64, seed=4)
    expected = reference.add_experts(torch.zeros_like(x), x, experts, starts, rows, topk_weights)
    bits = None
    for native in kernels.values():
        out = native.add_experts(torch.zeros_like(x), x, experts, starts, rows, topk_weights)
        assert (out - expected).abs().max() / expected.abs().max() < 2e-3
        bits = out if bits is None else bits
        assert torch.equal(out, bits)
        step = torch.zeros_like(x)
        for e, three in enumerate(experts):
            some = slice(int(starts[e]), int(starts[e + 1]))
            ends = torch.tensor([0, len(rows[some])])
            native.add_experts(step, x, [three], ends, rows[some].contiguous(), topk_weights[some].contiguous())
        assert torch.equal(step, bits)


@pytest.mark.parametrize("name", ["int4-g64", "bf16"])
@pytest.mark.parametrize("count", [1, 5, MOST])
def test_experts_in_any_order(kernels, name, count):
    """The output of each expert, computed a few experts at a time and then added: the bits of add_experts."""
    experts, starts, rows, topk_weights = experts_case(FORMATS[name], count, 96, 70, seed=3)
    x, start = randn(count, 96, seed=4), randn(count, 96, seed=5)
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(6)).tolist()
    for native in (*kernels.values(), reference):
        expected = native.add_experts(start.clone(), x, experts, starts, rows, topk_weights)
        outputs = torch.full((len(rows), 96), torch.nan)
        for some in (order[:2], order[2:3], order[3:]):
            places = torch.cat([torch.arange(starts[e], starts[e + 1]) for e in some] or [starts[:0]])
            ends = torch.tensor([0, *(starts[e + 1] - starts[e] for e in some)]).cumsum(0)
            if some:
                native.expert_outputs(outputs, x, [experts[e] for e in some], ends, rows[places], places)
        assert torch.equal(native.add_weighted(start.clone(), outputs, rows, topk_weights), expected)


@pytest.mark.parametrize("name", ["f32", "int4-g64", "int8-row"])
def test_gated_mlp(kernels, name):
    """The bits of an expert of weight one, near the definition, for any number of rows."""
    gate, up, down = (
        weights_of(FORMATS[name], *shape, seed=i)[0] for i, shape in enumerate([(70, 96), (70, 96), (96, 70)])
    )
    x = randn(MOST, 96, seed=4)
    expected = reference.gated_mlp(x, gate, up, down)
    bits = None
    for native in kernels.values():
        out = native.gated_mlp(x, gate, up, down)
        assert (out - expected).abs().max() / expected.abs().max() < (2e-3 if name != "f32" else 1e-5)
        bits = out if bits is None else bits
        assert torch.equal(out, bits), native.name
        rows, starts = torch.arange(MOST), torch.tensor([0, MOST])
        one = native.add_experts(torch.zeros_like(x), x, [(gate, up, down)], starts, rows, torch.ones(MOST))
        assert torch.equal(out, one)
        for count in COUNTS:
            assert torch.equal(native.gated_mlp(x[:count], gate, up, down), bits[:count]), (native.name, count)


def attention_case(H, N, R, V, L, S, T, fmt, seed=0):
    [kv_b, *_] = weights_of(fmt, H * (N + V), L, seed=seed + 1)
    queries = randn(T, H, N + R, seed=seed + 2) * 2
    latents, rope_keys = randn(S, L, seed=seed + 3), randn(S, R, seed=seed + 4)
    return queries, kv_b, latents, rope_keys


@pytest.mark.parametrize("name", ["f32", "bf16", "int4-g64", "int8-row", "fp8-b128"])
@pytest.mark.parametrize("shape", [(8, 16, 8, 20, 24, 90), (3, 32, 32, 32, 64, 77), (16, 12, 16, 9, 130, 200)])
@pytest.mark.parametrize("topk", [None, 21])
def test_absorbed_attention(kernels, name, shape, topk):
    """All rows at once, in pieces, and one after the other, with and without a selection."""
    H, N, R, V, L, S = shape
    T = 70
    queries, kv_b, latents, rope_keys = attention_case(H, N, R, V, L, S, T, FORMATS[name])
    first, selection, scale = S - T, None, (N + R) ** -0.5
    if topk:
        chosen = [sorted(torch.randperm(first + t + 1)[:topk].tolist()) for t in range(T)]
        selection = torch.tensor([row + [-1] * (topk - len(row)) for row in chosen])
    exact = Weight(kv_b.data, kv_b.columns, kv_b.format, kv_b.scales, True)
    expected = reference.absorbed_attention(queries, exact, latents, rope_keys, first, selection, V, scale)
    bits = None
    for native in kernels.values():
        out = native.absorbed_attention(queries, kv_b, latents, rope_keys, first, selection, V, scale)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=2e-4)
        bits = out if bits is None else bits
        assert torch.equal(out, bits), native.name
        at = 0
        for count in (1, 2, 13, 1, 53):
            some = slice(at, at + count)
            part = native.absorbed_attention(
                queries[some], kv_b, latents[: first + at + count], rope_keys[: first + at + count], first + at,
                None if selection is None else selection[some], V, scale,
            )  # fmt: skip
            assert torch.equal(part, bits[some]), (native.name, at, count)
            at += count
        assert at == T


def test_a_row_that_attends_to_nothing_is_nan(kernels):
    """Not an error, with any number of threads and whatever the scratch memory held."""
    queries, kv_b, latents, rope_keys = attention_case(16, 12, 16, 9, 64, 40, 3, FORMATS["int4-g64"])
    selection = torch.tensor([[3, 5], [-1, -1], [0, 39]])
    for native in kernels.values():
        native.set_threads(3)
        try:
            out = native.absorbed_attention(queries, kv_b, latents, rope_keys, 37, selection, 9, 0.2)
        finally:
            native.set_threads(1)
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all(), native.name


@pytest.mark.parametrize("shape", [(5, 8, 16, 40), (70, 32, 128, 130), (1, 3, 20, 1)])
def test_index_scores(kernels, shape):
    T, H, D, S = shape
    queries, weights, keys = randn(T, H, D), randn(T, H, seed=1), randn(S, D, seed=2)
    expected = reference.index_scores(queries, weights, keys)
    bits = None
    for native in kernels.values():
        out = native.index_scores(queries, weights, keys)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        bits = out if bits is None else bits
        assert torch.equal(out, bits), native.name
        assert torch.equal(native.index_scores(queries[-1:], weights[-1:], keys), bits[-1:])
        assert torch.equal(native.index_scores(queries, weights, keys[:1]), bits[:, :1])


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_change_no_bit(kernels):
    native = next(iter(kernels.values()))
    x = randn(33, 640)
    cases = [weights_of(FORMATS[name], 1000, 640)[0] for name in ("bf16", "int4-g64")]
    experts = experts_case(FORMATS["int4-g64"], 33, 640, 96)
    try:
        native.set_threads(1)
        expected = [native.linear(x, weight) for weight in cases]
        added = native.add_experts(torch.zeros_like(x), x, *experts)
        for threads in (2, 3, 7):
            native.set_threads(threads)
            for _ in range(20):
                assert all(torch.equal(native.linear(x, w), e) for w, e in zip(cases, expected, strict=True))
                assert torch.equal(native.add_experts(torch.zeros_like(x), x, *experts), added)
    finally:
        native.set_threads(1)


def test_several_python_threads_at_once(kernels):
    native, failures = next(iter(kernels.values())), []
    x, weight = randn(3, 640), weights_of(FORMATS["int4-g64"], 1000, 640)[0]
    native.set_threads(3)
    expected = native.linear(x, weight)

    def work():
        for _ in range(200):
            if not torch.equal(native.linear(x, weight), expected):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    native.set_threads(1)
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_continues_alone(kernels):
    native = next(iter(kernels.values()))
    x, weight = randn(3, 640), weights_of(FORMATS["int4-g64"], 1000, 640)[0]
    native.set_threads(2)
    expected = native.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    native.set_threads(1)


# --- building ---------------------------------------------------------------------------------------------------------


def test_the_best_instruction_set(monkeypatch):
    for has, best in [
        (set(), "portable"),
        (set(AVX2), "avx2"),
        ({*AVX2, "avxvnni"}, "avxvnni"),
        (set(AVX512), "avx512"),
        ({*AVX512, "avx512vnni"}, "avx512vnni"),
        ({*AVX512, "avx512vnni", "gfni", "amx-tile", "amx-int8"}, "avx512amx"),
    ]:
        monkeypatch.setattr("kernels.build.processor_flags", lambda has=has: has)
        assert usable_variants()[0] == best


def test_names_in_settings_are_those_of_the_dispatch():
    assert KERNELS == dispatch.CHOICES


def test_without_a_compiler_a_notice_says_so_and_torch_runs(monkeypatch, tmp_path):
    monkeypatch.setattr("kernels.build.compilers", lambda: [["/no/such/compiler"]])
    assert dispatch.start(None, tmp_path / "k") == (
        "[kernels] plain torch, which is slow: no C compiler was found (cc, gcc, clang, or pip install ziglang)"
    )
    assert not dispatch.is_native()


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho "x.c:1: error: no luck" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr("kernels.build.compilers", lambda: [[str(compiler)]])
    line = dispatch.start(None, tmp_path / "k")
    assert line.startswith("[kernels] plain torch") and line.endswith("cc failed: x.c:1: error: no luck")
    assert not list((tmp_path / "k").glob("*.so")) and not list((tmp_path / "k").glob("*.partial"))


FULL_DISK = {  # what the C compiler's parts say of it
    "ld": "/usr/bin/ld: final link failed: No space left on device",
    "as": "/tmp/ccdLJFHo.s: Fatal error: can't write 12 bytes: No space left on device",
    "clang": "error: unable to open output file '0.c.o': 'Disk quota exceeded'",
}


@pytest.mark.parametrize("blames", FULL_DISK)
def test_a_full_disk_is_said_once_and_of_the_folder(tmp_path, monkeypatch, blames):
    """The linker was blamed, after every instruction set had been compiled by every compiler, for minutes."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho >> {tmp_path}/runs\n'
        f'echo "{FULL_DISK[blames]}" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr("kernels.build.compilers", lambda: [[str(compiler)]] * 3)
    monkeypatch.setattr("kernels.dispatch.usable_variants", lambda: ["avx2", "portable"])
    line = dispatch.start(None, tmp_path / "k")
    assert line.startswith(f"[kernels] plain torch, which is slow: {tmp_path / 'k'}, or the temporary folder: ")
    assert len((tmp_path / "runs").read_text().splitlines()) <= len(UNITS)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1_500_000}))
    (tmp_path / "runs").unlink()
    line = dispatch.start(None, tmp_path / "k")
    assert "its disk has 1.5 MB free, 16 MB are needed to compile; free some, or set XDG_CACHE_HOME" in line
    assert not (tmp_path / "runs").exists()


def test_a_folder_from_which_nothing_may_run_is_refused(tmp_path, monkeypatch):
    """Every instruction set was compiled into it, for a minute, and none could be loaded."""
    state = os.statvfs(tmp_path)
    flags = state.f_flag | os.ST_NOEXEC
    monkeypatch.setattr("os.statvfs", lambda path: type("State", (), {"f_flag": flags}))
    assert "nothing may run (noexec)" in dispatch.start(None, tmp_path / "k")


def test_the_next_instruction_set_where_the_best_does_not_compile(kernels, monkeypatch, tmp_path):
    names, asked = list(kernels), []

    def find(folder, variant):
        asked.append(variant)
        if len(asked) == 1:
            raise BuildError("cc failed: unrecognized option")
        return find_library(FOLDER, variant)

    monkeypatch.setattr("kernels.dispatch.usable_variants", lambda: ["newest", *names])
    monkeypatch.setattr("kernels.dispatch.find_library", find)
    line = dispatch.start(None, tmp_path)
    assert line == f"[kernels] {names[0]}, 1 thread; nothing faster: cc failed: unrecognized option"
    assert asked == ["newest", names[0]]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    folder = tmp_path / "k"
    folder.mkdir()
    folder.chmod(0o777)
    assert "must be writable by you alone" in dispatch.start(None, folder)
    (tmp_path / "file").write_text("x")
    assert "[kernels] plain torch" in dispatch.start(None, tmp_path / "file" / "k")


def test_a_library_is_compiled_once_and_again_for_other_sources(kernels, tmp_path, monkeypatch):
    calls, plain = [], __import__("kernels.build", fromlist=["x"]).compile_into

    def counting(path, *rest):
        calls.append(path.name)
        path.write_bytes(b"")
        return True

    assert plain
    monkeypatch.setattr("kernels.build.compile_into", counting)
    assert find_library(tmp_path / "k", "portable") == find_library(tmp_path / "k", "portable")
    assert len(calls) == 1
    monkeypatch.setattr("kernels.build.FLAGS", ("-O1",))
    find_library(tmp_path / "k", "portable")
    assert len(set(calls)) == 2


def test_a_broken_library_is_not_used(kernels, tmp_path, monkeypatch):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr("kernels.dispatch.find_library", lambda folder, variant: tmp_path / "broken.so")
    assert dispatch.start(None, tmp_path).startswith("[kernels] plain torch, which is slow: ")


def test_every_source_is_compiled_once():
    assert sorted(file for unit in UNITS for file in unit) == sorted(path.name for path in SOURCES.glob("*.c"))


def test_the_header_is_parsed_into_structs(kernels):
    """Field by field for one struct; the library compares the sizes of all when it is opened."""
    size, scales = ctypes.c_int64, ctypes.c_float
    names = [("values", ctypes.c_void_p), ("count", size)]
    assert STRUCTS["values_t"]._fields_ == names and CALLS["all_finite"] is STRUCTS["values_t"]
    assert STRUCTS["norm_t"]._fields_[-2:] == [("x_stride", size), ("eps", scales)]
    assert [name for name, _ in STRUCTS["kernels_t"]._fields_] == ["name", *CALLS, "read_memory"]
    for name, kind in CALLS.items():
        assert len(packer(kind)(*([0] * len(kind._fields_)))) == ctypes.sizeof(kind), name
