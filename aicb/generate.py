"""`aicb generate`: configure, take times, build, write, summarise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aicb import simai
from aicb.configure import configure
from aicb.errors import UserError, require
from aicb.job import Job
from aicb.kernels import slice_of
from aicb.naming import gpu_slug, profile_name, workload_name
from aicb.profile import Profile, mismatches, read_profile
from aicb.summary import Summary, summarise
from aicb.times import ComputeTimes, fixed_times, profile_times
from aicb.units import whole_number
from aicb.workload import Iteration, build

RESULT_DIR = "results/workload"
PROFILE_DIR = "results/aiob_outputs"


def generate(typed: Mapping[str, Any], warn: Callable[[str], None]) -> list[Summary]:
    """Write the workload(s) that the typed options ask for; return a summary of each.

    With --aiob_enable and no profile, this machine is profiled first; ranks of torchrun other than 0 return nothing.
    Raises UserError, OSError.
    """
    configured = configure(typed)
    for warning in configured.warnings:
        warn(warning)
    stages = _stages(configured.job, typed.get("pp_rank", "0"))
    profile = _read_profile(typed)
    if profile is None and typed.get("aiob_enable"):
        measured = measure(stages[0], typed)
        if measured is None:
            return []
        profile = read_profile(measured)
    built = [(job, *_build(job, typed, profile)) for job in stages]
    if typed.get("pp_rank") == "slowest":
        built = [max(built, key=lambda one: sum(one[2].compute_ns()))]
    return [_write(*one, typed, configured.notes, warn) for one in built]


def profile_alone(typed: Mapping[str, Any], warn: Callable[[str], None]) -> Path | None:
    """Profile this machine without writing a workload; return the profile's path, None on ranks other than 0."""
    require("comp_filepath" not in typed, "--profile_only and --comp_filepath exclude each other: choose one")
    configured = configure(typed)
    for warning in configured.warnings:
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
        if path.exists() and not typed.get("force", False):
            _refuse_other_slice(path, job)
        return path

    return profile_job(job, settings, name_of)


def _refuse_other_slice(path: Path, job: Job) -> None:
    """Measuring again replaces a profile; one of another slice that happens to have the same name stays."""
    differing = mismatches(read_profile(path), slice_of(job))
    require(
        not differing,
        f"{path} is the profile of another slice ({'; '.join(differing)}): pass --force to replace it, or another "
        "--profile_dir",
    )


def _write(
    job: Job,
    times: ComputeTimes,
    iteration: Iteration,
    typed: Mapping[str, Any],
    notes: tuple[str, ...],
    warn: Callable[[str], None],
) -> Summary:
    for warning in times.warnings:
        warn(warning)
    gpu = gpu_slug(typed["gpu_type"]) if typed.get("gpu_type") else None
    path = Path(typed.get("result_dir", RESULT_DIR)) / workload_name(job, gpu, times.fixed is not None)
    repeat = job.training.epoch_num
    simai.write(path, simai.header(job, repeat), iteration, repeat, typed.get("force", False))
    return summarise(job, times, iteration, path, notes)


def _stages(job: Job, pp_rank: str) -> list[Job]:
    if pp_rank in ("all", "slowest"):
        return [job.at(rank) for rank in range(job.pp)]
    rank = whole_number(pp_rank)
    if rank is None:
        raise UserError(f"--pp_rank {pp_rank} must be the number of a stage, from 0, or all, or slowest")
    return [job.at(rank)]


def _read_profile(typed: Mapping[str, Any]) -> Profile | None:
    path = typed.get("comp_filepath")
    if path is None:
        return None
    require(
        typed.get("aiob_enable", True),
        "--no-aiob_enable and --comp_filepath exclude each other: a profile means measured times",
    )
    require("fixed_compute_ns" not in typed, "--fixed_compute_ns and --comp_filepath exclude each other: choose one")
    return read_profile(path)


def _build(job: Job, typed: Mapping[str, Any], profile: Profile | None) -> tuple[ComputeTimes, Iteration]:
    if profile is not None:
        times = profile_times(job, profile, typed.get("allow_profile_mismatch", False))
    else:
        times = fixed_times(job, typed.get("fixed_compute_ns", 1))
    minimum = typed.get("min_comm_bytes", 0)
    require(minimum >= 0, f"--min_comm_bytes {minimum} must not be negative")
    return times, build(job, times, minimum)
