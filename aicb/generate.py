"""`aicb generate`: configure, take times, build, write, summarise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aicb import simai
from aicb.configure import configure
from aicb.errors import UserError, require
from aicb.job import Job
from aicb.naming import gpu_slug, workload_name
from aicb.profile import Profile, read_profile
from aicb.summary import Summary, summarise
from aicb.times import ComputeTimes, fixed_times, profile_times
from aicb.workload import Iteration, build

RESULT_DIR = "results/workload"


def generate(typed: Mapping[str, Any], warn: Callable[[str], None]) -> list[Summary]:
    """Write the workload(s) that the typed options ask for; return a summary of each. Raises UserError, OSError."""
    configured = configure(typed)
    stages = _stages(configured.job, typed.get("pp_rank", "0"))
    profile = _profile(typed)
    for warning in configured.warnings:
        warn(warning)
    built = [(job, *_build(job, typed, profile)) for job in stages]
    if typed.get("pp_rank") == "slowest":
        built = [max(built, key=lambda one: sum(one[2].compute_ns()))]
    summaries = []
    for job, times, iteration in built:
        for warning in times.warnings:
            warn(warning)
        gpu = gpu_slug(typed["gpu_type"]) if typed.get("gpu_type") else None
        path = Path(typed.get("result_dir", RESULT_DIR)) / workload_name(job, gpu, times.fixed is not None)
        repeat = job.training.epoch_num
        simai.write(path, simai.header(job, repeat), iteration, repeat, typed.get("force", False))
        summaries.append(summarise(job, times, iteration, path, configured.notes))
    return summaries


def _stages(job: Job, pp_rank: str) -> list[Job]:
    if pp_rank in ("all", "slowest"):
        return [job.at(rank) for rank in range(job.pp)]
    require(
        pp_rank.isascii() and pp_rank.isdigit() and len(pp_rank) < 10,
        f"--pp_rank {pp_rank} must be a stage from 0 to --pipeline_model_parallel less 1, or all, or slowest",
    )
    return [job.at(int(pp_rank))]


def _profile(typed: Mapping[str, Any]) -> Profile | None:
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
    elif typed.get("aiob_enable"):
        raise UserError("--aiob_enable needs measured times: give a compute profile with --comp_filepath FILE")
    else:
        times = fixed_times(job, typed.get("fixed_compute_ns", 1))
    minimum = typed.get("min_comm_bytes", 0)
    require(minimum >= 0, f"--min_comm_bytes {minimum} must not be negative")
    return times, build(job, times, minimum)
