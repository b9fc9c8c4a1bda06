"""`pagegen spec`: a complete spec to start from."""

from __future__ import annotations

from typing import Any

from pagegen.cli._common import JsonOption, ModelOption, SpecArgument, print_json, spec_from, spec_options

EXAMPLE = "pagegen spec --model smollm2-135m --block-size 32 > spec.yaml"
DEFAULT = "bf16-d64-h9x3-b16-NHD"


@spec_options
def command(
    overrides: dict[str, Any], spec: SpecArgument = None, model: ModelOption = None, json: JsonOption = False
) -> None:
    """Print a complete kernel spec to start from."""
    found, phase = spec_from(DEFAULT if spec is None and model is None else spec, model, overrides)
    values = found.to_dict() | ({"phase": phase.value} if phase else {})
    if json:
        print_json(values | {"slug": found.slug})
        return
    import yaml

    print(f"# {found.slug}\n{yaml.safe_dump(values, sort_keys=False)}", end="")
