"""`aicb generate`: configure, take times, build, write, summarise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aicb import units
from aicb.config.configure import Configured, configure
from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.measuring import measure, refuse_existing, require_single, splits, writable
from aicb.naming import gpu_slug, job_marks, label, model_marks, workload_name
from aicb.options import MEASURING, OPTIONS
from aicb.summary import Summary, summarise
from aicb.times.compute import ComputeTimes, fixed_times, profile_times
from aicb.times.profile import Profile, read_profile
from aicb.units import whole_number
from aicb.workload import simai
from aicb.workload.rows import Iteration, build

RESULT_DIR = "results/workload"
SHORT = (1, 17)
"""Micro-batches of rows in the two files of --short: what a simulator prints grows by the same for each one more."""


def generate(typed: Mapping[str, Any], warn: Callable[[str], None]) -> list[Summary]:
    """Write the workload(s) that the typed options ask for; return a summary of each.

    With --aiob_enable and no profile, this machine is profiled first; ranks of torchrun other than 0 return nothing.
    Raises UserError, OSError.
    """
    require_single(typed)
    configured = configure(typed)
    for warning in (*configured.warnings, *_check_times(typed)):
        warn(warning)
    if _measures(typed):
        stages = _stages(configured.job, typed)
        paths = [_path(job, configured, typed, length) for job in stages for length in _lengths(typed)]
        refuse_existing(paths, typed)
        writable(paths[0].parent, "result_dir")
        measured = measure([(stages[0], model_marks(configured))], typed)
        if not measured:
            return []
        profile: Profile | None = read_profile(measured[0])
    else:
        profile = read_profile(typed["comp_filepath"]) if "comp_filepath" in typed else None
    if typed.get("pp_rank") == "slowest" and profile is None:
        warn("--pp_rank slowest without a profile: placeholder times only count rows")
    built = prepare(configured, typed, profile)
    pending = [one for one in built if typed.get("force") or not simai.is_written(*one.content)]  # all or nothing
    for warning in dict.fromkeys(warning for one in built for warning in one.times.warnings):  # stages share most
        warn(warning)
    for one in pending:
        simai.write(*one.content, typed.get("force", False))
    return [_summary(one, typed, configured.notes) for one in built]


class Built(NamedTuple):
    """A stage's workload, ready to be written."""

    job: Job
    times: ComputeTimes
    path: Path
    header: dict[str, int]
    iteration: Iteration

    @property
    def content(self) -> tuple[Path, dict[str, int], Iteration, int]:
        """What simai.write and simai.is_written take."""
        return self.path, self.header, self.iteration, self.job.training.epoch_num


def prepare(configured: Configured, typed: Mapping[str, Any], profile: Profile | None) -> list[Built]:
    """Build the workloads that the typed options ask for, without writing them. Raises UserError."""
    lengths = _lengths(typed)
    built = [
        _build(job, configured, typed, profile, length) for job in _stages(configured.job, typed) for length in lengths
    ]
    if typed.get("pp_rank") == "slowest":
        slowest = max(built, key=lambda one: sum(one.iteration.compute_ns())).job
        built = [one for one in built if one.job is slowest]
    return built


def profile_alone(typed: Mapping[str, Any], warn: Callable[[str], None]) -> list[Path]:
    """Profile this machine without writing a workload; return the profiles' paths, none on ranks other than 0."""
    require(_measures(typed), "--profile_only measures this machine: it needs --aiob_enable (or aicb profile) alone")
    wanted = [(configure(one), one) for one in splits(typed)]
    warnings = [text for configured, one in wanted for text in (*configured.warnings, *_check_times(one))]
    for warning in dict.fromkeys(warnings):
        warn(warning)
    return measure([(_stages(one.job, given)[0], model_marks(one)) for one, given in wanted], typed)


def _measures(typed: Mapping[str, Any]) -> bool:
    return bool(typed.get("aiob_enable")) and "comp_filepath" not in typed


def _path(job: Job, configured: Configured, typed: Mapping[str, Any], length: int | None) -> Path:
    gpu = gpu_slug(typed["gpu_type"]) if "gpu_type" in typed else None
    marks = [*model_marks(configured), *job_marks(job)]
    if "comp_filepath" not in typed and not typed.get("aiob_enable"):
        nanoseconds = typed.get("fixed_compute_ns", 1)
        marks.append("fixed_compute" if nanoseconds == 1 else label("fixed_compute_ns", nanoseconds))
    if typed.get("min_comm_bytes"):
        marks.append(label("min_comm_bytes", typed["min_comm_bytes"]))
    if length is not None:
        marks.append(label("micro_batches_written", length))
    return Path(typed.get("result_dir", RESULT_DIR)) / workload_name(job, marks, gpu)


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


def _lengths(typed: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return how many micro-batches of rows each file gets; None: all of the iteration."""
    given = typed.get("micro_batches_written")
    require(given is None or given >= 1, f"--micro_batches_written {given} must be at least 1")
    if not typed.get("short"):
        return (given,)
    require(
        given is None,
        f"--short and --micro_batches_written {given} exclude each other: --short writes "
        f"{SHORT[0]} and {SHORT[1]} micro-batches",
    )
    return SHORT


def _stages(job: Job, typed: Mapping[str, Any]) -> list[Job]:
    pp_rank = typed.get("pp_rank", "0")
    if pp_rank in ("all", "slowest"):
        return [job.at(rank) for rank in range(job.pp)]
    rank = whole_number(pp_rank)
    if rank is None:
        raise UserError(f"--pp_rank {pp_rank} must be the number of a stage, from 0, or all, or slowest")
    return [job.at(rank)]


def _build(
    job: Job, configured: Configured, typed: Mapping[str, Any], profile: Profile | None, length: int | None
) -> Built:
    minimum = typed.get("min_comm_bytes", 0)
    if profile is not None:
        times = profile_times(job, profile, typed.get("allow_profile_mismatch", False))
    else:
        times = fixed_times(job, typed.get("fixed_compute_ns", 1))
    iteration = build(job, times, minimum)
    if length is not None:
        iteration = iteration._replace(micro_batches=length)
    header = simai.header(job, job.training.epoch_num, minimum, length)
    return Built(job, times, _path(job, configured, typed, length), header, iteration)


def _summary(one: Built, typed: Mapping[str, Any], notes: tuple[str, ...]) -> Summary:
    minimum = typed.get("min_comm_bytes", 0)
    if minimum:
        whole = build(one.job, one.times)._replace(micro_batches=one.iteration.micro_batches)
        left_out = whole.collectives() - one.iteration.collectives()
        size = units.size(sum(sent.bytes * count for (_, sent), count in left_out.items()))
        notes += (f"--min_comm_bytes {minimum}: {left_out.total():,} collectives left out, {size} in all",)
    return summarise(one.job, one.times, one.iteration, one.path, notes)
