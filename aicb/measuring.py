"""Profiling on the way to a workload: is there room for the outcome, then the profiler, which alone needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from aicb.config.configure import attention_backend
from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.naming import profile_name

PROFILE_DIR = "results/aiob_outputs"


def refuse_existing(paths: list[Path], typed: Mapping[str, Any]) -> None:
    """Measured times differ each time, so what is there would be replaced: better said before measuring."""
    for path in paths:
        require(
            not path.exists() or typed.get("force", False),
            f"{path} exists, and measuring gives new times: pass --force to replace it",
        )


def writable(folder: Path, option: str) -> None:
    """Find out before measuring that the outcome could not be written. Raises UserError naming `option`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option} {folder}: {error.strerror}") from error
    require(os.access(folder, os.W_OK), f"--{option} {folder}: cannot be written to")


def measure(wanted: Sequence[tuple[Job, Sequence[str]]], typed: Mapping[str, Any]) -> list[Path]:
    """Profile this machine for the stages of jobs; return the profiles' paths, none on ranks other than 0.

    Each job comes with what sets its model apart from its preset, for the file's name. Raises UserError.
    """
    try:
        from profiler.run import profile_jobs
        from profiler.settings import Settings
    except ModuleNotFoundError as error:
        raise UserError(
            f"--aiob_enable without --comp_filepath measures this machine, and {error.name} is not installed: install "
            "the profiler (pip install 'aicb[profiler]'), or give a saved profile with --comp_filepath FILE"
        ) from error
    samples = typed.get("train_iter")
    if samples is None and typed.get("profile_only"):
        samples = typed.get("epoch_num")  # of a profile alone, iterations can only be samples
    names = ["device", "l2", "min_time", "sustained", "time_budget", "resume", "force"]
    names += ["fusion", "gradient_accumulation_fusion"]
    given = {name: typed[name] for name in names if name in typed}
    given["attention_backend"] = attention_backend(typed)
    settings = Settings(**given, **({} if samples is None else {"train_iter": samples}))
    folder = Path(typed.get("profile_dir", PROFILE_DIR))

    def path_of(job: Job, marks: Sequence[str], gpu: str) -> Path:
        path = folder / profile_name(job, [*marks, *settings.marks()], gpu)
        if not settings.resume:
            refuse_existing([path], typed)
        writable(folder, "profile_dir")
        return path

    return profile_jobs([(job, partial(path_of, job, marks)) for job, marks in wanted], settings)


def splits(typed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each profile that lists such as `--tp 1,2,4` ask for, in the order typed."""
    lists = _lists(typed)
    for name, values in lists.items():
        require(len(set(values)) == len(values), f"{_words(name, values)}: each value once")
    return [{**typed, **dict(zip(lists, values, strict=True))} for values in product(*lists.values())]


def require_single(typed: Mapping[str, Any]) -> None:
    """Raise UserError where an option has several values, which only profiles alone can."""
    for name, values in _lists(typed).items():
        raise UserError(
            f"{_words(name, values)}: several values make one profile each, so they need --aiob_enable (or aicb "
            "profile) with --profile_only"
        )


def _lists(typed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: value for name, value in typed.items() if isinstance(value, tuple)}


def _words(name: str, values: tuple[int, ...]) -> str:
    return f"--{name} {','.join(map(str, values))}"
