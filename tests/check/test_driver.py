"""Claims about the process that runs candidates: whatever a kernel does to it becomes a status with the case's name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pagegen.build.cpp import run_compiler
from pagegen.catalog import variant
from pagegen.check import Case, CheckReport, check_library, check_variant, quick_suite
from pagegen.check import driver as driver_module
from pagegen.check.driver import driver_text
from pagegen.check.files import PreparedCases
from pagegen.errors import BuildError, CheckError, ConfigError
from pagegen.records import Status
from pagegen.render import Source, render
from pagegen.spec import KernelSpec, Op, parse_slug
from pagegen.target import TARGETS, is_present
from tests.check.conftest import SCALAR, Builder, with_abi

SPEC = parse_slug("fp16-d16v8-h3x1-b3-NHD")[0]
NUM_CASES = sum(case.op is Op.COPY_BLOCKS for case in quick_suite(SPEC))

COPY = """
static int64_t BAD(const pg_copy_blocks_args* a) {
  for (int64_t i = 0; i < 2 * a->num_pairs; ++i)
    if (a->pairs[i] < 0 || a->pairs[i] >= a->num_blocks) return 1;
  return 0;
}
static void copy(void* cache, int64_t from, int64_t to, int64_t block, int64_t token, int64_t dim) {
  uint16_t* c = (uint16_t*)cache;
  for (int64_t t = 0; t < 3; ++t) memcpy(c + to * block + t * token, c + from * block + t * token, dim * 2);
}
PG_EXPORT int32_t pagegen_copy_blocks(const pg_copy_blocks_args* a) {
  if (a->size < sizeof *a) return PG_E_SIZE;
  if (BAD(a)) return PG_E_SLOT;
  for (int64_t i = 0; i < a->num_pairs; ++i) {
    copy(a->k_cache, a->pairs[2 * i], a->pairs[2 * i + 1], a->k_stride_block, a->k_stride_token, 16);
    copy(a->v_cache, a->pairs[2 * i], a->pairs[2 * i + 1], a->v_stride_block, a->v_stride_token, 8);
  }
  MISDEED
  return PG_OK;
}
"""


def check(build_text: Builder, misdeed: str, timeout: float = 20.0) -> CheckReport:
    text = with_abi(COPY.replace("MISDEED", misdeed))
    return check_library(build_text(text), Op.COPY_BLOCKS, SCALAR, quick_suite(SPEC), timeout)


def test_a_right_kernel_passes_every_case(build_text: Builder) -> None:
    assert check(build_text, "") == CheckReport(Status.PASSED, NUM_CASES)


@pytest.mark.parametrize(
    ("misdeed", "told"),
    [
        ("*(volatile int*)8 = 1;", "killed by SIGSEGV"),
        ("abort();", "killed by SIGABRT"),
        ("if (a->num_pairs > 1) __builtin_trap();", "killed by SIGILL"),
        ("raise(35);", "killed by signal 35"),
        ('fprintf(stderr, "assertion x > 0\\n"); abort();', "after saying: assertion x > 0"),
        ("exit(7);", "ended the process with status 7"),
        ("exit(0);", "ended the process with status 0"),
    ],
)
def test_an_ending_is_a_run_error_that_says_how_and_where(misdeed: str, told: str, build_text: Builder) -> None:
    report = check(build_text, misdeed)
    assert report.status is Status.RUN_ERROR
    assert told in report.reason
    assert report.failures[0].case.name == ("many blocks" if "num_pairs" in misdeed else "one block")


def test_a_hang_is_a_timeout_that_names_the_case(build_text: Builder) -> None:
    report = check(build_text, "while (a->num_pairs == 0) usleep(1000);", timeout=1.0)
    assert report.status is Status.TIMEOUT
    assert report.failures[0].case.name == "no block"


@pytest.mark.parametrize(
    ("misdeed", "status"),
    [
        ("(void)((volatile uint16_t*)a->k_cache)[a->num_blocks * a->k_stride_block];", Status.RUN_ERROR),
        ("(void)((volatile int64_t*)a->pairs)[2 * a->num_pairs];", Status.RUN_ERROR),
        ("((int64_t*)a->pairs)[0] = 0;", Status.RUN_ERROR),  # inputs are read-only
        ("((pg_copy_blocks_args*)a)->num_threads = 1;", Status.RUN_ERROR),
        ("((uint16_t*)a->k_cache)[-1] = 5;", Status.INCORRECT),  # before the tensor, inside its page
        ("if (a->k_stride_head > 16) ((uint16_t*)a->k_cache)[16] = 5;", Status.INCORRECT),  # between two rows
        ("((uint16_t*)a->v_cache)[0] ^= 1;", Status.INCORRECT),
    ],
)
def test_what_is_read_or_written_outside_is_noticed(misdeed: str, status: Status, build_text: Builder) -> None:
    assert check(build_text, misdeed).status is status


def test_every_wrong_case_is_reported_the_smallest_first(build_text: Builder) -> None:
    report = check(build_text, "if (a->num_pairs) ((uint16_t*)a->v_cache)[a->pairs[1] * a->v_stride_block] ^= 1;")
    sizes = [failure.case.size for failure in report.failures]
    assert report.status is Status.INCORRECT
    assert len(sizes) == 4
    assert sizes == sorted(sizes)
    assert report.failures[0].message.startswith("v_cache[")


def test_a_library_of_another_abi_or_without_the_op_is_a_run_error(build_text: Builder) -> None:
    foreign = with_abi(COPY.replace("MISDEED", "")).replace("PAGEGEN_ABI_VERSION; }", "99; }")
    report = check_library(build_text(foreign), Op.COPY_BLOCKS, SCALAR, quick_suite(SPEC))
    assert report.status is Status.RUN_ERROR
    assert "C ABI 99" in report.reason
    report = check_library(build_text(with_abi("")), Op.COPY_BLOCKS, SCALAR, quick_suite(SPEC))
    assert "pagegen_copy_blocks" in report.reason


def test_openmp_settings_of_the_user_do_not_reach_the_kernel(build_text: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SCHEDULE", "static,1")
    monkeypatch.setenv("KMP_AFFINITY", "verbose")
    assert check(build_text, 'if (getenv("OMP_SCHEDULE") || getenv("KMP_AFFINITY")) abort();').passed


def test_a_full_disk_is_the_machines_fault_not_the_kernels(build_text: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "compile_program", lambda text, target: "/bin/false")
    monkeypatch.setattr(driver_module, "OUT_OF_RESOURCES", 1)
    with pytest.raises(CheckError, match="TMPDIR"):
        check(build_text, "")


def test_prepared_cases_leave_no_file_behind() -> None:
    prepared = PreparedCases(quick_suite(SPEC)[:2])
    path = prepared.path
    assert path.exists()
    del prepared
    assert not path.parent.exists()


# --- check_variant ---------------------------------------------------------------------------------------------------


def source(text: str | None = None, spec: KernelSpec = SPEC) -> Source:
    made = render(variant(Op.COPY_BLOCKS, spec, SCALAR))
    return made if text is None else Source(made.variant, text)


def test_a_variant_is_built_and_judged() -> None:
    assert check_variant(source()) == CheckReport(Status.PASSED, NUM_CASES)


def test_what_does_not_compile_is_a_build_error() -> None:
    with pytest.raises(BuildError):
        check_variant(source("int main() { return ; x }"))


def test_an_absent_target_and_an_unknown_suite_are_refused_in_one_line() -> None:
    absent = next(target for target in TARGETS if not is_present(target))
    with pytest.raises(ConfigError, match="not present"):
        check_variant(Source(variant(Op.COPY_BLOCKS, SPEC, absent), ""))
    with pytest.raises(CheckError, match="quick, full"):
        check_variant(source(), "slow")


def test_a_failing_input_is_shrunk() -> None:
    text = with_abi(COPY.replace("MISDEED", "if (a->num_pairs > 1) ((uint16_t*)a->v_cache)[a->pairs[1] * a->v_stride_block] ^= 1;"))
    smallest = check_variant(source(text), smallest=True).failures[0].case
    assert sum(smallest.context_lens) == 4  # two blocks of three tokens
    assert not smallest.strided


# --- linked ----------------------------------------------------------------------------------------------------------


def test_the_driver_links_with_a_kernel_for_sanitizers(tmp_path: Path) -> None:
    """A kernel with undefined behaviour passes its cases and is told of by the sanitizer."""
    cases = PreparedCases([Case("one", Op.COPY_BLOCKS, SPEC, (), (4,))])
    (tmp_path / "driver.c").write_text(driver_text(Op.COPY_BLOCKS, linked=True))
    run_compiler(["-xc", "-std=gnu11", "-c", "driver.c", "-o", "driver.o"], tmp_path)
    for misdeed, clean in (("", True), ("volatile int x = 0x7fffffff; x = x + 1;", False)):
        (tmp_path / "kernel.cpp").write_text(with_abi(COPY.replace("MISDEED", misdeed)))
        run_compiler(["-fsanitize=undefined", "kernel.cpp", "driver.o", "-o", "run"], tmp_path)
        done = subprocess.run(
            [tmp_path / "run", cases.path, tmp_path / "results"], capture_output=True, text=True, check=True, env=dict(os.environ)
        )
        assert ("signed integer overflow" not in done.stderr) == clean
        assert done.stdout.endswith("done\n")


def test_tensors_survive_the_way_through_the_files(build_text: Builder) -> None:
    """A kernel that does nothing gives back what it got, gaps and far blocks included."""
    cases = [case for case in quick_suite(SPEC) if case.op is Op.COPY_BLOCKS and case.fault is None]
    library = build_text(with_abi("PG_EXPORT int32_t pagegen_copy_blocks(const pg_copy_blocks_args*) { return PG_OK; }"))
    report = check_library(library, Op.COPY_BLOCKS, SCALAR, cases)
    assert {failure.case.name for failure in report.failures} == {case.name for case in cases} - {"no block"}
