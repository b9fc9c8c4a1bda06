"""The frame: the table of commands, help, errors and exit statuses."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import pagegen
from pagegen import cli
from pagegen.cli import COMMANDS, main, subcommands
from pagegen.errors import BuildError, ConfigError, GateError
from tests.cli.helpers import run

NAMES = [row.name for row in COMMANDS]
REPO = Path(__file__).parents[2]


LEAVES = [words for row in COMMANDS for words in subcommands(row)]


def test_every_file_is_a_command_and_every_command_a_file() -> None:
    folder = Path(inspect.getfile(main)).parent
    assert {path.stem for path in folder.glob("[a-z]*.py")} == {row.module for row in COMMANDS}
    assert len(set(NAMES)) == len(NAMES)


def test_help_lists_every_command_with_its_summary() -> None:
    result = run("--help")
    assert result.status == 0
    for row in COMMANDS:
        assert f"  {row.name} " in result.stdout
        assert row.summary.split()[0] in result.stdout


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_help_with_an_example(words: tuple[str, ...]) -> None:
    result = run(*words, "--help")
    assert result.status == 0
    assert f"Example: pagegen {' '.join(words)}" in " ".join(result.stdout.split())


def test_help_imports_neither_torch_nor_jinja() -> None:
    code = (
        "import sys; from pagegen.cli import main; main(['--help']);"
        "sys.exit(bool({'torch', 'jinja2', 'optuna', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_no_words_at_all_print_the_help() -> None:
    assert run() == run("--help")


def test_python_m_pagegen_is_pagegen() -> None:
    result = subprocess.run([sys.executable, "-m", "pagegen", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"pagegen {pagegen.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("spce",), "Did you mean 'spec'?"),
        (("spec", "--no-such"), "No such option: --no-such"),
        (("spec", "--block-size", "many"), "--block-size"),
        (("spec", "bf16-d65-h9x3-b16-NHD"), "head_dim=65"),
        (("cache", "destroy"), "see `pagegen cache --help`"),
        *(((group,), f"Missing command; see `pagegen {group} --help`") for group in ("bench", "cache", "package")),
        (("spec", ""), "neither a file nor a slug"),
        (("report", ""), "it is empty"),
        (("package", "show", ""), "it is empty"),
        (("paper", "fig2", "--plots", ""), "it is empty"),
        (("generate", "dummy:tiny", "--prompt", "x", "--kernels", ""), "it is empty"),
        (("generate", "dummy:tiny", "--prompt", "x", "--record", ""), "it is empty"),
        (("tune", "bf16-d64-h9x3-b16-NHD", "--out", ""), "it is empty"),
        (("check", "x" * 5000), "neither a file nor a slug"),
        (("check", "bf16-d64-h9x3-b16-NHD", "--seed", str(2**64)), "--seed"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.status == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.startswith("pagegen: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [("--debug", "spec", "nonsense"), ("spec", "nonsense", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.status == 2
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("pagegen: ")


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegen.cli import targets

    def command() -> None:
        """Raises."""
        raise error

    monkeypatch.setattr(targets, "command", command)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("a\nb"), 2, "pagegen: a b\n"),
        (GateError("the default is wrong"), 1, "pagegen: the default is wrong\n"),
        (BuildError("failed", log="the log"), 2, "pagegen: failed\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "pagegen: [Errno 13] Permission denied: '/x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_statuses(error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(error, monkeypatch)
    result = run("targets")
    assert (result.status, result.stderr) == (status, said)


def test_sigterm_unwinds_what_a_command_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegen.cli import targets

    unwound = []

    def command() -> None:
        """Waits."""
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            unwound.append("all")

    monkeypatch.setattr(targets, "command", command)
    with pytest.raises(SystemExit) as ended:
        run("targets")
    assert (ended.value.code, unwound, signal.getsignal(signal.SIGTERM)) == (143, ["all"], signal.SIG_DFL)


def test_a_defect_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(ZeroDivisionError("ours"), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run("targets")


def test_debug_shows_the_compilers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(BuildError("failed", log="the log"), monkeypatch)
    assert "the log" in run("targets", "--debug").stderr


def test_exports_are_lazy_and_complete() -> None:
    code = "import sys, pagegen; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(pagegen.__all__) <= set(dir(pagegen))
    with pytest.raises(AttributeError, match="no_such"):
        _ = pagegen.no_such


def test_the_page_about_the_command_line_is_current() -> None:
    script = REPO / "scripts" / "gen_cli_docs.py"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(
        [sys.executable, script, "--check"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_warning_is_one_line_without_a_place() -> None:
    with cli._warnings_in_one_line():
        assert warnings.formatwarning("low on ice", UserWarning, "file.py", 7, "code") == "warning: low on ice\n"
    assert "file.py" in warnings.formatwarning("low on ice", UserWarning, "file.py", 7, "code")
