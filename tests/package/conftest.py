"""A real package, made once, and small kernels whose answer tells which of them ran."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pagegen.build.cpp import compile_library
from pagegen.catalog import variant
from pagegen.package import Packaged, write_package
from pagegen.paths import TEMPLATES
from pagegen.records import DispatchRow, DispatchTable
from pagegen.render import Source, render
from pagegen.spec import KernelSpec, Op, Phase, parse_slug
from pagegen.target import Fingerprint, Target, parse_target

SPEC = parse_slug("fp32-d16-h6x2-b5-NHD")[0]
TABLES = {
    Op.ATTEND: DispatchTable(
        (DispatchRow(Phase.DECODE, "attend_1", max_context=64), DispatchRow(Phase.PREFILL, "attend_2", min_seqs=2)), "attend_0"
    ),
    Op.WRITE_KV: DispatchTable((), "write_kv"),
    Op.COPY_BLOCKS: DispatchTable((), "copy_blocks"),
}

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel cache for all tests here, so that each text is compiled once."""
    return tmp_path_factory.mktemp("cache", numbered=False)


@pytest.fixture(autouse=True)
def cache(build_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEGEN_CACHE", str(build_cache))
    return build_cache


def packaged(op: Op, spec: KernelSpec = SPEC, target: Target | None = None, binary: bool = True, **knobs: int) -> Packaged:
    """A kernel of the catalog with `knobs` changed."""
    made_of = variant(op, spec, target or parse_target("cpu"))
    config = made_of.template.space(spec, made_of.target).config(knobs)
    source = render(dataclasses.replace(made_of, config=config))
    return Packaged(source, compile_library(source.text, made_of.target) if binary else None)


def marked(number: int, target: Target | None = None) -> Packaged:
    """An `attend` that does nothing but write `number` into the first element of out."""
    text = "".join((TEMPLATES / "cpp" / name).read_text() for name in ("abi.h", "python_call.h")) + (
        "PG_EXPORT int32_t pagegen_abi_version(void) { return PAGEGEN_ABI_VERSION; }\n"
        "PG_EXPORT int64_t pagegen_attend_workspace(const pg_attend_args*) { return 0; }\n"
        "PG_EXPORT int32_t pagegen_attend(const pg_attend_args* args) {\n"
        f"  if (args->num_tokens) static_cast<float*>(args->out)[0] = {number};\n  return PG_OK;\n}}\n"
        "PG_EXPORT void* pagegen_attend_call(void* self, void* const* tensors, intptr_t count) {\n"
        "  return python::call(self, tensors, count, pagegen_attend);\n}\n"
    )
    made_of = variant(Op.ATTEND, SPEC, target or parse_target("cpu"))
    return Packaged(Source(made_of, text), compile_library(text, made_of.target))


def write(
    out: Path,
    attends: Mapping[str, Packaged] | None = None,
    made_on: Fingerprint | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Path:
    """A package for SPEC on this machine's CPU with TABLES; its attend kernels are the catalog's or `attends`."""
    attends = attends or {
        "attend_0": packaged(Op.ATTEND),
        "attend_1": packaged(Op.ATTEND, tile_kv=16),
        "attend_2": packaged(Op.ATTEND, tile_q=4),
    }
    others = {"write_kv": packaged(Op.WRITE_KV), "copy_blocks": packaged(Op.COPY_BLOCKS)}
    return write_package(
        out,
        spec=SPEC,
        target=parse_target("cpu"),
        kernels={**attends, **others},
        dispatch=TABLES,
        evidence=evidence or {},
        made_on=made_on,
    )


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> Iterator[Path]:
    """The package as it was written; tests that change one take `package`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PAGEGEN_CACHE", str(build_cache))
        yield write(tmp_path_factory.mktemp("written packages ü"), evidence={"trials": 3, "buckets": [{"ratio": 0.51234}]})


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    """A copy of the package, to be changed."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def edit_manifest(package: Path, edit: Edit) -> None:
    """Rewrites the manifest, which no hash covers."""
    path = package / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modes and contents of every file and folder but Python's bytecode."""
    found = (path for path in (folder, *folder.rglob("*")) if "__pycache__" not in path.parts)
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for path in found}
