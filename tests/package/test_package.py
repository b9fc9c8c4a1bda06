"""Claims about kernel packages: what is written is what is loaded, and whatever does not fit is refused in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagegen import cli
from pagegen import package as package_module
from pagegen.check.compare import check_kernels
from pagegen.errors import KernelError, PackageError, PagegenError, UntunedShapeWarning
from pagegen.explain import explain
from pagegen.kernel import PagedKernels, allocate_cache
from pagegen.loader import FIELDS, KERNEL_FIELDS, PackagedKernels, read_manifest
from pagegen.package import find_package, install_package, load_package, package_name, verify_package, write_package
from pagegen.records import BatchShape, DispatchRow, DispatchTable
from pagegen.spec import PAGED_OPS, Op, Phase, parse_slug
from pagegen.target import parse_target
from tests.package.conftest import SPEC, TABLES, edit_manifest, marked, packaged, tree, write

HERE = parse_target("cpu")


def which(
    kernels: PagedKernels, rows: int, seqs: int, context: int, max_query_len: int | None = None, max_context_len: int | None = None
) -> int:
    """The number that a `marked` kernel writes for a batch of `seqs` sequences with `rows` query tokens each."""
    k_cache, v_cache = allocate_cache(SPEC, 1)
    out = torch.zeros(max(1, rows * seqs), SPEC.q_heads, SPEC.head_dim)
    table = torch.zeros(seqs, -(-context // SPEC.block_size), dtype=torch.int32)
    starts = torch.arange(seqs + 1, dtype=torch.int32) * rows
    kernels.attend(
        out,
        out.clone(),
        k_cache,
        v_cache,
        table,
        torch.full((seqs,), context, dtype=torch.int32),
        starts,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )
    return int(out[0, 0, 0])


@pytest.fixture
def marked_package(tmp_path: Path) -> Path:
    return write(tmp_path / "marked", {f"attend_{i}": marked(i + 1) for i in range(3)})


# --- written and loaded ----------------------------------------------------------------------------------------------


def test_a_loaded_package_gives_the_references_numbers(original: Path) -> None:
    before = tree(original)
    package = load_package(original)
    assert (package.spec, package.target, package.path) == (SPEC, HERE, original)
    assert package.name == original.name == package_name(SPEC, HERE) == package.manifest["name"]
    for kernels in (package, package.default_kernels()):
        assert check_kernels(kernels).reason == ""
    assert tree(original) == before
    assert not list(original.rglob("__pycache__"))  # not even Python writes there


def test_the_batch_chooses_the_kernel_and_the_default_stays_reachable(marked_package: Path) -> None:
    package = load_package(marked_package)
    assert which(package, rows=1, seqs=3, context=64, max_query_len=1, max_context_len=64) == 2  # decode, short
    with pytest.warns(UntunedShapeWarning, match=r"decode batch .sequences 3, longest query 1, longest context 65. lies .*more than 64 tokens of context"):
        assert which(package, rows=1, seqs=3, context=65, max_query_len=1, max_context_len=65) == 1  # decode, long
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said, and once is enough
        assert which(package, rows=1, seqs=5, context=99) == 1
    assert which(package, rows=4, seqs=3, context=9, max_query_len=4) == 3  # prefill, many
    with pytest.warns(UntunedShapeWarning, match="less than 2 sequences"):
        assert which(package, rows=4, seqs=1, context=9, max_query_len=4) == 1  # prefill, one
    assert which(package, rows=1, seqs=3, context=64) == 2  # a CPU batch is read for what was not said
    assert which(package.default_kernels(), rows=1, seqs=3, context=64) == 1


def test_layers_of_a_step_look_at_the_table_once_and_any_other_batch_anew(marked_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, shapes = PackagedKernels(marked_package), list[BatchShape]()
    find = DispatchTable.find

    def looked_at(table: DispatchTable, shape: BatchShape) -> DispatchRow | None:
        shapes.append(shape)
        return find(table, shape)

    monkeypatch.setattr(DispatchTable, "find", looked_at)
    step: dict[str, Any] = {"rows": 1, "seqs": 3, "context": 64, "max_query_len": 1, "max_context_len": 64}
    assert [which(kernels, **step) for _ in range(30)] == [2] * 30 and len(shapes) == 1
    assert which(kernels, rows=4, seqs=3, context=9, max_query_len=4, max_context_len=9) == 3 and len(shapes) == 2
    assert which(kernels, **step) == 2 and len(shapes) == 3
    with pytest.warns(UntunedShapeWarning):
        assert [which(kernels, rows=1, seqs=3, context=context) for context in (64, 65, 64)] == [2, 1, 2], "not said: read"


def test_a_loaded_package_raises_the_callers_own_errors(original: Path) -> None:
    k_cache, v_cache = allocate_cache(SPEC, 2)
    with pytest.raises(KernelError, match="pairs"):
        load_package(original).copy_blocks(k_cache, v_cache, torch.tensor([[0, 1], [0, 1]]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_lens", torch.tensor(1, dtype=torch.int32)),
        ("context_lens", torch.tensor([math.nan])),
        ("context_lens", torch.tensor([1j])),
        ("q", torch.tensor(1.0)),
    ],
)
def test_tensors_that_choose_no_kernel_are_refused_by_name(name: str, value: torch.Tensor, original: Path) -> None:
    k_cache, v_cache = allocate_cache(SPEC, 1)
    out = torch.zeros(1, SPEC.q_heads, SPEC.dim_v)
    one, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    q = value if name == "q" else torch.zeros(1, SPEC.q_heads, SPEC.head_dim)
    lens = value if name == "context_lens" else one
    with pytest.raises(KernelError, match=name if value.dim() else "shape"):
        load_package(original).attend(out, q, k_cache, v_cache, one[None] - 1, lens, starts)


def test_packages_are_loaded_side_by_side_and_each_once(original: Path, marked_package: Path) -> None:
    one, other = load_package(original), load_package(marked_package)
    assert one.path != other.path
    loaded = set(sys.modules)
    load_package(str(original))
    assert set(sys.modules) == loaded
    assert len({name.split(".")[0] for name in loaded if name.startswith("_pagegen_package_")}) >= 2


def test_threads_may_race_for_the_first_call(package: Path) -> None:
    kernels, failures = PackagedKernels(package), []

    def run() -> None:
        failures.append(check_kernels(kernels, ops=[Op.COPY_BLOCKS]).reason)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [""] * 4


def test_what_is_written_is_for_all_to_read_and_for_its_owner_to_write(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = write(tmp_path)
    finally:
        os.umask(umask)
    assert {entry.stat().st_mode & 0o777 for entry in path.rglob("*")} == {0o755, 0o644}
    assert path.stat().st_mode & 0o777 == 0o755
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_newer_package_replaces_an_older_one_and_a_failed_one_does_not(package: Path) -> None:
    first = read_manifest(package)
    write(package.parent, {f"attend_{i}": marked(i) for i in range(3)})
    second = read_manifest(package)
    assert first["version"] != second["version"] and load_package(package).manifest == second
    lost = dataclasses.replace(packaged(Op.ATTEND), binary=Path("/nowhere/kernel.so"))
    with pytest.raises(PackageError, match=r"/nowhere/kernel\.so"):
        write(package.parent, {f"attend_{i}": lost for i in range(3)})
    assert read_manifest(package) == second
    assert [entry.name for entry in package.parent.iterdir()] == [package.name]


def test_writers_of_one_package_replace_each_other(tmp_path: Path) -> None:
    problems: list[Exception] = []

    def write_often(text: str) -> None:
        for _ in range(15):
            try:
                with package_module._staged(tmp_path / "package") as root:
                    (root / "manifest.json").write_text(text)
            except PackageError as error:
                problems.append(error)

    threads = [threading.Thread(target=write_often, args=(text,)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert [path.name for path in tmp_path.iterdir()] == ["package"] and (tmp_path / "package/manifest.json").read_text() in "abcd"


@pytest.mark.parametrize("after", ["_require_owned", "_require_whole"])
def test_a_package_that_vanishes_while_it_is_loaded_is_one_line(after: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = getattr(package_module, after)

    def vanishing(*arguments: Any) -> None:
        check(*arguments)
        shutil.rmtree(package)

    monkeypatch.setattr(package_module, after, vanishing)
    with pytest.raises(PackageError, match=r"cannot be read|missing"):
        load_package(package)


def test_a_deterministic_package_with_a_kernel_for_each_phase_is_refused_when_written_and_when_loaded(
    tmp_path: Path,
) -> None:
    spec = SPEC.replace(deterministic=True)
    kernels = {"attend_1": packaged(Op.ATTEND, spec, tile_kv=16), **{op.value: packaged(op, spec) for op in PAGED_OPS}}
    plain = {op: DispatchTable((), op.value) for op in PAGED_OPS}
    decode, rest = DispatchRow(Phase.DECODE, "attend_1"), [DispatchRow(phase, "attend_1") for phase in Phase][1:]
    some, bounded = (DispatchTable(rows, "attend") for rows in ((decode,), (*rest, dataclasses.replace(decode, max_seqs=4))))
    for table in (some, bounded):
        with pytest.raises(PackageError, match="is deterministic: one kernel for all batches"):
            write_package(tmp_path, spec=spec, target=HERE, kernels=kernels, dispatch={**plain, Op.ATTEND: table}, evidence={})
    for name, table in (("one", plain[Op.ATTEND]), ("rows", DispatchTable((decode, *rest), "attend"))):
        tables = {**plain, Op.ATTEND: table}
        path = write_package(tmp_path / name, spec=spec, target=HERE, kernels=kernels, dispatch=tables, evidence={})
        PackagedKernels(path)
    edit_manifest(path, lambda manifest: manifest["dispatch"].update(attend=some.to_dict()))
    with pytest.raises(PackageError, match=r"deterministic, .* gives batches different kernels; .*`pagegen tune`"):
        PackagedKernels(path)


def test_a_folder_around_a_package_names_the_package(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(PackageError, match=f"name {path}, which lies in it"):
        load_package(tmp_path)


def test_a_place_that_cannot_hold_the_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"/proc/.*--out"):
        write(Path("/proc/nowhere"))
    (tmp_path / package_name(SPEC, HERE)).mkdir()
    (tmp_path / package_name(SPEC, HERE) / "thesis.txt").touch()
    with pytest.raises(PackageError, match="is no kernel package"):
        write(tmp_path)
    assert list(tmp_path.rglob("thesis.txt"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({Op.WRITE_KV: None}, "no dispatch table for write_kv"),
        ({Op.ATTEND: DispatchTable((), "attend_9")}, "names 'attend_9'"),
        ({Op.ATTEND: DispatchTable((), "write_kv")}, "names 'write_kv'"),
        ({Op.COPY_BLOCKS: DispatchTable((DispatchRow(Phase.DECODE, "copy_blocks"),), "copy_blocks")}, "not dispatched by batch"),
    ],
)
def test_tables_that_do_not_fit_the_kernels_are_refused(
    tables: dict[Op, DispatchTable | None], message: str, tmp_path: Path
) -> None:
    kernels = {op.value: packaged(op) for op in PAGED_OPS}
    plain = {op: DispatchTable((), op.value) for op in PAGED_OPS}
    changed = {op: table for op, table in {**plain, **tables}.items() if table}
    with pytest.raises(PackageError, match=message):
        write_package(tmp_path, spec=SPEC, target=HERE, kernels=kernels, dispatch=changed, evidence={})
    with pytest.raises(PackageError, match="the package is for"):
        write_package(tmp_path, spec=SPEC.replace(block_size=6), target=HERE, kernels=kernels, dispatch=plain, evidence={})
    assert not list(tmp_path.iterdir())


DELETED = ...  # no value of JSON

# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(PackageError, match=r"is no kernel package.*pagegen tune"):
            load_package(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged"),
        ('{"format": 1, "ab', "damaged"),
        ("[" * 100_000, "damaged"),
        ("[]", "format None"),
        ('{"format": 2}', "format 2, this code reads format 1"),
        ('{"format": 1}', "'abi' is missing"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(text: str, message: str, package: Path) -> None:
    (package / "manifest.json").write_text(text)
    with pytest.raises(PackageError, match=message):
        load_package(package)


@pytest.mark.parametrize("value", [None, 7, "", "x", [], {}, {"attend": None}, [{}], {"contest": [{"point": "a"}]}, DELETED], ids=repr)
def test_nothing_that_a_manifest_may_hold_ends_in_a_traceback(value: Any, package: Path) -> None:
    manifest = (package / "manifest.json").read_text()
    words = ["kernels attend_1", "dispatch attend", "dispatch attend fallback", "fingerprint hardware", "spec layout"]
    words += [*FIELDS, *(f"kernels attend_1 {name}" for name in KERNEL_FIELDS)]
    for *outer, last in map(str.split, words):

        def replace(manifest: dict[str, Any], outer: list[str] = outer, last: str = last) -> None:
            for name in outer:
                manifest = manifest[name]
            manifest[last] = value
            if value is DELETED:
                del manifest[last]

        edit_manifest(package, replace)
        with contextlib.suppress(PagegenError):
            load_package(package)
        with contextlib.suppress(PagegenError):
            verify_package(package)
        with contextlib.suppress(PagegenError):
            explain(read_manifest(package))
        (package / "manifest.json").write_text(manifest)


def test_an_unknown_c_abi_is_refused(package: Path) -> None:
    edit_manifest(package, lambda manifest: manifest.update(abi=2))
    with pytest.raises(PackageError, match="C ABI 2, its code has 1"):
        load_package(package)


@pytest.mark.parametrize("name", ["bin/attend_1.so", "sources/write_kv.cpp", "_pagegen/kernel.py", "__init__.py"])
def test_a_changed_file_is_refused_with_the_cure(name: str, package: Path) -> None:
    path = package / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PackageError, match=f"{name}.*SHA-256 differs") as caught:
        load_package(package)
    assert ("delete it and it is rebuilt" if name.startswith("bin") else "pagegen tune") in str(caught.value)
    assert verify_package(package)


def test_a_file_too_many_or_too_few_is_refused(package: Path) -> None:
    (package / "_pagegen" / "torch.py").write_text("raise SystemExit('ran')")
    with pytest.raises(PackageError, match=r"torch\.py is not in the manifest"):
        load_package(package)
    (package / "_pagegen" / "torch.py").unlink()
    (package / "_pagegen" / "spec.py").unlink()
    with pytest.raises(PackageError, match=r"spec\.py is missing"):
        load_package(package)


@pytest.mark.parametrize("name", [".", "bin", "bin/attend_0.so"])
def test_a_package_that_others_can_change_is_refused(name: str, package: Path) -> None:
    (package / name).chmod((package / name).stat().st_mode | 0o020)
    with pytest.raises(PackageError, match=r"can be changed by others.*chmod -R go-w"):
        load_package(package)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_package_of_another_user_is_refused(package: Path) -> None:
    os.chown(package / "bin" / "attend_0.so", 12345, -1)
    with pytest.raises(PackageError, match="owner 12345"):
        load_package(package)


def test_a_link_in_a_package_is_refused(package: Path) -> None:
    (package / "py.typed").unlink()
    (package / "py.typed").symlink_to("/dev/null")
    with pytest.raises(PackageError, match="is a link"):
        load_package(package)


def test_bytecode_beside_the_sources_is_not_run(package: Path) -> None:
    cached = package / "_pagegen" / "__pycache__"
    cached.mkdir()
    for version in ("311", "312", "313"):
        (cached / f"errors.cpython-{version}.pyc").write_bytes(b"junk")
        (cached / f"spec.cpython-{version}.pyc").write_bytes(b"junk")
    load_package(package)


# --- the user's cache ------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "own cache"))


@pytest.mark.usefixtures("empty_cache")
def test_an_installed_package_is_found_by_its_spec_target_and_hardware(package: Path) -> None:
    assert find_package(SPEC, HERE) is None
    installed = install_package(package)
    assert tree(installed).keys() == {str(installed) + path.removeprefix(str(package)) for path in tree(package)}
    assert find_package(SPEC, HERE) == find_package(SPEC.replace(layout=None), HERE) == installed
    assert find_package(SPEC.replace(block_size=7), HERE) is None
    assert find_package(SPEC.replace(block_size=7), HERE, any_block_size=True) == installed
    assert find_package(SPEC.replace(block_size=7, q_heads=8), HERE, any_block_size=True) is None
    assert find_package(SPEC, parse_target("cpu:scalar")) is None
    assert find_package(SPEC, parse_target("hip:gfx942")) is None
    edit_manifest(installed, lambda manifest: manifest["fingerprint"]["hardware"].update(device="another"))
    with pytest.warns(UserWarning, match="tuned on other hardware"):
        assert find_package(SPEC, HERE) is None


@pytest.mark.usefixtures("empty_cache")
def test_packages_of_two_machines_share_a_cache(package: Path) -> None:
    here = install_package(package)
    edit_manifest(package, lambda manifest: manifest["fingerprint"]["hardware"].update(cores=4096))
    assert install_package(package) != here
    assert find_package(SPEC, HERE) == here


@pytest.mark.usefixtures("empty_cache")
def test_of_two_that_fit_the_newer_one_is_found(package: Path) -> None:
    installed = install_package(package)
    newer = Path(shutil.copytree(installed, installed.with_name("newer")))
    edit_manifest(newer, lambda manifest: manifest.update(created="2999-01-01T00:00:00+00:00"))
    assert find_package(SPEC, HERE) == newer


@pytest.mark.usefixtures("empty_cache")
def test_what_is_broken_in_the_cache_is_passed_over_with_a_warning(package: Path) -> None:
    installed = install_package(package)
    broken = installed.with_name("broken")
    broken.mkdir()
    (broken / "manifest.json").write_text('{"format": 99}')
    installed.with_name("some.lock").touch()
    with pytest.warns(UserWarning, match="passed over.*format 99"):
        assert find_package(SPEC, HERE) == installed


@pytest.mark.usefixtures("empty_cache")
def test_a_damaged_package_is_not_installed(package: Path) -> None:
    (package / "README.md").write_text("other")
    with pytest.raises(PackageError, match=r"README\.md"):
        install_package(package)


def _without_metadata(manifest: dict[str, Any]) -> None:
    del manifest["fingerprint"]


STRANGERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another device": (lambda m: m["fingerprint"]["hardware"].update(device="B"), "other hardware .*device: 'B'"),
    "nearly the same name": (
        lambda m: m["fingerprint"]["hardware"].update(device=m["fingerprint"]["hardware"]["device"] + " Processor"),
        "other hardware .*device: ",
    ),
    "a field that is not known": (lambda m: m["fingerprint"]["hardware"].update(boost=True), "other hardware .*boost: True"),
    "no metadata": (_without_metadata, "fingerprint"),
    "an older schema": (lambda m: m.update(format=0), "format 0"),
    "another layout": (lambda m: m["spec"].update(layout="HND"), ""),
    "another target": (lambda m: m.update(target="cpu:scalar"), ""),
}


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("kind", STRANGERS)
def test_f08_only_what_was_tuned_for_exactly_this_is_found_and_nothing_else_is_touched(package: Path, kind: str) -> None:
    edit, said = STRANGERS[kind]
    installed = install_package(package)
    stranger = installed.rename(installed.with_name("stranger"))
    edit_manifest(stranger, edit)
    before = tree(stranger)
    with pytest.warns(UserWarning, match=f"passed over in the package cache: .*{said}") if said else contextlib.nullcontext():
        assert find_package(SPEC, HERE) is None
    mine = install_package(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find_package(SPEC, HERE) == mine
    assert tree(stranger) == before


@pytest.mark.usefixtures("empty_cache")
def test_f08_what_was_tuned_under_another_spelling_of_the_device_is_found_and_serves(package: Path) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        hardware = manifest["fingerprint"]["hardware"]
        hardware["device"] = f"  {hardware['device'].upper()} (TM)"

    edit_manifest(package, rename)
    installed = install_package(package)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_package(SPEC, HERE) == installed
    assert check_kernels(load_package(installed)).reason == ""


# --- verify and show -------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["package", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_whole_package_verifies(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_package(original) == []
    status, out, _ = run(capsys, "verify", str(original), "--json")
    assert (status, json.loads(out)) == (0, {"ok": True, "problems": []})


def test_everything_that_differs_is_listed_and_the_answer_is_no(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "bin" / "write_kv.so").unlink()
    (package / "bin" / "attend_0.so").write_bytes(b"")
    (package / "extra").touch()
    status, out, _ = run(capsys, "verify", str(package))
    assert status == 1
    assert [line.split(":")[0] for line in out.splitlines()] == ["extra", "bin/attend_0.so", "bin/write_kv.so"]


def test_a_source_that_its_spec_and_config_do_not_render_to_is_found_whatever_its_hash(package: Path) -> None:
    from pagegen.build.cpp import file_sha256

    path = package / "sources" / "attend_1.cpp"
    path.write_text(path.read_text() + "// improved by hand\n")
    edit_manifest(package, lambda manifest: manifest["files"].update({"sources/attend_1.cpp": file_sha256(path)}))
    assert [problem for problem in verify_package(package) if "renders other text" in problem]

    def foreign_config(manifest: dict[str, Any]) -> None:
        manifest["kernels"]["attend_2"]["config"]["tile_q"] = 5

    edit_manifest(package, foreign_config)
    assert [problem for problem in verify_package(package) if problem.startswith("attend_2: does not render again (knob tile_q=5")]


def test_show_tells_spec_configs_dispatch_and_evidence(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "show", str(original))
    assert status == 0
    for words in (SPEC.slug, "6 query heads on 2 KV heads", "tile_kv=16", "decode, up to 64 tokens of context: attend_1", "0.5123"):
        assert words in out
    assert "prefill, 2 sequences or more: attend_2" in out and "everything else: attend_0" in out
    assert json.loads(run(capsys, "show", str(original), "--json")[1]) == read_manifest(original)


def test_a_folder_that_is_no_package_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "verify"):
        status, _, err = run(capsys, command, str(tmp_path))
        assert status == 2 and len(err.splitlines()) == 1 and "is no kernel package" in err


def test_the_import_name_says_spec_and_target() -> None:
    spec = parse_slug("bf16-d64-h9x3-b16-HDN8_HDN-lse")[0]
    assert package_name(spec, parse_target("cpu:avx512")) == "pagegen_bf16_d64_h9x3_b16_hdn8_hdn_lse_cpu_avx512"
    assert package_name(spec, parse_target("cuda:sm_90")).isidentifier()


def test_the_tables_of_these_tests_name_every_kernel() -> None:
    assert TABLES[Op.ATTEND].kernels == ("attend_0", "attend_1", "attend_2")
