"""`aicb generate`: configure, take times, build, write, summarise."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aicb import units
from aicb.config.configure import configure
from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.naming import gpu_slug, profile_name, workload_name
from aicb.options import MEASURING, OPTIONS
from aicb.summary import Summary, summarise
from aicb.times.compute import ComputeTimes, fixed_times, profile_times
from aicb.times.profile import Profile, read_profile
from aicb.units import whole_number
from aicb.workload import simai
from aicb.workload.rows import Iteration, build

RESULT_DIR = "results/workload"
PROFILE_DIR = "results/aiob_outputs"


def generate(typed: Mapping[str, Any], warn: Callable[[str], None]) -> list[Summary]:
    """Write the workload(s) that the typed options ask for; return a summary of each.

    With --aiob_enable and no profile, this machine is profiled first; ranks of torchrun other than 0 return nothing.
    Raises UserError, OSError.
    """
    configured = configure(typed)
    for warning in (*configured.warnings, *_check_times(typed)):
        warn(warning)
    stages = _stages(configured.job, typed.get("pp_rank", "0"))
    if _measures(typed):
        _refuse_existing([_path(job, typed) for job in stages], typed)
        _writable(_path(stages[0], typed).parent, "result_dir")
        measured = measure(stages[0], typed)
        if measured is None:
            return []
        profile: Profile | None = read_profile(measured)
    else:
        profile = read_profile(typed["comp_filepath"]) if "comp_filepath" in typed else None
    built = [Built(job, *_build(job, typed, profile)) for job in stages]
    if typed.get("pp_rank") == "slowest":
        if profile is None:
            warn("--pp_rank slowest without a profile: placeholder times only count rows")
        built = [max(built, key=lambda one: sum(one.iteration.compute_ns()))]
    pending = [one for one in built if typed.get("force") or not one.is_written(typed)]  # all or nothing
    for warning in dict.fromkeys(warning for one in built for warning in one.times.warnings):  # stages share most
        warn(warning)
    for one in pending:
        simai.write(*one.content(typed), typed.get("force", False))
    return [_summary(one, typed, configured.notes) for one in built]


class Built(NamedTuple):
    """A stage's workload, ready to be written."""

    job: Job
    times: ComputeTimes
    iteration: Iteration

    def content(self, typed: Mapping[str, Any]) -> tuple[Path, dict[str, int], Iteration, int]:
        """Return what simai.write and simai.is_written take."""
        repeat = self.job.training.epoch_num
        header = simai.header(self.job, repeat, typed.get("min_comm_bytes", 0))
        return _path(self.job, typed), header, self.iteration, repeat

    def is_written(self, typed: Mapping[str, Any]) -> bool:
        """Whether the file is there already. Raises UserError when it holds something else."""
        return simai.is_written(*self.content(typed))


def _measures(typed: Mapping[str, Any]) -> bool:
    return bool(typed.get("aiob_enable")) and "comp_filepath" not in typed


def _path(job: Job, typed: Mapping[str, Any]) -> Path:
    gpu = gpu_slug(typed["gpu_type"]) if "gpu_type" in typed else None
    fixed = "comp_filepath" not in typed and not typed.get("aiob_enable")
    return Path(typed.get("result_dir", RESULT_DIR)) / workload_name(job, gpu, fixed)


def _refuse_existing(paths: list[Path], typed: Mapping[str, Any]) -> None:
    """Measured times differ each time, so what is there would be replaced: better said before measuring."""
    for path in paths:
        require(
            not path.exists() or typed.get("force", False),
            f"{path} exists, and measuring gives new times: pass --force to replace it",
        )


def _writable(folder: Path, option: str) -> None:
    """Find out before measuring that the outcome could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option} {folder}: {error.strerror}") from error
    require(os.access(folder, os.W_OK), f"--{option} {folder}: cannot be written to")


def _check_times(typed: Mapping[str, Any]) -> list[str]:
    """Refuse options about times that contradict each other; return a warning for each that has no effect."""
    measured = "comp_filepath" in typed or typed.get("aiob_enable", False)
    require(
        typed.get("aiob_enable", True) or "comp_filepath" not in typed,
        "--no-aiob_enable and --comp_filepath exclude each other: a profile means measured times",
    )
    require(
        "fixed_compute_ns" not in typed or not measured,
        "--fixed_compute_ns and measured times (--comp_filepath, --aiob_enable) exclude each other: choose one",
    )
    minimum = typed.get("min_comm_bytes", 0)
    require(minimum >= 0, f"--min_comm_bytes {minimum} must not be negative")
    idle = [option.name for option in OPTIONS if option.group == MEASURING and not _measures(typed)]
    idle += [] if "comp_filepath" in typed else ["allow_profile_mismatch"]
    return [f"--{name} has no effect here: nothing is measured or matched" for name in idle if typed.get(name)]


def profile_alone(typed: Mapping[str, Any], warn: Callable[[str], None]) -> Path | None:
    """Profile this machine without writing a workload; return the profile's path, None on ranks other than 0."""
    require(_measures(typed), "--profile_only measures this machine: it needs --aiob_enable (or aicb profile) alone")
    configured = configure(typed)
    for warning in (*configured.warnings, *_check_times(typed)):
        warn(warning)
    return measure(_stages(configured.job, typed.get("pp_rank", "0"))[0], typed)


def measure(job: Job, typed: Mapping[str, Any]) -> Path | None:
    """Profile this machine; return the profile's path, None on ranks other than 0. Raises UserError."""
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
        path = folder / profile_name(job, gpu)
        _refuse_existing([path], typed)
        _writable(folder, "profile_dir")
        return path

    return profile_job(job, settings, name_of)


def _summary(one: Built, typed: Mapping[str, Any], notes: tuple[str, ...]) -> Summary:
    minimum = typed.get("min_comm_bytes", 0)
    if minimum:
        left_out = build(one.job, one.times).collectives() - one.iteration.collectives()
        size = units.size(sum(sent.bytes * count for (_, sent), count in left_out.items()))
        notes += (f"--min_comm_bytes {minimum}: {left_out.total():,} collectives left out, {size} in all",)
    return summarise(one.job, one.times, one.iteration, _path(one.job, typed), notes)


def _stages(job: Job, pp_rank: str) -> list[Job]:
    if pp_rank in ("all", "slowest"):
        return [job.at(rank) for rank in range(job.pp)]
    rank = whole_number(pp_rank)
    if rank is None:
        raise UserError(f"--pp_rank {pp_rank} must be the number of a stage, from 0, or all, or slowest")
    return [job.at(rank)]


def _build(job: Job, typed: Mapping[str, Any], profile: Profile | None) -> tuple[ComputeTimes, Iteration]:
    if profile is not None:
        times = profile_times(job, profile, typed.get("allow_profile_mismatch", False))
    else:
        times = fixed_times(job, typed.get("fixed_compute_ns", 1))
    return times, build(job, times, typed.get("min_comm_bytes", 0))
