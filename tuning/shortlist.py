"""The configs that a static model found worth measuring, in a file: made where the device is not, measured where it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagegen.catalog import Template, template_for
from pagegen.errors import ConfigError
from pagegen.paths import TEMPLATES, write_atomic
from pagegen.space import Config
from pagegen.spec import KernelSpec, Op, Phase
from pagegen.target import Target
from pagegen.tuning.shape import ANY, KNOB, REST, TEXT, Shape, has_format, parse, require

FORMAT = 1
LABEL = "not measured"
SHAPE: Mapping[str, Shape] = {
    "spec": {REST: ANY},
    "target": TEXT,
    "template": {REST: ANY},
    "toolchain": {REST: ANY},
    "configs": {REST: [{"config": {REST: KNOB}}]},
}


def source_digest(template: Template) -> str:
    """Hash of every template file of a template's language: an included file changes a kernel as much as its own."""
    digest = hashlib.sha256()
    for path in sorted((TEMPLATES / template.language).rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(TEMPLATES)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True, slots=True)
class Shortlist:
    """`configs` are rows of each phase, best first: `config`, `score` and `seconds` by batch (estimates), `kernels`."""

    path: Path
    spec: Mapping[str, Any]
    target: str
    template: Mapping[str, str]  # file, source
    toolchain: Mapping[str, Any]  # that compiled the candidates; empty where nothing was
    configs: Mapping[str, Sequence[Mapping[str, Any]]]

    @classmethod
    def of(
        cls,
        path: Path,
        spec: KernelSpec,
        target: Target,
        toolchain: Mapping[str, Any],
        configs: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> Shortlist:
        """A shortlist of the template that serves the spec now."""
        return cls(path, spec.to_dict(), target.name, _template(spec, target), toolchain, configs)

    def write(self) -> None:
        """Writes the file."""
        values = dataclasses.asdict(self)
        del values["path"]
        text = json.dumps({"format": FORMAT, "label": LABEL, **values}, indent=1, allow_nan=False)
        write_atomic(self.path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> Shortlist:
        """Raises ConfigError for a file that is no shortlist, or of another format."""
        remedy = "`pagegen tune SPEC --target TARGET --static` writes one"
        try:
            values = parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or "it is not JSON"
            raise ConfigError(f"shortlist {path} cannot be read: {why}; {remedy}") from None
        found = values.get("format") if isinstance(values, dict) else None
        if not isinstance(values, dict) or not has_format(values, FORMAT) or values.get("label") != LABEL:
            raise ConfigError(f"shortlist {path}: format {found!r} is not known; allowed: {FORMAT}; {remedy}")
        try:
            require(SHAPE, values)
        except ValueError as error:
            raise ConfigError(f"shortlist {path} is malformed: {error}; {remedy}") from None
        bad = next((phase for phase, rows in values["configs"].items() if phase not in tuple(Phase) or not rows), None)
        if bad is not None:
            raise ConfigError(f"shortlist {path}: configs of {bad!r} are missing, or it is no phase; {remedy}")
        return cls(path, *(values[name] for name in SHAPE))

    def configs_for(self, spec: KernelSpec, target: Target) -> dict[Phase, list[Config]]:
        """Its configs, best first. Raises ConfigError naming every field of spec, target and template that differs."""
        here = {"target": target.name, **_flat("spec", spec.to_dict()), **_flat("template", _template(spec, target))}
        there = {"target": self.target, **_flat("spec", self.spec), **_flat("template", self.template)}
        differing = [
            f"{name} is {there.get(name)!r}, asked is {here.get(name)!r}"
            for name in {**here, **there}
            if there.get(name) != here.get(name)
        ]
        if differing:
            raise ConfigError(
                f"shortlist {self.path} does not fit: {'; '.join(differing)}; `pagegen tune SPEC --target {target.name} "
                "--static` makes one that does"
            )
        space = template_for(Op.ATTEND, spec, target).space(spec, target)
        try:
            return {Phase(phase): [space.config(row["config"]) for row in rows] for phase, rows in self.configs.items()}
        except ConfigError as error:
            raise ConfigError(f"shortlist {self.path}: {error}") from None

    def described(self, here: Mapping[str, Any]) -> dict[str, Any]:
        """For a record: the file, its configs a phase, and the fields of the toolchain that differ from the one `here`."""
        there = self.toolchain
        return {
            "file": str(self.path),
            "configs": {phase: len(rows) for phase, rows in self.configs.items()},
            "toolchain": {name: [was, here.get(name)] for name, was in there.items() if here.get(name) != was},
        }


def _template(spec: KernelSpec, target: Target) -> dict[str, str]:
    template = template_for(Op.ATTEND, spec, target)
    return {"file": template.file, "source": source_digest(template)}


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}
