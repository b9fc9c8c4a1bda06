"""Variant in, source text out. The one Jinja environment for kernels; touches no device and writes no file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import jinja2

from .catalog import Variant
from .errors import RenderError
from .expression import render_expression
from .paths import TEMPLATES


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Rendered text, complete in itself (headers are included), and what it was rendered from."""

    variant: Variant
    text: str

    @property
    def key(self) -> str:
        """Content key: language, target and text. Toolchain and flags join it when the text is built."""
        parts = (self.variant.template.language, self.variant.target.name, self.text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def environment() -> jinja2.Environment:
    """The environment of every kernel and package template."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,  # without it an included `// comment` swallows the next line
        autoescape=False,  # what is rendered is code, not HTML
    )
    made.globals["render_expression"] = render_expression  # score_mod, in the words of a template's language
    return made


def render(variant: Variant) -> Source:
    """Renders a variant. Templates see `spec`, `target`, `config` (a dict of knobs) and `variant`.

    Raises RenderError naming the template and line.
    """
    try:
        template = environment().get_template(variant.template.file)
        text = template.render(
            variant=variant, spec=variant.spec, target=variant.target, config=variant.config.to_dict()
        )
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise RenderError(f"template {variant.template.file}{f' line {line}' if line else ''}: {error}") from error
    return Source(variant, text)
