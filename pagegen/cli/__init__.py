"""The command line: one table of commands, each a module that is imported when it is asked for.

To add a command: a file beside this one and a row in COMMANDS. The module holds `command` (a typer function) and
`EXAMPLE`, or, for a group of commands, `app` (a typer.Typer).

Exit statuses: 0 done; 1 the work was done and the answer is "no"; 2 the request was wrong (one line on stderr); 130
interrupted. Anything else but a signal's is a defect and shows its traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from pagegen.errors import BuildError, GateError, PagegenError

DONE, NO, WRONG, INTERRUPTED = 0, 1, 2, 130


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A row: the word on the command line, the module in this package, and the line in `pagegen --help`."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("targets", "targets", "Show this machine and the targets it runs or compiles for."),
    Command("doctor", "doctor", "Check the installation; a remedy for what is amiss."),
    Command("spec", "spec", "Print a complete kernel spec to start from."),
    Command("render", "render", "Print the generated source of a spec's kernel."),
    Command("compile", "compile", "Compile for any target; registers, spills, occupancy."),
    Command("check", "check", "Prove kernels against the reference: the correctness gate."),
    Command("generate", "generate", "Generate text offline, all prompts as one continuous batch."),
    Command("chat", "chat", "Chat with a model in the terminal."),
    Command("serve", "serve", "Serve a model over HTTP with the OpenAI API."),
    Command("tune", "tune", "Find the fastest correct config by measuring, and package it."),
    Command("report", "report", "Write a tuning run's record as one HTML page."),
    Command("bench", "bench", "Time a kernel package, an engine, or a server under load."),
    Command("plan", "plan", "Say what fits: weights, KV blocks, sequences."),
    Command("simulate", "simulate", "Run scheduler and memory policies in virtual time."),
    Command("paper", "paper", "Reproduce a figure of the Orca or vLLM paper, and compare."),
    Command("package", "package", "Show a kernel package, or verify its files and sources."),
    Command("cache", "cache", "List or clear built kernels and kernel packages."),
)

# Typer has vendored click since 0.20 or so; its usage errors are reached the same way in old and new versions.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: this process's) and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = _take_debug(words)
    words = words or ["--help"]
    if argv is None and words[:2] == ["bench", "kernel"]:  # it times in this process
        from pagegen.tuning.machine import pin_threads

        pin_threads()
    try:
        with _sigterm_unwinds(), _warnings_in_one_line():
            status = typer.main.get_command(build_app(words)).main(words, prog_name="pagegen", standalone_mode=False)
        return status if isinstance(status, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BuildError as error:
        if debug and error.log:
            print(error.log, file=sys.stderr)
        return _complain(error, debug)
    except (PagegenError, OSError) as error:
        _complain(error, debug)
        return NO if isinstance(error, GateError) else WRONG
    except _ClickError as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "pagegen"
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return _complain(f"{message.rstrip('.')}{' ' if message.endswith('?') else '; '}see `{path} --help`", debug)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Lets SIGTERM, too, give back what a command holds: a trial, a build, a process. The status is the shell's, 143."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Shows a warning as people read it, without the place in our code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def build_app(words: Sequence[str]) -> typer.Typer:
    """The typer app for a command line: the module of the command named in it is imported, no other."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_root)
    named = next((word for word in words if not word.startswith("-")), None)
    for row in COMMANDS:
        if row.name == named:
            module = importlib.import_module(f"pagegen.cli.{row.module}")
            if hasattr(module, "app"):
                app.add_typer(module.app, name=row.name, help=row.summary)
            else:
                app.command(row.name, epilog=f"Example: {module.EXAMPLE}")(module.command)
        else:
            app.command(row.name, help=row.summary)(_placeholder)
    return app


def subcommands(row: Command) -> list[tuple[str, ...]]:
    """The full words of every command under a row: one, unless it is a group."""
    module = importlib.import_module(f"pagegen.cli.{row.module}")
    if not hasattr(module, "app"):
        return [(row.name,)]
    return [(row.name, str(info.name)) for info in module.app.registered_commands]


def _print_version(wanted: bool) -> None:
    if wanted:
        from pagegen import __version__

        typer.echo(f"pagegen {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works after a command too.")
    ] = False,
) -> None:
    """Generate, prove, tune and ship paged-attention kernels, and serve a model with the winner.

    Example: pagegen generate smollm2-135m --chat "Who are you?"
    """


def _placeholder() -> None:
    """Stands for a command that this command line does not name."""


def _take_debug(words: list[str]) -> bool:
    end = words.index("--") if "--" in words else len(words)
    if "--debug" not in words[:end]:
        return False
    words.remove("--debug")
    return True


def _complain(error: Exception | str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"pagegen: {' '.join(str(error).split())}", file=sys.stderr)
    return WRONG
