"""Public failures of other tuners, JIT compilers and their caches, each with the answer that is right.

`ANSWERS` says where each row of the list of them is answered; what no other file claims is claimed here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagegen import paths, tune
from pagegen import render as render_module
from pagegen import target as target_module
from pagegen.build import build, build_kernels, cpp
from pagegen.catalog import TEMPLATES, template_for, variant
from pagegen.check import CheckReport
from pagegen.errors import CheckError, ConfigError
from pagegen.kernel import allocate_cache
from pagegen.records import Evaluation, Status
from pagegen.render import environment, render
from pagegen.space import Config, ConfigSpace, Knob
from pagegen.spec import DType, KernelSpec, Op, Phase, parse_slug
from pagegen.target import Fingerprint, best_cpu, detect, hardware_fingerprint, parse_target
from pagegen.tuning import evaluate, joining
from pagegen.tuning.evaluate import Evaluator
from pagegen.tuning.measure import measure
from pagegen.tuning.record import read_record
from pagegen.tuning.sampling import digest
from pagegen.tuning.storage import open_storage
from pagegen.tuning.study import BucketStudy
from pagegen.tuning.workload import Inputs, Point, Pool, Workload
from tests.build.test_cpp import SCALAR, STUB, compiles, stub
from tests.test_public_failures import LIST, assert_answered

from .fake_record import make_record, write
from .fake_tune import SPACE
from .faulty import before_the_timer
from .test_search import DEAD_BEAT, ended, kill, run, start_tuner, until_it_hangs

__all__ = ["stub"]  # the fixture: a compiler whose every output differs

ROOT = Path(__file__).parents[2]
SPEC = parse_slug("fp32-d8-h2x1-b4-NHD")[0]
DECODE = Workload(Phase.DECODE, (Point.parse("2x1@37"),))
HERE = "tuning.test_public_failures_f"

ANSWERS: dict[str, tuple[str, ...]] = {
    "F01 a key leaves out what changes the code (triton PRs 1242, 2534, 4046; aiter PR 2774; arrayfire PR 3182)": (
        f"{HERE}.test_f01_whatever_changes_the_code_is_compiled_once_and_nothing_else_is",
        f"{HERE}.test_f01_whatever_changes_a_timing_is_a_study_of_its_own",
        "test_render.test_each_field_of_the_spec_changes_the_key",
        "test_render.test_each_value_of_each_knob_changes_the_key",
        "test_render.test_an_edit_of_the_template_or_of_what_it_includes_changes_the_key",
        "test_render.test_the_key_is_the_same_in_every_process_and_needs_no_torch",
    ),
    "F02 a binary of this machine used on another (vLLM issue 41871, MFC issue 1277, llvm PR 196477, Jittor issue 266)": (
        f"{HERE}.test_f02_a_home_that_moves_between_processors_is_built_for_each",
        f"{HERE}.test_f02_gpus_of_two_names_or_architectures_are_two_machines",
        "build.test_cpp.test_no_flag_means_whatever_this_machine_is",
        "package.test_loader.test_an_instruction_set_that_is_not_here_is_refused_before_any_code_runs",
        "package.test_loader.test_a_gpu_package_is_sources_and_is_refused_where_there_is_no_gpu",
    ),
    "F03 a killed builder or tuner leaves a lock or half a file (pytorch issue 189245, flashinfer issue 972)": (
        f"{HERE}.test_f03_a_builder_killed_before_its_rename_leaves_nothing_that_counts",
        f"{HERE}.test_f03_a_tuner_killed_while_it_writes_its_record_leaves_the_old_one",
        "build.test_cpp.test_a_killed_builder_leaves_no_lock",
        "build.test_cpp.test_a_damaged_entry_is_a_miss_with_one_warning",
        "tuning.test_decide.test_a_record_that_cannot_be_replayed_is_refused_in_one_line",
        "tuning.test_storage.test_a_killed_holder_blocks_nobody",
    ),
    "F04 parallel builders of one kernel (triton issues 2688, 11512; PRs 4295, 11319)": (
        "build.test_cpp.test_parallel_builders_of_one_key_share_one_build",
        "package.test_package.test_writers_of_one_package_replace_each_other",
    ),
    "F05 a cache that cannot be written (triton issue 518)": (
        f"{HERE}.test_f05_a_user_without_a_home_or_with_one_that_cannot_be_written_is_told_the_setting",
        f"{HERE}.test_f05_a_full_disk_names_the_setting",
        "build.test_cpp.test_a_cache_that_cannot_be_used_names_the_setting",
        "build.test_cpp.test_a_cache_of_another_user_is_refused",
        "build.test_cpp.test_paths_with_spaces_and_accents_build_and_load",
        "package.test_standalone.test_it_runs_without_pagegen_and_leaves_itself_alone",
    ),
    "F06 tuning changes the caller's data (triton issues 781, 6547, 7181, 54; lion-pytorch PR 36)": (
        f"{HERE}.test_f06_no_kernel_tunes_itself_when_it_is_called",
        f"{HERE}.test_f06_what_is_timed_reads_a_cache_of_its_own_and_leaves_it_as_it_was",
        f"{HERE}.test_f06_a_second_call_does_what_the_first_did",
        "tuning.test_measure.test_measuring_leaves_torchs_random_state_alone",
    ),
    "F07 a clock that reads zero, configs that fail (triton PRs 6868, 8948, 1208, 8059; issue 6803)": (
        f"{HERE}.test_f07_a_candidate_that_takes_its_process_down_does_not_spoil_the_next",
        f"{HERE}.test_f07_a_kernel_of_a_gpu_is_judged_where_it_can_spoil_nobody",
        f"{HERE}.test_f07_where_all_fail_there_is_one_error_and_nothing_is_written",
        "tuning.test_measure.test_a_broken_clock_is_refused_not_divided_by",
        "tuning.test_evaluate.test_a_broken_clock_is_a_run_error",
        "tuning.test_search.test_ties_are_broken_by_a_fixed_order",
        "tuning.test_search.test_failing_configs_are_tried_once_and_the_valid_one_wins",
        "tuning.test_search.test_a_space_without_knobs_has_its_default_evaluated",
    ),
    "F08 a tuned file of another device, version or variant (TensorRT-LLM PR 17664, flashinfer PRs 3367, 3970, vLLM issue 50436)": (
        "package.test_package.test_f08_only_what_was_tuned_for_exactly_this_is_found_and_nothing_else_is_touched",
        "package.test_package.test_f08_what_was_tuned_under_another_spelling_of_the_device_is_found_and_serves",
        "test_target.test_a_device_is_the_same_however_its_name_is_spelt",
        f"{HERE}.test_f08_two_machines_without_a_name_are_not_the_same",
        "package.test_package.test_packages_of_two_machines_share_a_cache",
        "tuning.test_inherit.test_under_another_toolchain_or_machine_nothing_holds_and_the_field_is_named",
        "tuning.test_static.test_a_shortlist_that_does_not_fit_is_refused_by_field_in_one_line",
        "tuning.test_warm_start.test_another_template_s_winners_and_bad_records_are_passed_over",
    ),
    "F09 a resumed study counts or keeps dead trials (optuna issues 1532, 1641, 1865; mala issue 515)": (
        f"{HERE}.test_f09_ten_trials_are_ten_however_often_and_by_how_many_they_are_resumed",
        "tuning.test_search.test_a_config_that_always_kills_its_tuner_is_a_failure_and_not_tried_for_ever",
    ),
    "F10 a space that changed between runs (optuna issues 2854, 2671, 822; PR 3444)": (
        "tuning.test_search.test_a_changed_space_opens_a_new_study_and_its_best_lies_inside",
        "tuning.test_search.test_the_same_space_in_another_order_is_the_same_study",
        "tuning.test_inherit.test_a_value_more_costs_only_the_configs_that_have_it",
    ),
    "F11 many processes open one study file at once (optuna issues 820, 4621, 1531; PR 4034)": (
        "tuning.test_search.test_eight_processes_open_one_new_storage_at_once",
        "tuning.test_search.test_two_processes_on_one_journal_make_the_total_together",
        f"{HERE}.test_f11_a_storage_on_a_disk_that_cannot_be_written_is_refused_in_one_line",
    ),
    "F12 failing points drawn again and again, inf or NaN as a score (optuna issues 332, 2021, 5440; PR 3144)": (
        f"{HERE}.test_f12_a_score_of_none_is_no_time",
        "tuning.test_search.test_failing_configs_are_tried_once_and_the_valid_one_wins",
        "tuning.test_search.test_a_score_that_is_no_time_is_a_failure_and_never_best",
        "tuning.test_search.test_an_exhausted_space_ends_the_search",
    ),
}


@pytest.mark.parametrize("row", ANSWERS)
def test_a_row_is_answered_by_tests_that_exist(row: str) -> None:
    assert_answered(ANSWERS[row])


@pytest.mark.skipif(not LIST.exists(), reason="needs the list of public failures beside the repository")
def test_every_row_about_tuning_is_answered() -> None:
    listed = set(re.findall(r"^### (F\d+)", LIST.read_text(), re.MULTILINE))
    assert listed and listed == {row.split()[0] for row in ANSWERS}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- F01: a key that leaves something out -----------------------------------------------------------------------------

BASE = parse_slug("bf16-d64-h6x3-b16-NHD")[0]
SPECS = {
    "dtype": BASE.replace(dtype=DType.FP16, kv_dtype=DType.FP16),
    "kv dtype": parse_slug("bf16-d64-h6x3-b16-NHD-kvint8")[0],
    "head dim": BASE.replace(head_dim=72),
    "block size": BASE.replace(block_size=32),
    "group": BASE.replace(q_heads=9),
    "window": BASE.replace(window=128),
    "soft cap": BASE.replace(soft_cap=30.0),
}


def attend(spec: KernelSpec = BASE, **knobs: int) -> str:
    made_of = variant(Op.ATTEND, spec, SCALAR)
    return render(dataclasses.replace(made_of, config=made_of.template.space(spec, SCALAR).config(knobs))).text


def edited(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the base renders to where a line more stands in a template."""
    shutil.copytree(paths.TEMPLATES, folder)
    (folder / file).write_text((folder / file).read_text() + "// edited\n")
    with monkeypatch.context() as patch:
        patch.setattr(render_module, "TEMPLATES", folder)
        environment.cache_clear()
        text = attend()
    environment.cache_clear()
    return text


@pytest.mark.usefixtures("cache")
def test_f01_whatever_changes_the_code_is_compiled_once_and_nothing_else_is(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"base": attend(), "knob": attend(tile_kv=16), **{name: attend(spec) for name, spec in SPECS.items()}}
    for number, file in enumerate((template_for(Op.ATTEND, BASE, SCALAR).file, "cpp/abi.h")):
        texts[f"edited {file}"] = edited(tmp_path / f"templates {number}", file, monkeypatch)
    library = cpp._LIBRARY
    flags = {
        "level": tuple("-O2" if flag == "-O3" else flag for flag in library.flags),
        "define": (*library.flags, "-DPAGEGEN_DEBUG"),
        "debug": (*library.flags, "-g"),
    }
    compilers = {"version": STUB.replace("stub 1.0", "stub 1.1"), "path": STUB}
    for name, script in compilers.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)

    def build_all() -> list[Path]:
        made = [cpp.compile_library(text, SCALAR) for text in texts.values()]
        for changed in flags.values():
            with monkeypatch.context() as patch:
                patch.setattr(cpp, "_LIBRARY", dataclasses.replace(library, flags=changed))
                made.append(cpp.compile_library(texts["base"], SCALAR))
        for name in compilers:
            with monkeypatch.context() as patch:
                patch.setenv("PAGEGEN_CXX", str(tmp_path / name))
                made.append(cpp.compile_library(texts["base"], SCALAR))
        return made

    made = build_all()
    assert len(set(made)) == len(made) == len(texts) + len(flags) + len(compilers) == compiles(stub)
    assert build_all() == made and compiles(stub) == len(made)


def test_f01_whatever_changes_a_timing_is_a_study_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(spec: KernelSpec = SPEC, workload: Workload = DECODE) -> str:
        return digest(joining.identity(Evaluator(spec, best_cpu(), {Phase.DECODE: workload}), Phase.DECODE))

    keys = [key(), key(SPEC.replace(block_size=8)), key(workload=dataclasses.replace(DECODE, warm=True))]
    changes: list[tuple[object, str, object]] = [
        (joining, "__version__", "0.0.0"),
        (joining, "source_digest", lambda template: "edited"),
        (evaluate, "detect", lambda: dataclasses.replace(detect(), affinity=4096, quota=None)),
        (cpp, "compiler_version", lambda path: "another compiler"),
        (cpp, "FLAGS", (*cpp.FLAGS, "-DX")),
        (target_module, "detect", lambda: dataclasses.replace(detect(), quota=0.125)),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            keys.append(key())
    assert len(set(keys)) == len(keys) and key() == keys[0]


# --- F02: a binary of another machine ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
def test_f02_a_home_that_moves_between_processors_is_built_for_each(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(*isa: str) -> Path:
        monkeypatch.setattr(target_module, "detect", lambda: dataclasses.replace(detect(), isa=isa))
        source = render(variant(Op.WRITE_KV, SPEC, parse_target("cpu")))
        return cpp.compile_library(source.text, source.variant.target)

    machines = (("avx512", "avx2", "scalar"), ("avx2", "scalar"), ("scalar",))
    first = [on(*isa) for isa in machines]
    assert len(set(first)) == 3 == compiles(stub)
    stored = [json.loads((path.parent / "build.json").read_text())["target"] for path in first]
    assert stored == ["cpu:avx512", "cpu:avx2", "cpu:scalar"]
    assert [on(*isa) for isa in machines] == first and compiles(stub) == 3


def test_f02_gpus_of_two_names_or_architectures_are_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, arch in (("GPU 12", "cuda:sm_120"), ("GPU 12.1", "cuda:sm_120"), ("GPU 12", "cuda:sm_100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=name: name)
        found.append(Fingerprint(hardware_fingerprint(parse_target(arch)), {}).hardware_key)
    assert len(set(found)) == 3


# --- F03: killed in the middle ----------------------------------------------------------------------------------------

DIE = "import os, signal; from pathlib import Path\ndef die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"


def killed(code: str, *words: str) -> None:
    """Runs a process that kills itself."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", DIE + code, *words], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -signal.SIGKILL


def test_f03_a_builder_killed_before_its_rename_leaves_nothing_that_counts(stub: Path, cache: Path) -> None:
    killed(
        "Path.rename = die; from pagegen.build import cpp; from pagegen.target import parse_target\n"
        "cpp.compile_library('one', parse_target('cpu:scalar'))"
    )
    assert not list(cache.glob("kernels/[!.]*/build.json")) and list(cache.glob("kernels/.build-*/entry/build.json"))
    assert cpp.compile_library("one", SCALAR).is_file() and compiles(stub) == 2
    assert not list(cache.glob("kernels/.*"))


@pytest.mark.parametrize("moment", ["half of the file is written", "before the rename"])
def test_f03_a_tuner_killed_while_it_writes_its_record_leaves_the_old_one(tmp_path: Path, moment: str) -> None:
    record = make_record()
    write(tmp_path, record)
    before = (tmp_path / "tune.json").read_bytes()
    half = "def half(handle, mode): os.write(handle, b'{\"format\": 2, \"spec'); die()\nos.fdopen = half\n"
    patch = half if moment.startswith("half") else "os.replace = die\n"
    code = f"import sys; from pagegen.paths import write_atomic\n{patch}write_atomic(Path(sys.argv[1]), '{{}}')"
    killed(code, str(tmp_path / "tune.json"))
    assert (tmp_path / "tune.json").read_bytes() == before and read_record(tmp_path)
    (tmp_path / "tune.json").unlink()  # a first run: what is not published is not there
    with pytest.raises(ConfigError, match="holds no record"):
        read_record(tmp_path)
    write(tmp_path, record)
    assert (tmp_path / "tune.json").read_bytes() == before


# --- F05: a cache that cannot be written ------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_f05_a_user_without_a_home_or_with_one_that_cannot_be_written_is_told_the_setting(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAGEGEN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home:
        monkeypatch.setenv("HOME", home)

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="set PAGEGEN_CACHE to a folder you can write"):
        cpp.compile_library("x", SCALAR)


def on_own_disk(options: str, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code with a small disk of its own mounted at `folder`; skips where nobody may mount."""
    folder.mkdir()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = f'mount -t tmpfs -o {options} none "$1" || exit 99; shift; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(folder), sys.executable, "-c", code],
        env={**os.environ, "PAGEGEN_CACHE": str(folder), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("a process may not mount a file system here")
    return done


needs_unshare = pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare of util-linux")


@needs_unshare
def test_f05_a_full_disk_names_the_setting(tmp_path: Path) -> None:
    code = (
        "from pagegen.build import cpp; from pagegen.errors import ConfigError; from pagegen.target import parse_target\n"
        "try: cpp.compile_library('char much[1 << 20] = {1};', parse_target('cpu:scalar'))\n"
        "except ConfigError as error: print(error)"
    )
    done = on_own_disk("size=128k,mode=0700", tmp_path / "disk", code)
    assert "No space left on device" in done.stdout and "set PAGEGEN_CACHE" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


# --- F06: the caller's data -------------------------------------------------------------------------------------------


def test_f06_no_kernel_tunes_itself_when_it_is_called() -> None:
    """A kernel that a call may replace by others, and runs them for that, would run on the caller's data."""
    for row in TEMPLATES:
        target = SCALAR if row.language == "cpp" else parse_target("cuda:sm_90")
        text = render(variant(row.op, BASE, target)).text
        assert "autotune" not in text and "do_bench" not in text


def test_f06_what_is_timed_reads_a_cache_of_its_own_and_leaves_it_as_it_was() -> None:
    point = Point.parse("2x1@37")
    pool = Pool.for_points(SPEC, (point,), 1 << 16)
    before = [cache.clone() for cache in (pool.k_cache, pool.v_cache)]
    inputs, made_of = Inputs(pool, point), variant(Op.ATTEND, SPEC, best_cpu())
    configs = [CONFIGS.default, CONFIGS.config({"tile_kv": 16})]
    kernels = [build(render(dataclasses.replace(made_of, config=config))) for config in configs]
    q = inputs.q.clone()
    measure({str(number): inputs.bind(kernel) for number, kernel in enumerate(kernels)}, "0", seconds=0.01)  # type: ignore[arg-type]
    assert torch.equal(inputs.q, q)
    assert all(torch.equal(cache, was) for cache, was in zip((pool.k_cache, pool.v_cache), before, strict=True))


def test_f06_a_second_call_does_what_the_first_did() -> None:
    """Nothing accumulates: `out` may hold anything, and blocks outside the mapped slots stay."""
    kernels = build_kernels(SPEC, SCALAR)
    k_cache, v_cache = allocate_cache(SPEC, 3)
    k_cache.fill_(7.0), v_cache.fill_(7.0)
    k, v, slots = torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.tensor([4, 5])
    out, q = torch.full((1, 2, 8), float("nan")), torch.ones(1, 2, 8)
    found = []
    for _ in range(2):
        kernels.write_kv(k, v, k_cache, v_cache, slots)
        kernels.attend(out, q, k_cache, v_cache, *(torch.tensor(x, dtype=torch.int32) for x in ([[1]], [2], [0, 1])))
        found.append(out.clone())
    assert torch.equal(found[0], torch.ones(1, 2, 8)) and torch.equal(found[0], found[1])
    assert all((cache[[0, 2]] == 7).all() and (cache[1, 2:] == 7).all() for cache in (k_cache, v_cache))


# --- F07: what fails --------------------------------------------------------------------------------------------------

CONFIGS = template_for(Op.ATTEND, SPEC, best_cpu()).space(SPEC, best_cpu())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("segfault", "SIGSEGV"),
        ("MemoryError", "MemoryError"),
        pytest.param("SystemExit", "exit status 3", marks=pytest.mark.long),
        pytest.param("TimeoutError", "TimeoutError", marks=pytest.mark.long),
    ],
)
def test_f07_a_candidate_that_takes_its_process_down_does_not_spoil_the_next(
    how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_timer(monkeypatch, f"from tests.tuning.faulty import plant; plant({how!r})")
    monkeypatch.setattr(evaluate, "check_variant", lambda source: CheckReport(Status.PASSED, 1))
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as evaluator:
        failed = evaluator.evaluate(Phase.DECODE, CONFIGS.config({"tile_kv": 16}))
        assert failed.status is Status.RUN_ERROR and said in failed.reason and failed.score is None
        assert evaluator.evaluate(Phase.DECODE, CONFIGS.default).status is Status.PASSED


@pytest.mark.parametrize(
    ("how", "said"), [("segfault", "SIGSEGV"), pytest.param("MemoryError", "MemoryError: out of resources", marks=pytest.mark.long)]
)
def test_f07_a_kernel_of_a_gpu_is_judged_where_it_can_spoil_nobody(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if for a GPU, whose kernels run in the process that judges them: the next one gets a process of its own."""
    before_the_timer(monkeypatch, f"from tests.tuning.faulty import plant; plant({how!r})")
    monkeypatch.setattr(evaluate, "check_variant", lambda source: pytest.fail("judged in the tuner's process"))
    with Evaluator(SPEC, best_cpu(), {Phase.DECODE: DECODE}) as evaluator:
        evaluator.target = dataclasses.replace(best_cpu(), kind="cuda")
        failed, _ = evaluator._gated(CONFIGS.config({"tile_kv": 16}))
        assert failed and failed.status is Status.RUN_ERROR and failed.reason.startswith("gate: ") and said in failed.reason
        assert evaluator._gated(CONFIGS.default)[0] is None


def test_f07_where_all_fail_there_is_one_error_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "check_variant", lambda source: CheckReport(Status.INCORRECT, 1))
    with pytest.raises(CheckError, match=r"INCORRECT.*nothing to tune against") as caught:
        tune(SPEC, phase=Phase.DECODE, trials=4, out=tmp_path)
    assert "\n" not in str(caught.value)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert written <= {"journal.log", "journal.log.lock", "trials.jsonl", "unevaluated.jsonl"}


# --- F08: a machine without a name ------------------------------------------------------------------------------------


def test_f08_two_machines_without_a_name_are_not_the_same(tmp_path: Path) -> None:
    arm = "processor: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n"
    assert target_module._device("model name\t: AMD EPYC\n" + arm) == "AMD EPYC"
    assert target_module._device(arm) != target_module._device(arm.replace("0xd0c", "0xd40"))
    names = []
    for machine in ("one", "other", "one"):
        (tmp_path / "id").write_text(machine)
        names.append(target_module._device("model name\t: unknown\n", tmp_path / "id"))
    assert names[0] == names[2] != names[1]


# --- F09: resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["journal", pytest.param("sqlite", marks=pytest.mark.long)])
def test_f09_ten_trials_are_ten_however_often_and_by_how_many_they_are_resumed(tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path}/trials.db" if kind == "sqlite" else str(tmp_path / "journal.log")

    def study() -> BucketStudy:
        return BucketStudy(open_storage(url, tmp_path), "fake", SPACE, {}, total=10, beat=DEAD_BEAT)

    doomed = start_tuner(url, 10, hangs=5)
    done, in_flight = until_it_hangs(doomed, 5)
    kill(doomed)
    workers = [start_tuner(url, 10) for _ in range(2)]
    lines = [line for worker in workers for line in worker.communicate(timeout=120)[0].splitlines()]
    assert ended(lines).count(in_flight) == 1  # tried again, once
    assert len(done) == 4 and len(set(done + ended(lines))) == len(done + ended(lines)) == 10
    again = study()
    best = again.ranked()[0]
    assert (again.resumed, again.claim(), again.holders) == (10, None, [])
    again.close()
    third = start_tuner(url, 10)
    assert third.communicate(timeout=120)[0].splitlines() == ["resumed 10 lost 0"]
    last = study()
    assert last.ranked()[0] == best and len(last.evaluations) == 10
    last.close()


# --- F11: a storage that cannot be written ----------------------------------------------------------------------------


@needs_unshare
@pytest.mark.parametrize("url", ["journal.log", "sqlite:///{disk}/trials.db"])
def test_f11_a_storage_on_a_disk_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path, url: str) -> None:
    disk = tmp_path / "disk"
    code = (
        "from pathlib import Path; from pagegen.errors import ConfigError; from pagegen.tuning.storage import open_storage\n"
        f"try: open_storage({url.format(disk=disk) if '://' in url else str(disk / url)!r}, Path('.'))\n"
        "except ConfigError as error: print(error)"
    )
    done = on_own_disk("ro", disk, code)
    assert "cannot be opened" in done.stdout and "--storage" in done.stdout and done.stdout.count("\n") == 1, done.stderr


# --- F12: what is no score --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), float("-inf"), 0.0, -1.0])
def test_f12_a_score_of_none_is_no_time(tmp_path: Path, score: float | None) -> None:
    """Four configs, of which one has a time, and a budget of fifty."""
    space = ConfigSpace((Knob("a", (1, 2, 3, 4), 1),))

    def evaluated(config: Config) -> Evaluation:
        if config.to_dict()["a"] == 3:
            return Evaluation(Status.PASSED, config.to_dict(), score=2.0)
        if score is None:
            return Evaluation(Status.RUN_ERROR, config.to_dict(), "nothing was measured")
        return Evaluation(Status.PASSED, config.to_dict(), score=score)

    study = run(open_storage(None, tmp_path), 50, evaluated, space)
    assert len(study.evaluations) == 4 and [found.config["a"] for found in study.ranked()] == [3]
