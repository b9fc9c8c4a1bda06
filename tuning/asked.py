"""What of a tuning run's request can be refused before anything that takes time is loaded: no torch here, and no Optuna."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from pagegen.errors import ConfigError
from pagegen.spec import Phase
from pagegen.target import parse_target

TRIALS = 40
BRUTE = "brute"  # every config in the order of the space: needs no sampler of Optuna's
SAMPLERS = ("tpe", "gp", "random", BRUTE)
PRESETS = Path(__file__).parent / "presets"


def require_search(*, target: str, workload: str | None, budget: float | None, sampler: str, workers: int) -> None:
    """Raises ConfigError for a search that cannot be, whatever the spec and the machine."""
    if target != "auto":  # which takes torch to look for a GPU
        parse_target(target)
    require_workload(workload)
    require_budget(budget)
    require_counts({"--workers": workers})
    require_sampler(sampler)


def require_counts(counts: Mapping[str, int | None]) -> None:
    """Raises ConfigError for a count, by its flag, that is less than 1; None is none."""
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{flag} {count} is less than 1; allowed: 1 or more")


def require_budget(budget: float | None) -> None:
    """Raises ConfigError for seconds in which nothing can begin; None is without end."""
    if budget is not None and not budget > 0:
        raise ConfigError(f"--budget {budget} is not a positive number of seconds; leave it out for no limit")


def require_words(words: Mapping[str, str | None]) -> None:
    """Raises ConfigError for a word, by its flag, that is empty, as one of an unset variable is; None is the default."""
    for flag, word in words.items():
        if word is not None and not word.strip():
            raise ConfigError(f"{flag} is empty; name one, or leave it out")


def require_sampler(name: str) -> None:
    """Raises ConfigError for a sampler that is not known, or lacks what it computes with."""
    if name not in SAMPLERS:
        raise ConfigError(f"--sampler {name} is not known; allowed: {', '.join(SAMPLERS)}")
    if name == "gp" and importlib.util.find_spec("scipy") is None:
        raise ConfigError("--sampler gp needs scipy, which is not installed: pip install scipy, or use --sampler tpe")


def require_storage(storage: str) -> None:
    """Raises ConfigError for a file of a storage to join that is not there; of a server nothing is known here."""
    file = storage if "://" not in storage else storage.partition("sqlite:///")[2].partition("?")[0]
    if file and not Path(file).is_file():
        raise ConfigError(f"there is no file {file} with a study to join; change --storage")


def require_workload(word: str | None, presets: Path = PRESETS) -> None:
    """Raises ConfigError for a workload that is neither a preset nor a file; None is the default."""
    if word is None or word in preset_names(presets) or _is_file(word):
        return
    parts = {phase.value for phase in Phase}
    whole = ", ".join(name for name in preset_names(presets) if name not in parts)
    raise ConfigError(
        f"workload {word[:200]!r} is no file, nor known; allowed: a file, {whole}, or {', '.join(Phase)}: that part of the default"
    )


def preset_names(presets: Path = PRESETS) -> list[str]:
    """What `--workload` takes beside a file."""
    return sorted(path.stem for path in presets.glob("*.yaml"))


def _is_file(word: str) -> bool:
    """Whether it names a file; what no file can be named, such as 5000 characters, does not."""
    try:
        return Path(word).is_file()
    except OSError:
        return False
