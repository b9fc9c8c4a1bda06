"""`pagegen render`: the generated source of a spec's kernel."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pagegen.catalog import Variant, template_for
from pagegen.cli._common import (
    JsonOption,
    ModelOption,
    SpecArgument,
    TargetOption,
    note,
    print_json,
    spec_from,
    spec_options,
)
from pagegen.errors import ConfigError
from pagegen.spec import Op
from pagegen.target import parse_target

EXAMPLE = "pagegen render bf16-d64-h9x3-b16-NHD --target cuda:sm_90 --set tile_kv=32"

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KNOB=VALUE",
        help="Choose a knob; repeatable. An unknown name lists all, a wrong value says what the knob means.",
    ),
]


@spec_options
def command(
    overrides: dict[str, Any],
    spec: SpecArgument = None,
    model: ModelOption = None,
    target: TargetOption = "auto",
    op: Annotated[Op, typer.Option("--op", help="Which operation of the kernel family.")] = Op.ATTEND,
    set: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Print the generated source of a spec's kernel."""
    from pagegen.render import render

    found, _ = spec_from(spec, model, overrides)
    where = parse_target(target)
    template = template_for(op, found, where)
    config = template.space(found, where).parse(parse_settings(set or []))
    source = render(Variant(found, where, template, config))
    if json:
        print_json(
            {
                "key": source.key,
                "spec": found.to_dict(),
                "target": where.name,
                "config": config.to_dict(),
                "source": source.text,
            }
        )
        return
    note(f"{found.slug} on {where.name}, key {source.key}: {config.slug or 'no knobs'}")
    typer.echo(source.text, nl=False)


def parse_settings(words: list[str]) -> dict[str, str]:
    """`["tile_kv=64"]` as a dict. Raises ConfigError for a word without `=`, or a knob named twice."""
    settings = dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {word!r} is not KNOB=VALUE; write for example --set tile_kv=64")
        if name in settings:
            raise ConfigError(f"--set {word!r}: {name} is already {settings[name]}; set each knob once")
        settings[name] = value
    return settings
