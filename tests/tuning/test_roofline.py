"""The machine's limits are measured, and a batch's least time follows from them."""

import copy
import importlib
import itertools
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagegen.build.cpp import compile_library
from pagegen.errors import ConfigError
from pagegen.kernel import allocate_bytes
from pagegen.paths import TEMPLATES
from pagegen.resources import cpu_resources
from pagegen.spec import DType, KernelSpec, Phase, parse_slug
from pagegen.target import Hardware, Target, best_cpu, detect, parse_target
from pagegen.tuning import roofline
from pagegen.tuning.contest import Row, limit_notes
from pagegen.tuning.decide import decide
from pagegen.tuning.machine import NO_DISTURBANCE, PINNED
from pagegen.tuning.measure import Interval, Measurement
from pagegen.tuning.report import roofline_svg, write_report
from pagegen.tuning.roofline import Limits, Roofline, level_sizes, measure_roofline, thread_counts
from pagegen.tuning.workload import RUN, Point, cold_bytes
from tests.conftest import cpu_targets
from tests.tuning.fake_record import make_record

ROOT = Path(__file__).parents[2]
KNOWN = Roofline(
    levels={"L2": {1: 1000}, "L3": {1: 10_000}, "memory": {1: 10**6}},
    bandwidth={level: {1: Interval(rate, rate, rate)} for level, rate in (("L2", 100.0), ("L3", 20.0), ("memory", 10.0))},
    fp32={1: Interval(50.0, 49.0, 51.0)},
    bf16={1: Interval(400.0, 390.0, 410.0)},
    disturbance=NO_DISTURBANCE,
)


@pytest.mark.compiler
@pytest.mark.parametrize("target", cpu_targets())
def test_a_call_of_the_peaks_says_what_it_computed(target: Target) -> None:
    loops = Limits(target)
    lanes = 4 if target.arch == "scalar" else target.lanes  # SSE2 is a part of x86-64
    assert loops.fma(2, steps=10) == 10 * 12 * lanes * 2 * 2
    tiles, pairs = roofline.AMX_STEPS * 4 * 16384, roofline.FMA_STEPS * 12 * 16 * 2 * 2
    assert loops.bf16(1) in ((tiles, pairs) if target.pairs else (tiles, 0)), "tiles are there whatever the vectors are"


@pytest.mark.compiler
@pytest.mark.parametrize("target", [case for case in cpu_targets() if case.id != "cpu:scalar"])
def test_the_peak_of_fp32_is_one_of_fused_multiply_adds(target: Target) -> None:
    text = (TEMPLATES / "cpp" / "roofline.cpp").read_text()

    def fused(*products: int) -> int:
        only = re.sub("READERS<0, .*>;", f"READERS<{', '.join(map(str, products))}>;", text)
        mix = cpu_resources(compile_library(only, target), target).instructions
        if not mix:
            pytest.skip("no objdump (binutils) here to read the library with")
        return sum(count for name, count in mix.items() if name.startswith("FMA"))

    assert fused(0) == 12, "one for each chain: a product and a sum would be two instructions, and half the peak where they share a port"
    assert fused(0, 12) >= 12 + 8 * 12, "the same of each product of the 8 vectors of a step, none left out"


@pytest.mark.compiler
@pytest.mark.parametrize("target", cpu_targets())
def test_the_read_of_pieces_reads_each_to_its_end(target: Target) -> None:
    memory = allocate_bytes(5 * 1600).view(5, 1600)  # no multiple of what is read at a time
    for at, bit in enumerate((1, 2, 4)):
        memory[2 * at, -8 + at] = bit
    addresses = torch.tensor([piece.data_ptr() for piece in memory])
    loops = Limits(target)
    for products, again in ((0, 0), (8, 0), (0, 3), (3, 6), (32, 6)):
        assert loops.read_pieces(addresses.data_ptr(), 5, memory[0].nbytes, 2, products, again) == 1 | 2 << 8 | 4 << 16
    assert loops.read_pieces(addresses.data_ptr(), 4, memory[0].nbytes, 2) == 1 | 2 << 8, "the last is not among them"
    assert all(loops.read_prefetched(memory.data_ptr(), memory.nbytes, passes) > 0 for passes in (-1, 0, 2))
    assert [loops.products(asked) for asked in (0, 1, 3, 5, 7, 8, 11, 31, 100)] == [0, 1, 3, 5, 7, 8, 8, 28, 32], "never more than asked"


@pytest.mark.compiler
@pytest.mark.parametrize("target", cpu_targets())
def test_addresses_are_followed_one_by_one(target: Target) -> None:
    words = allocate_bytes(5 * 8).view(torch.int64)
    for here, there in ((0, 3), (3, 1), (1, 4), (4, 2), (2, 0)):
        words[here] = words[there].data_ptr()
    assert [Limits(target).follow(words.data_ptr(), count) for count in range(7)] == [words[at].data_ptr() for at in (0, 3, 1, 4, 2, 0, 3)]


@pytest.mark.compiler
def test_every_level_and_number_of_threads_is_measured() -> None:
    found = measure_roofline(seconds=0.01)
    counts = thread_counts(detect().threads)
    assert list(found.levels) == [*detect().caches, "memory"]
    for values in (*found.bandwidth.values(), found.fp32):
        assert list(values) == counts and all(0 < rate.low <= rate.median <= rate.high for rate in values.values())
    assert Roofline.from_dict(json.loads(json.dumps(found.to_dict()))) == found


class FakeLoops:
    """Loops that take no time."""

    def read(self, address: int, num_bytes: int, threads: int, repeats: int = 1) -> None: ...

    def fma(self, threads: int) -> int:
        return 1000 * threads

    def bf16(self, threads: int) -> int:
        return 0


@pytest.mark.parametrize(("second", "raised"), [(5e-7, ()), (1.0, ("L1d 2",))], ids=["quiet the second time", "disturbed twice"])
def test_what_two_threads_read_slower_than_one_is_measured_again_and_never_taken(
    second: float, raised: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fake(calls: dict[str, object], anchor: str, *, seconds: float) -> Measurement:
        asked.append(list(calls))
        late = 1.0 if len(asked) == 1 else second
        return Measurement(anchor, {name: (late if name == "L1d 2" else 1e-6,) * 5 for name in calls}, 0)

    monkeypatch.setattr(roofline, "measure", fake)
    monkeypatch.setattr(roofline, "limits", lambda target: FakeLoops())
    monkeypatch.setattr(roofline, "detect", lambda: Hardware("x", ("avx2",), 2, 2, None, {"L1d": 32 << 10}))
    found = measure_roofline(best_cpu())
    assert asked[1:] == [["L1d 2"]] and found.raised == raised
    one, two = (found.bandwidth["L1d"][count].median for count in (1, 2))
    assert two == one if raised else two > one
    assert Roofline.from_dict(found.to_dict()) == found and Roofline.from_dict(KNOWN.to_dict() | {"raised": []}) == KNOWN


def test_what_is_amiss_with_shares_of_the_roofline_is_said(tmp_path: Path) -> None:
    interval = Interval(1.0, 1.0, 1.0)
    rows = [Row(Phase.DECODE, "1x1@1", "default", interval, interval, 1.0, 1.0, 5, share) for share in (0.5, 6.48)]
    limits = KNOWN.to_dict() | {"raised": ["L1d 2"]}
    assert limit_notes(rows[:1], [KNOWN.to_dict()]) == []
    raised, low = limit_notes(rows, [limits])
    assert "L1d with 2 threads" in raised and "above 100 %" in low and "too low" in low
    record = make_record()
    document = {**record.facts, "roofline": limits, **decide(record).document, "package": ""}
    report = write_report(tmp_path, document, rows).read_text()
    assert all(f"{line[1:]}.\n" in report for line in (raised, low))


def test_levels_are_read_where_they_are_and_the_last_cache_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "cold_bytes", cold_bytes)  # the real one
    hardware = Hardware("x", (), 2, 2, None, {"L1d": 48 << 10, "L2": 2 << 20, "L3": 300 << 20})
    sizes = level_sizes(hardware, 2, None)
    assert sizes["L1d"] == 48 << 10 and sizes["L2"] == 2 << 20  # half of each core's
    assert 2 * sizes["L2"] <= sizes["L3"] <= 75 << 20
    assert list(sizes) == ["L1d", "L2", "L3", "memory"] and list(sizes.values()) == sorted(sizes.values())
    assert list(level_sizes(Hardware("x", (), 1, 1, None, {}), 1, None)) == ["memory"]


@pytest.mark.parametrize(("threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_threads_double_up_to_all(threads: int, counts: list[int]) -> None:
    assert thread_counts(threads) == counts


def test_a_batch_takes_its_bytes_or_its_operations_whichever_is_longer() -> None:
    spec = KernelSpec(4, 2, 8, DType.FP32, block_size=4)
    decode, prefill = Point.parse("1x1@16"), Point.parse("1x64@64")
    moved = decode.kv_bytes(spec) + decode.io_bytes(spec)
    assert KNOWN.floor(spec, decode, 1, resident=10**6) == moved / 10.0
    assert KNOWN.floor(spec, decode, 1, resident=10**9) == moved / 10.0
    assert KNOWN.floor(spec, decode, 1, resident=900) == max(moved / 100.0, decode.flops(spec) / 50.0)
    assert KNOWN.floor(spec, prefill, 1, resident=900) == prefill.flops(spec) / 50.0
    assert KNOWN.peak(DType.BF16, 1) == 400.0 and KNOWN.peak(DType.FP16, 1) == 50.0


SPECS = {
    "plain": ("fp32-d16-h6x2-b5-NHD", 2 * 2 * 16 * 4),
    "int4, scales of 4 bytes each": ("bf16-d16-h4x2-b4-NHD-kvint4", 2 * 2 * (8 + 4)),
    "int8": ("bf16-d16v8-h4x2-b4-NHD-kvint8", 2 * (16 + 4 + 8 + 4)),
    "fp8, one scale for all": ("bf16-d16-h4x2-b4-NHD-kvfp8_e4m3", 2 * 2 * 16),
}


@pytest.mark.parametrize(("slug", "per_token"), SPECS.values(), ids=SPECS)
def test_bytes_of_a_key_are_counted_exactly(slug: str, per_token: int) -> None:
    spec = parse_slug(slug)[0]
    assert Point.parse("2x1@7+1x3@5").kv_bytes(spec) == (7 + 7 + 5) * per_token


def test_zero_points_and_latent_caches_are_counted() -> None:
    zero = parse_slug("bf16-d16-h4x2-b4-NHD-kvint8")[0].replace(kv_zero=True)
    assert Point.parse("1x1@7").kv_bytes(zero) == 7 * 2 * 2 * (16 + 8)
    latent = KernelSpec(16, 1, 576, head_dim_v=512, v_in_k=True, block_size=16)
    assert Point.parse("1x1@7").kv_bytes(latent) == 7 * 576 * 2  # V is a part of K, which is read once
    assert Point.parse("1x1@7").flops(latent) == 2 * 7 * 16 * (576 + 512)
    assert Point.parse("1x1@7").io_bytes(latent) == 16 * (576 + 512) * 2


def test_a_window_leaves_keys_out_of_bytes_and_operations() -> None:
    spec = KernelSpec(2, 1, 8, DType.FP32, window=4, block_size=4)
    point = Point.parse("1x3@10")  # rows at 7, 8 and 9 see four keys each; together keys 4 to 9
    assert point.kv_bytes(spec) == 6 * 2 * 8 * 4 and point.flops(spec) == 2 * 12 * 2 * 16
    both = spec.replace(causal=False, window_right=1)
    assert point.flops(both) == 2 * (5 + 5 + 4) * 2 * 16 and point.kv_bytes(both) == 6 * 2 * 8 * 4
    assert Point.parse("1x3@3").flops(spec.replace(window=None)) == 2 * 6 * 2 * 16


def test_the_plot_shows_every_batch_within_its_frame() -> None:
    dots = [("decode", 3.0, 25.0, "a batch"), ("decode", 0.1, 2.0, "another"), ("prefill", 500.0, 300.0, "a third")]
    svg = roofline_svg(KNOWN, 1, dots)
    centres = [tuple(map(float, found)) for found in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^/]*><title>', svg)]
    assert len(centres) == 3 and all(70 <= x <= 640 and 50 <= y <= 460 for x, y in centres)
    assert centres[0][0] > centres[1][0] and centres[0][1] < centres[1][1]  # further right, and higher
    assert "memory: 0 GB/s" in svg and "bf16 products" in svg


# --- benchmarks/attention_cpu.py -------------------------------------------------------------------------------------


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for variable, value in PINNED.items():  # or its main begins the process anew
        monkeypatch.setenv(variable, value)
    return importlib.import_module(name)


@pytest.fixture
def attention_cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("attention_cpu", monkeypatch)


@pytest.fixture
def attention_cpu_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("attention_cpu_report", monkeypatch)


@pytest.mark.parametrize(
    ("slug", "target", "products", "again"),
    [
        ("bf16-d64-h16x16-b32-NHD", "cpu:avx512_bf16", 1, 6),
        ("bf16-d128-h32x8-b32-NHD", "cpu:avx512_bf16", 4, 6),
        ("bf16-d128-h32x8-b32-NHD", "cpu:avx2", 8, 6),
        ("bf16-d64-h9x3-b32-NHD", "cpu:avx512_bf16", 3, 3),
        ("bf16-d128-h32x8-b32-NHD-kvint8", "cpu:avx512_bf16", 8, 6),
        ("bf16-d128-h32x8-b32-NHD", "cpu:neon", 8, 0),
        ("bf16-d128-h32x8-b32-NHD", "cpu:amx", 0, 0),
    ],
)
def test_the_loop_multiplies_each_vector_by_the_rows_that_share_its_head(
    slug: str, target: str, products: int, again: int, attention_cpu: ModuleType
) -> None:
    spec, point = parse_slug(slug)[0], Point.parse("8x1@2048")
    numbers = 2 * 8 * 2048 * spec.kv_heads * spec.head_dim  # of K and V
    batch = attention_cpu.Batch(spec, Phase.DECODE, point)
    assert attention_cpu.products_of(batch, parse_target(target), numbers * spec.cache_dtype.itemsize) == products
    assert attention_cpu.prefetches_again(spec, parse_target(target)) == again
    if spec.cache_dtype.quantised:
        assert attention_cpu.prefetches_again(spec.replace(kv_zero=True), parse_target(target)) == again


def test_a_report_gives_the_share_of_the_loop_where_a_record_has_it(tmp_path: Path, attention_cpu_report: ModuleType) -> None:
    measured = ROOT / "results/zen5/cpu-avx512_bf16/attention_cpu"
    old = json.loads((measured / "decode-bf16-d64-h16x16-b32-NHD-8x1_2048.json").read_text())
    old["contenders"].pop("loop", None)
    new = copy.deepcopy(old) | {"name": "with the loop"}
    new["contenders"]["loop"] = {**new["contenders"][attention_cpu_report.OURS], "rounds": [s / 2 for s in new["contenders"][attention_cpu_report.OURS]["rounds"]]}
    for name, record in (("decode-old", old), ("decode-new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    table = attention_cpu_report.report(tmp_path, Roofline.from_dict(json.loads((measured / "roofline.json").read_text()))).read_text()
    rows = {cells[0]: cells for line in table.splitlines() if line.startswith("|") for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}
    at = rows["batch"].index("of the loop")
    assert (rows["with the loop"][at], rows[old["name"]][at]) == ("0.50 [0.50, 0.50]", "")
    assert "share of the loop over its blocks 0.50 [0.50, 0.50] (one batch)." in table
    assert re.search(r"share of the read of its blocks .*\(geometric mean of 2 batches\)", table)


def test_a_report_gives_shares_and_peers_by_the_order_of_blocks_where_a_record_has_them(tmp_path: Path, attention_cpu_report: ModuleType) -> None:
    measured = ROOT / "results/zen5/cpu-avx512_bf16/attention_cpu"
    old = json.loads((measured / "decode-bf16-d64-h16x16-b32-NHD-32x1_8192.json").read_text())
    for name in [name for name in old["contenders"] if name in ("runs", "ordered") or name.startswith("vllm_ordered")]:
        del old["contenders"][name]
    new, read = copy.deepcopy(old) | {"name": "with orders"}, old["contenders"]["read"]

    def times(factor: float) -> dict[str, object]:
        rounds = [second * factor for second in read["rounds"]]
        return {**read, "rounds": rounds, "seconds": {**read["seconds"], "median": read["seconds"]["median"] * factor}}

    new["contenders"] |= {"runs": times(2.0), "ordered": times(1.25), "vllm_ordered_16": times(5.0), "vllm_ordered_32": times(2.5)}
    roofline = Roofline.from_dict(json.loads((measured / "roofline.json").read_text()))
    (tmp_path / "decode-old.json").write_text(json.dumps(old))
    without = attention_cpu_report.report(tmp_path, roofline).read_text()
    assert "order of memory" not in without and "runs of" not in without, "what no record has gets neither column nor line"
    (tmp_path / "decode-new.json").write_text(json.dumps(new))
    table = attention_cpu_report.report(tmp_path, roofline).read_text()
    rows = {cells[0]: cells for line in table.splitlines() if line.startswith("|") for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}
    for column, share in ((f"in runs of {RUN} blocks", "0.50 [0.50, 0.50]"), ("in the order of memory", "0.80 [0.80, 0.80]")):
        at = rows["batch"].index(column)
        assert (rows["with orders"][at], rows[old["name"]][at]) == (share, "")
        assert f"decode, bf16 KV of 200 MB and more: share of the plain read {column} {share} (one batch)." in table
    assert "best peer's time over ours, both in the order of memory, 2.00 [2.00, 2.00] (one batch), at least 2.00 [2.00, 2.00] (with orders)." in table
    at = rows["batch"].index("best peer")
    assert rows["with orders"][at:] == rows[old["name"]][at:] and "ordered" not in rows["with orders"][at], "the other columns are of random orders"


@pytest.fixture
def measured(tmp_path: Path, attention_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three records and a roofline, of a machine that is made this one's kind; the report and the measuring are left out."""
    folder = tmp_path / best_cpu().slug / "attention_cpu"
    folder.mkdir(parents=True)
    source = ROOT / "results/zen5/cpu-avx512_bf16/attention_cpu"
    for name in ("decode-bf16-d64-h16x16-b32-NHD-8x1_2048", "decode-bf16-d64-h16x16-b32-NHD-8x1_8192", "prefill-bf16-d64-h16x16-b32-NHD-1x1024_1024"):
        (folder / f"{name}.json").write_text((source / f"{name}.json").read_text())
    roofline = json.loads((source / "roofline.json").read_text())
    roofline.pop("hardware", None)  # an older one, which does not say whose it is
    (folder / "roofline.json").write_text(json.dumps(roofline))
    hardware = json.loads((folder / f"{name}.json").read_text())["environment"]["hardware"]
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(attention_cpu, "hardware_fingerprint", lambda target: hardware)
    monkeypatch.setattr(attention_cpu, "report", lambda folder, roofline: folder / "table.md")
    return folder


def change_machine(path: Path, **changes: object) -> None:
    record = json.loads(path.read_text())
    record["environment"]["hardware"].update(changes)
    path.write_text(json.dumps(record))


def attention(attention_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["attention_cpu.py", "--out", str(out), *words])
    attention_cpu.main()


def test_what_has_a_record_is_counted_and_its_machine_named(
    measured: Path, attention_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_machine(next(measured.glob("prefill*")), affinity=1, quota=1.5, caches={"L1d": 49152, "L2": 1048576, "L3": 1 << 20})
    attention(attention_cpu, monkeypatch, measured.parents[1], "--point", "h16x16-b32-NHD-8x1@", "--point", "bf16-d64-h16x16-b32-NHD-1x1024", "--no-peers")
    machine = "of this kind of machine, AMD EPYC (cpu:avx512_bf16, 2 cores, L1d 48 KiB, L2 1024 KiB); --again measures them anew"
    assert f"3 of the 3 batches have a record in {measured}, {machine}" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"device": "AMD EPYC 9R45"}, {"caches": {"L1d": 32768, "L2": 1048576, "L3": 33554432}}, {"cores": 4}])
def test_records_of_another_machine_get_no_company(
    changes: dict[str, object], measured: Path, attention_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, decode = measured.parents[1], ["--point", "decode-bf16-d64-h16x16-b32-NHD-8x1"]
    monkeypatch.setattr(attention_cpu, "_measure_all", lambda *_: pytest.fail("it measured"))
    change_machine(next(measured.glob("prefill*")), **changes)
    for words in ([], decode, [*decode, "--again"], ["--only", "decode", "--again"]):
        with pytest.raises(ConfigError, match=r"1 of its 3 records are of AMD EPYC.*, this is AMD EPYC \(.*give --out another folder"):
            attention(attention_cpu, monkeypatch, out, *words)
    attention(attention_cpu, monkeypatch, out, "--report")


def test_a_roofline_of_another_machine_is_measured_anew_with_all_records_alone(
    measured: Path, attention_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = measured.parents[1]
    for path in measured.glob("*-*.json"):
        change_machine(path, cores=4)
    with pytest.raises(ConfigError, match="or --again to measure them anew"):
        attention(attention_cpu, monkeypatch, out)
    with pytest.raises(ConfigError, match=r"give --out another folder$"):
        attention(attention_cpu, monkeypatch, out, "--again", "--point", "h16x16")
    monkeypatch.setattr(attention_cpu, "measure_roofline", lambda target: Roofline.from_dict(json.loads((measured / "roofline.json").read_text())))
    monkeypatch.setattr(attention_cpu, "_measure_all", lambda *_: None)
    attention(attention_cpu, monkeypatch, out, "--again")
    assert json.loads((measured / "roofline.json").read_text())["hardware"]["cores"] == 2
    for path in measured.glob("*-*.json"):
        path.unlink()
    monkeypatch.setattr(attention_cpu, "hardware_fingerprint", lambda target: {"device": "Other", "target": target.name, "cores": 2, "caches": {}})
    with pytest.raises(ConfigError, match=r"its roofline.json is of AMD EPYC .* this is Other"):
        attention(attention_cpu, monkeypatch, out)


def test_a_checkout_that_is_none_is_refused_by_its_name(
    tmp_path: Path, attention_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"checkout={folder}: no checkout of pagegen is there; give the path"):
            attention(attention_cpu, monkeypatch, tmp_path, "--config", f"checkout={folder}")
    (tmp_path / "pagegen").mkdir()
    (tmp_path / "pagegen" / "__init__.py").touch()
    (tmp_path / "pagegen" / "__main__.py").write_text("raise SystemExit('it is too old')")
    with pytest.raises(ConfigError, match=f"checkout={tmp_path}: it does not render bf16-d64-h9x3-b32-NHD: it is too old"):
        attention_cpu.attend_of(str(tmp_path), parse_slug("bf16-d64-h9x3-b32-NHD")[0], best_cpu())


# --- benchmarks/block_order.py ---------------------------------------------------------------------------------------


def test_places_are_permuted_within_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    permuted = benchmark("block_order", monkeypatch).permuted
    assert permuted(10, 1).tolist() == list(range(10))
    places = permuted(1000, 30).tolist()
    assert sorted(places) == list(range(1000)) and all(place // 30 == at // 30 for at, place in enumerate(places))
    assert sum(b - a == 1 for a, b in itertools.pairwise(places)) < 100


def test_a_ring_goes_once_through_as_many_lines_each_in_a_span_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = allocate_bytes(64 << 10)
    begin = benchmark("block_order", monkeypatch).ring(memory, lines=16, span=4096, word=1)
    words, seen = memory.view(torch.int64), [begin]
    while (address := int(words[(seen[-1] - memory.data_ptr()) // 8])) != begin:
        seen.append(address)
    offsets = [address - memory.data_ptr() for address in seen]
    assert sorted(offset // 4096 for offset in offsets) == list(range(16)) and all(offset % 64 == 8 for offset in offsets)


@pytest.mark.compiler
def test_block_order_gives_a_share_for_each_order_and_a_time_for_each_ring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block_order = benchmark("block_order", monkeypatch)
    monkeypatch.setattr("sys.argv", ["block_order.py", "--mib", "64", "--seconds", "0.05", "--kib", "6", "32", "--threads", "1"])
    block_order.main()
    out = capsys.readouterr().out
    shares = [tuple(map(float, found)) for found in re.findall(r"(\d\.\d\d) \[(\d\.\d\d), (\d\.\d\d)\] of the plain read", out)]
    assert len(shares) == 2 * (4 + 3), "of 64 MiB no window has 128 MiB, and one of 32 KiB has one piece of 32 KiB alone"
    assert all(0 < low <= share <= high < 10 for share, low, high in shares)
    loads = [float(found) for found in re.findall(r"(\d+\.\d) ns a load", out)]
    assert len(loads) == 3 and all(0.1 < load < 10_000 for load in loads)
    for words in (["--kib", "0"], ["--mib", "1"], ["--threads", "0"], ["--seconds", "-1"]):
        monkeypatch.setattr("sys.argv", ["block_order.py", *words])
        with pytest.raises(SystemExit):
            block_order.main()
        assert f"{words[0]} {words[1]}: " in capsys.readouterr().err
