"""Claims about rendered text and its key: complete in itself, and different whenever anything that makes it differs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagegen import catalog
from pagegen import render as render_module
from pagegen.catalog import TEMPLATES, Template, Variant, template_for, variant
from pagegen.errors import RenderError, SpecError
from pagegen.render import Source, environment, render
from pagegen.spec import FLOATS, DType, KernelSpec, KVLayout, Op, parse_slug
from pagegen.target import TARGETS, parse_target

ROOT = Path(__file__).parents[1]
SPEC = parse_slug("bf16-d64-h9x3-b16-NHD")[0]
LAYOUTS = ("NHD", "HND", "HDN", "HDN8", "HDN2_HDN", "NHD_HND")
PLACES = ("cpu:scalar", "cpu:avx2", "cpu:avx512", "cuda:sm_80", "cuda:sm_90", "hip:gfx942")

ROWS = [(row.op, place) for row in TEMPLATES for place in PLACES if place.startswith("cpu") == (row.language == "cpp")]


def attend(spec: KernelSpec = SPEC, target: str = "cpu:avx512", **knobs: int) -> Source:
    made_of = variant(Op.ATTEND, spec, parse_target(target))
    return render(dataclasses.replace(made_of, config=made_of.template.space(spec, made_of.target).config(knobs)))


def one_change_each() -> Iterator[tuple[str, KernelSpec]]:
    """The base spec with one field changed at a time."""
    changes: dict[str, object] = {
        "q_heads": 6,
        "kv_heads": 9,
        "head_dim": 72,
        "head_dim_v": 32,
        "block_size": 17,
        "causal": False,
        "scale": 0.3,
        "lse": True,
    }
    for name, value in changes.items():
        yield name, SPEC.replace(**{name: value})
    yield "dtype", SPEC.replace(dtype=DType.FP16, kv_dtype=DType.FP16)
    for layout in LAYOUTS[1:]:
        yield f"layout {layout}", SPEC.replace(layout=KVLayout.parse(layout))


@pytest.mark.parametrize("target", ["cpu:avx512", "cuda:sm_90"])
def test_each_field_of_the_spec_changes_the_key(target: str) -> None:
    keys = {"base": attend(target=target).key}
    for name, spec in one_change_each():
        if name == "scale":
            continue  # an argument of the call; the text does not hold it
        keys[name] = attend(spec, target).key
    same = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert not same


@pytest.mark.parametrize("target", ["cpu:avx512", "cuda:sm_90"])
def test_each_value_of_each_knob_changes_the_key(target: str) -> None:
    where = parse_target(target)
    space = template_for(Op.ATTEND, SPEC, where).space(SPEC, where)
    keys = {"default": attend(target=target).key}
    for knob in space.knobs:
        for value in knob.values:
            if value != knob.default and not space.broken({**space.default.to_dict(), knob.name: value}):
                keys[f"{knob.name}={value}"] = attend(SPEC, target, **{knob.name: int(value)}).key
    assert len(set(keys.values())) == len(keys) > 10


def test_each_target_has_its_own_key() -> None:
    keys = [attend(target=target.name).key for target in TARGETS]
    assert len(set(keys)) == len(keys)


def test_an_edit_of_the_template_or_of_what_it_includes_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part").write_text("one\n")
    (tmp_path / "whole").write_text("{% include 'part' %}\nint x = {{ spec.head_dim }};\n")
    monkeypatch.setattr(render_module, "TEMPLATES", tmp_path)
    row = dataclasses.replace(TEMPLATES[0], file="whole")
    made_of = dataclasses.replace(variant(Op.ATTEND, SPEC, parse_target("cpu:scalar")), template=row)
    keys = []
    for name, text in (("", ""), ("part", "two\n"), ("whole", "{% include 'part' %}\nint y = {{ spec.head_dim }};\n")):
        if name:
            (tmp_path / name).write_text(text)
        environment.cache_clear()
        keys.append(render(made_of).key)
    environment.cache_clear()
    assert len(set(keys)) == 3


def test_the_key_is_the_same_in_every_process_and_needs_no_torch() -> None:
    code = (
        "import sys; from pagegen.catalog import variant; from pagegen.render import render; from pagegen.spec import *;"
        "from pagegen.target import parse_target;"
        "print(render(variant(Op.ATTEND, parse_slug('bf16-d64-h9x3-b16-NHD')[0], parse_target('cpu:avx512'))).key);"
        "assert 'torch' not in sys.modules"
    )
    keys = set()
    for seed in ("0", "1"):
        environ = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        keys.add(result.stdout.strip())
    assert keys == {attend().key}


@pytest.mark.parametrize(("op", "target"), ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_renders_text_that_is_complete_in_itself(op: Op, target: str, layout: str) -> None:
    for dtype in FLOATS:
        spec = SPEC.replace(dtype=dtype, kv_dtype=dtype, layout=KVLayout.parse(layout))
        text = render(variant(op, spec, parse_target(target))).text
        assert not re.search(r"\{\{|\{%|%\}", text)
        assert not re.search(r'#include\s*"', text) and "import pagegen" not in text and "from pagegen" not in text
        if not target.startswith("cpu"):
            compile(text, op.value, "exec")


def test_a_template_that_is_missing_or_lacks_a_variable_is_named() -> None:
    base = variant(Op.ATTEND, SPEC, parse_target("cpu:scalar"))

    def with_file(file: str) -> Variant:
        return dataclasses.replace(base, template=dataclasses.replace(base.template, file=file))

    with pytest.raises(RenderError, match=r"cpp/none\.jinja"):
        render(with_file("cpp/none.jinja"))
    with pytest.raises(RenderError, match=r"pyproject\.toml\.jinja.*'name' is undefined"):
        render(with_file("package/pyproject.toml.jinja"))


def test_a_syntax_error_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").write_text("fine\n{% if %}\n")
    monkeypatch.setattr(render_module, "TEMPLATES", tmp_path)
    environment.cache_clear()
    row: Template = dataclasses.replace(TEMPLATES[0], file="broken")
    with pytest.raises(RenderError, match="broken line 2"):
        render(dataclasses.replace(variant(Op.ATTEND, SPEC, parse_target("cpu:scalar")), template=row))
    environment.cache_clear()


def test_a_spec_that_no_row_serves_gets_every_rows_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignorant(row: Template) -> Template:
        return dataclasses.replace(row, supports=catalog._supports("cpu" if row.language == "cpp" else "gpu", frozenset()))

    monkeypatch.setattr(catalog, "TEMPLATES", tuple(ignorant(row) for row in TEMPLATES))
    mixed = SPEC.replace(kv_dtype=DType.FP16)
    with pytest.raises(SpecError, match=r"no attend template serves .* on cpu:avx2 \(cpp: .*no kv_dtype; leave it out; triton: .*GPUs\)"):
        variant(Op.ATTEND, mixed, parse_target("cpu:avx2"))
