"""A call takes nothing from the heap: kernels work in their arguments, on their stacks and in the workspace that a caller keeps.

The gate's driver is built with a malloc that counts, which stands before the C library's for whatever is loaded. Of each
case the second run is looked at: the first may start OpenMP's threads.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from pagegen.build.cpp import compile_library
from pagegen.catalog import variant
from pagegen.check import CheckReport, check_library, driver
from pagegen.check.case import Case
from pagegen.records import Status
from pagegen.render import Source, render
from pagegen.spec import DType, KernelSpec, KVLayout, Op
from pagegen.target import Target
from tests.check.conftest import SCALAR, Builder
from tests.conftest import cpu_targets

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="counts with the GNU C library's own names"),
]

COUNTER = """
#include <stdatomic.h>
static atomic_long allocations;
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t), *__libc_memalign(size_t, size_t);
static void* counted(void* room) {
  allocations++;
  return room;
}
void* malloc(size_t size) { return counted(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void* realloc(void* old, size_t size) { return counted(__libc_realloc(old, size)); }
void* aligned_alloc(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
int posix_memalign(void** to, size_t alignment, size_t size) { return !(*to = aligned_alloc(alignment, size)); }
"""
CALL = "  r.status = RUN(args);\n"
COUNTED = f"""  long before = allocations;
{CALL}  if (round && allocations != before) {{
    fprintf(stderr, "%ld allocations in the call\\n", allocations - before);
    exit(99);
  }}
"""

PLAIN = KernelSpec(6, 2, 16, block_size=4)
SPECS = {
    "plain": PLAIN,
    "deterministic": PLAIN.replace(deterministic=True),
    "options": PLAIN.replace(kv_dtype=DType.INT8, kv_zero=True, layout=KVLayout.parse("HDN2"), window=90, alibi=True, sinks=True, lse=True),
}
BATCHES = {"decode": ((1,) * 5, (700, 3, 40, 1, 260)), "prefill": ((70, 5), (70, 300)), "mixed": ((1, 40, 1, 3), (900, 40, 8, 75))}
CASES = {
    name: [Case(f"{batch}, {threads} threads", Op.ATTEND, spec, *lens, threads=threads) for batch, lens in BATCHES.items() for threads in (1, 4)]
    for name, spec in SPECS.items()
}


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    text = driver.driver_text(Op.ATTEND)
    assert text.count(CALL) == text.count("static result run(") == 1
    counted = text.replace(CALL, COUNTED).replace("static result run(", f"{COUNTER}\nstatic result run(")
    monkeypatch.setattr(driver, "driver_text", lambda op: counted)


def attend(name: str, target: Target = SCALAR) -> Source:
    return render(variant(Op.ATTEND, SPECS[name], target))


def judged(library: Path, name: str, target: Target = SCALAR) -> CheckReport:
    return check_library(library, Op.ATTEND, target, CASES[name])


@pytest.mark.parametrize("name", SPECS)
def test_attend_takes_nothing_from_the_heap(name: str, build_text: Builder) -> None:
    report = judged(build_text(attend(name).text), name)
    assert report.passed, report.reason


@pytest.mark.long
@pytest.mark.parametrize("target", cpu_targets())
@pytest.mark.parametrize("name", SPECS)
def test_attend_as_it_is_compiled_takes_nothing_from_the_heap(name: str, target: Target) -> None:
    report = judged(compile_library(attend(name, target).text, target), name, target)
    assert report.passed, report.reason


@pytest.mark.parametrize("words", ["std::vector<float> room(256);", "float* room = (float*)aligned_alloc(64, 1024);"])
def test_a_kernel_that_allocates_is_found(words: str, build_text: Builder) -> None:
    text = attend("plain").text
    entry = "PG_EXPORT int32_t pagegen_attend(const pg_attend_args* args) {\n"
    assert text.count(entry) == 1
    report = judged(build_text("#include <vector>\n" + text.replace(entry, entry + f'  {words}\n  asm("" ::"r"(&room[0]) : "memory");\n')), "plain")
    assert report.status is Status.RUN_ERROR
    assert "1 allocations in the call" in report.reason
