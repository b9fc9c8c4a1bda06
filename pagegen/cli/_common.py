"""What commands share: how a spec is named, and how people and programs are answered.

People read tables on stdout and progress on stderr; with --json stdout carries one JSON document and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pagegen.errors import ConfigError, SpecError
from pagegen.spec import KernelSpec, Phase, parse_slug

PROGRESS_AFTER = 2.0  # seconds; what is shorter shows no bar
PROGRESS_LINES = 30.0  # seconds between two lines of progress, where there is no terminal for a bar
LONG_WORD = 20  # characters; a table folds longer words where room is short, and never shorter ones

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, smollm2-135m, or dummy:NAME.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Read the spec from this model's config.")
]
SpecArgument = Annotated[
    str | None, typer.Argument(metavar="SPEC", help="A YAML or JSON file, or a slug such as bf16-d64-h9x3-b16-NHD.")
]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="DTYPE",
        help="Of the KV cache: fp8_e4m3, fp8_e5m2, int8 or int4; default: as --dtype.",
        show_default=False,
    ),
]
TargetOption = Annotated[str, typer.Option("--target", metavar="TARGET", help="auto, cpu, cpu:avx2, cuda:sm_90, ...")]

# --- naming a spec ---------------------------------------------------------------------------------------------------

_FIELD_HELP = {
    "q_heads": "Query heads.",
    "kv_heads": "KV heads.",
    "head_dim": "Head dim of Q and K.",
    "head_dim_v": "Head dim of V, if it differs.",
    "dtype": "Element type of q and out: fp32, bf16, fp16.",
    "kv_dtype": "Element type of the KV cache, if it differs.",
    "block_size": "Tokens of a KV block.",
    "layout": "KV layout: NHD, HND, HDN, HDN8, ... or auto.",
    "causal": "A query sees no later key.",
    "scale": "Softmax scale, if it is not head_dim ** -0.5.",
    "lse": "Also write the log-sum-exp.",
    "kv_scale": "Scales of a quantised KV cache: tensor, head, token_head.",
    "kv_zero": "Quantised values have zero points.",
    "v_in_k": "MLA: V is the first head_dim_v dims of K.",
    "window": "Keys that a query sees to its left, its own included.",
    "window_right": "Keys that it sees to its right.",
    "soft_cap": "Scores become cap * tanh(score / cap).",
    "alibi": "Scores get a slope times the distance.",
    "sinks": "Each query head has one more logit, whose value is 0.",
    "mask": "A boolean mask beside causal and window.",
    "score_mod": "An expression over score, q_idx, k_idx and head.",
    "deterministic": "A row's bits depend on its own sequence alone.",
    "rope": "write_kv rotates q and k first: neox or interleaved.",
    "rotary_dim": "Dims that are rotated, if fewer than head_dim.",
    "qk_norm": "write_kv applies RMSNorm to q and k before it rotates them.",
}
_SAME_AS = {"kv_dtype": "dtype", "head_dim_v": "head_dim", "rotary_dim": "head_dim"}  # fields that follow another one unless they are named


def spec_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for every field of KernelSpec; it receives those that were given as `overrides`."""
    hints = typing.get_type_hints(KernelSpec)
    options = {
        field.name: Annotated[
            _option_type(hints[field.name]) | None,
            typer.Option(_flag(field.name, hints[field.name]), help=_FIELD_HELP[field.name], show_default=False),
        ]
        for field in dataclasses.fields(KernelSpec)
    }

    @functools.wraps(command)
    def with_overrides(**values: Any) -> None:
        given = {name: values.pop(name) for name in options}
        command(**values, overrides={name: value for name, value in given.items() if value is not None})

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "overrides"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    with_overrides.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
    with_overrides.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_overrides


def _option_type(hint: Any) -> Any:
    kinds = {hint, *typing.get_args(hint)}
    return next((kind for kind in (bool, int, float) if kind in kinds), str)


def _flag(name: str, hint: Any) -> str:
    word = name.replace("_", "-")
    return f"--{word}/--no-{word}" if hint is bool else f"--{word}"


def spec_from(spec: str | None, model: str | None, overrides: Mapping[str, Any]) -> tuple[KernelSpec, Phase | None]:
    """The spec that a command line names: a file or slug, or a model's, with fields replaced by `overrides`.

    A phase of None means all. Raises SpecError, or ModelError for the model.
    """
    if (spec is None) == (model is None):
        raise SpecError("name one spec: a YAML or JSON file, a slug such as bf16-d64-h9x3-b16-NHD, or --model MODEL")
    if model is not None:
        found, phase = _model_spec(model), None
    elif spec is not None:
        found, phase = _read_spec(Path(spec)) if _is_file(spec) else parse_slug(spec)
    if not overrides:
        return found, phase
    values = found.to_dict()
    for name, of in _SAME_AS.items():
        if values[name] == values[of]:
            del values[name]
    return KernelSpec.from_dict({**values, **overrides}), phase


def _model_spec(model: str) -> KernelSpec:
    from pagegen.runtime.weights.resolve import resolve_model
    from pagegen.spec import DType

    return resolve_model(model).config.kernel_spec(DType.BF16)


def max_context(model: str | None) -> int | None:
    """Tokens that a model takes; None without one. Raises ModelError."""
    if model is None:
        return None
    from pagegen.runtime.weights.resolve import resolve_model

    return resolve_model(model).config.max_position_embeddings


def is_folder(word: str) -> bool:
    """Whether a word names a folder; False too for what no folder can be named, such as 5000 characters."""
    try:
        return Path(word).is_dir()
    except OSError:
        return False


def _is_file(word: str) -> bool:
    try:
        return Path(word).suffix in (".yaml", ".yml", ".json") or Path(word).is_file()
    except OSError:
        return False


def _read_spec(path: Path) -> tuple[KernelSpec, Phase | None]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        # JSON is not quite YAML: PyYAML refuses its tabs and takes its 1e-05 for a text.
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: an impossible date or number
        why = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"spec file {path} cannot be read: {why}; `pagegen spec` prints one to start from") from None
    if not isinstance(values, dict) or not values:
        raise SpecError(f"spec file {path} holds no fields; `pagegen spec` prints one to start from")
    if any(not isinstance(name, str) for name in values):
        raise SpecError(f"spec file {path} has a field whose name is no text; `pagegen spec` prints one to start from")
    phase = values.pop("phase", None)
    if phase is not None and phase not in tuple(Phase):
        raise SpecError(f"phase={phase!r} in {path} is not known; allowed: {', '.join(Phase)}, or leave it out for all")
    return KernelSpec.from_dict(values), Phase(phase) if phase else None


def given_flags(context: typer.Context) -> dict[str, str]:
    """What stands on the command line of a command, its defaults not counted: parameter to its flag, or SPEC."""
    found = {}
    for param in context.command.params:
        source = context.get_parameter_source(param.name) if param.name else None
        if param.name and source is not None and source.name == "COMMANDLINE":
            found[param.name] = param.opts[0] if param.opts[0].startswith("-") else param.name.upper()
    return found


# --- values ----------------------------------------------------------------------------------------------------------


def as_path(word: str) -> Path:
    """A file or folder that a command line names; an empty word is none, and would mean the working directory."""
    if not word:
        raise typer.BadParameter("it is empty; name a file or a folder, . is the working directory")
    return Path(word)


def require_folder(path: Path, flag: str) -> None:
    """Makes a folder that a run is to write into, before it begins. Raises ConfigError naming the flag."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be made: {error.strerror}; name a folder that you can write") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path} cannot be written; name a folder that you can write")


def require_writable(path: Path, flag: str) -> None:
    """Whether a file can be written where a run is to put it at its end. Raises ConfigError naming the flag."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; name a file in a folder that is there and yours to write")


def parse_size(text: str | None, flag: str) -> int | None:
    """Bytes from `1500000`, `512M` or `1.5GiB` (K, M, G are powers of 1024). Raises ConfigError naming the flag."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(float(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError(f"{flag} {text!r} is not a size; write bytes, or a number with K, M or G such as 512M")
    return size


def format_size(num_bytes: int) -> str:
    """`1.5 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


# --- answers ---------------------------------------------------------------------------------------------------------


def print_json(document: object) -> None:
    """The one JSON document of a command; ASCII only, so that no terminal encoding can break it."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout, its title on a line before it: numbers are set right, columns without a value left out.

    Nothing is cut short: where no folding of words is enough, the table is wider than the terminal.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    by_column = dict(zip(columns, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(columns, ())
    by_column = {name: cells for name, cells in by_column.items() if any(cells) or not rows}
    numbers = [bool(cells) and all(re.fullmatch(r"[\d.]*%?", cell) for cell in cells) for cells in by_column.values()]
    names = [name.replace(" ", "\n") if number else name for name, number in zip(by_column, numbers, strict=True)]
    console, gaps = Console(), 3 * (len(names) - 1)
    widths = _fit(list(zip(names, by_column.values(), strict=True)), console.width - gaps)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, number, width in zip(names, numbers, widths, strict=True):
        table.add_column(name, width=width, overflow="fold", justify="right" if number else "left")
    for row in zip(*by_column.values(), strict=True):
        table.add_row(*map(Text, row))  # Text: a `[` in a path is no markup
    if title:
        typer.echo(title)
    console.width = max(console.width, sum(widths) + gaps)
    console.print(table)


def _fit(columns: Sequence[tuple[str, Sequence[str]]], room: int) -> list[int]:
    """Widths of (heading, cells): the widest give way until all fit into `room`, but keep their longest word whole."""
    widths = [max(map(len, (*name.split("\n"), *cells))) for name, cells in columns]
    words = [max((len(word) for cell in (name, *cells) for word in cell.split()), default=0) for name, cells in columns]
    while sum(widths) > room:
        wide = [index for index, width in enumerate(widths) if width > min(words[index], LONG_WORD)]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def note(message: str) -> None:
    """A line for people, on stderr."""
    typer.echo(message, err=True)


def note_workload(workload: Mapping[str, Any]) -> None:
    """What of a workload was timed, and what stands for the rest."""
    note(f"workload: {workload['name']}, {workload['timed']} of its {workload['points']} batches")
    if workload["cut"]:
        note(f"the model takes {workload['max_context']} tokens: longer contexts of {workload['cut']} batches were cut to that")
    if large := [f"{share:.0%} of {phase}" for phase, share in workload["moved"].items() if share]:
        note(f"too large to be timed here: {', '.join(large)} by weight; for these batches the nearest stand")


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(completed, remark)`, which shows on stderr how far something is: by a bar on a terminal, once two
    seconds have passed, elsewhere by a line now and then.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    bar = Progress(
        *Progress.get_default_columns(),
        TextColumn("{task.fields[remark]}"),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(description, total=total, remark="")
    said, shown = time.monotonic(), False

    def advance(completed: int, remark: str = "") -> None:
        nonlocal said, shown
        bar.update(task, completed=completed, remark=remark)
        passed = time.monotonic() - said
        if not bar.console.is_terminal and passed >= PROGRESS_LINES:
            note(f"{description}: {completed / max(1, total):.0%}{', ' if remark else ''}{remark}")
            said += passed
        elif bar.console.is_terminal and not shown and passed > PROGRESS_AFTER:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
