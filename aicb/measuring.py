"""Profiling on the way to a workload: is there room for the outcome, then the profiler, which alone needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def measure(job: Job, marks: Sequence[str], typed: Mapping[str, Any]) -> Path | None:
    """Profile this machine for the stage of `job`; return the profile's path, None on ranks other than 0.

    `marks`: what sets the model apart from its preset, for the file's name. Raises UserError.
    """
    try:
        from profiler.run import Settings, profile_job
    except ModuleNotFoundError as error:
        raise UserError(
            f"--aiob_enable without --comp_filepath measures this machine, and {error.name} is not installed: install "
            "the profiler (pip install 'aicb[profiler]'), or give a saved profile with --comp_filepath FILE"
        ) from error
    samples = typed.get("train_iter")
    if samples is None and typed.get("profile_only"):
        samples = typed.get("epoch_num")  # of a profile alone, iterations can only be samples
    given = {name: typed[name] for name in ("device", "l2", "time_budget") if name in typed}
    settings = Settings(**given, **({} if samples is None else {"train_iter": samples}))
    folder = Path(typed.get("profile_dir", PROFILE_DIR))

    def name_of(gpu: str) -> Path:
        path = folder / profile_name(job, marks, gpu)
        refuse_existing([path], typed)
        writable(folder, "profile_dir")
        return path

    return profile_job(job, settings, name_of)
