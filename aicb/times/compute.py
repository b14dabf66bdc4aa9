"""Where compute times come from: a compute profile, or a fixed placeholder; in whole nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from aicb import units
from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.step.collectives import stage
from aicb.step.kernels import (
    EMBEDDING,
    FLASH,
    GEMM,
    HEAD,
    INPUT,
    NONE,
    STEP_END,
    UNFUSED,
    WEIGHT,
    Kernel,
    kernel_table,
    slice_of,
    step_end_elements,
)
from aicb.times.profile import KernelTime, Profile, mismatches

NS_PER_US = 1000
UNCHECKED = "the profile does not say which model and split it was measured for: used unchecked"


class Nanoseconds(NamedTuple):
    """Compute time of a kernel or a row in its three columns, ns."""

    fwd: int = 0
    ig: int = 0
    wg: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """The kernels of a job and their times."""

    table: tuple[Kernel, ...]
    source: str
    """One phrase for the summary: which file and GPU, or which placeholder."""
    gradients: str
    """measured, estimated (and how, and for which kernels), or fixed."""
    fixed: int | None = None
    """Placeholder of every row's column that has compute, ns; None with a profile."""
    kernels: Mapping[str, Nanoseconds] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, kernels: Iterable[Kernel]) -> Nanoseconds:
        """Sum the times of one row's kernels."""
        if self.fixed is None:
            times = [self.kernels[kernel.name] for kernel in kernels if kernel.name in self.kernels]
            return Nanoseconds(sum(t.fwd for t in times), sum(t.ig for t in times), sum(t.wg for t in times))
        kinds = {kernel.gradients for kernel in kernels}
        if not kinds:
            return Nanoseconds()
        placeholder = Nanoseconds(self.fixed, self.fixed, self.fixed)
        if kinds == {NONE}:
            return placeholder._replace(fwd=0, wg=0)  # the optimizer's one column is ig
        return placeholder._replace(
            ig=self.fixed if kinds & {GEMM, INPUT} else 0, wg=self.fixed if kinds & {GEMM, WEIGHT} else 0
        )


def fixed_times(job: Job, ns: int) -> ComputeTimes:
    """Return the placeholder: `ns` in every column of a row that has compute there."""
    require(ns >= 0, f"--fixed_compute_ns {ns} must not be negative")
    return ComputeTimes(
        table=kernel_table(job),
        source=f"placeholder of {ns} ns a row (--fixed_compute_ns)",
        gradients="fixed",
        fixed=ns,
    )


def profile_times(job: Job, profile: Profile, allow_mismatch: bool = False) -> ComputeTimes:
    """Return the times of `job`'s kernels from `profile`.

    Raises UserError when the profile states another slice (unless `allow_mismatch`) or lacks a kernel that runs on this
    stage.
    """
    warnings = [f"{profile.path}: {text}" for key, text in profile.origin.items() if key.startswith("warning_")]
    warnings += _check_slice(job, profile, allow_mismatch)
    table, form = _attention_form(job, profile)
    warnings += form
    _require_sections(job, profile, table)
    warnings += _unused(profile, table)
    by_name = {kernel.name: kernel for kernel in table}
    kernels = {
        name: _kernel_time(by_name[name], section) for name, section in profile.sections.items() if name in by_name
    }
    warnings += _scale_step_end(job, profile, kernels)
    warnings += _scale_routed(job, table, kernels)
    gpu = profile.origin.get("gpu")
    return ComputeTimes(
        table=table,
        source=f"{profile.path} (measured on {gpu})" if gpu else f"{profile.path} (GPU unknown: the file does not say)",
        gradients=_gradients(profile, table),
        kernels=kernels,
        warnings=tuple(warnings),
        notes=() if "hidden_size" in profile.origin else (UNCHECKED,),
    )


def _check_slice(job: Job, profile: Profile, allow: bool) -> list[str]:
    differing = mismatches(profile, slice_of(job))
    if not differing:
        return []
    message = f"{profile.path} was measured for another slice: {'; '.join(differing)}"
    if not allow:
        raise UserError(f"{message}; profile this one, or pass --allow-profile-mismatch to use it all the same")
    return [message]


def _attention_form(job: Job, profile: Profile) -> tuple[tuple[Kernel, ...], list[str]]:
    """The kernel table with the form of core attention that the profile holds, and a warning if it is the other."""
    asked, other = (FLASH, UNFUSED) if job.training.use_flash_attn else (UNFUSED, FLASH)
    if all(name in profile.sections for name in asked) or not all(name in profile.sections for name in other):
        return kernel_table(job), []
    # Only the names of the table change; float32 has no flash kernel, yet a profile may hold one.
    dtype = job.training.dtype if asked == FLASH or job.training.dtype != "float32" else "bfloat16"
    training = replace(job.training, use_flash_attn=asked != FLASH, dtype=dtype)
    switch = "--use_flash_attn" if asked == FLASH else "--no-use_flash_attn"
    held = f"{profile.path} holds {', '.join(other)} and not {', '.join(asked)}"
    return kernel_table(replace(job, training=training)), [f"{held}: used in their place ({switch} is in force)"]


def _require_sections(job: Job, profile: Profile, table: tuple[Kernel, ...]) -> None:
    rows = stage(job).keys()
    missing = [
        kernel.name
        for kernel in table
        if kernel.required
        and (kernel.name == EMBEDDING or rows & set(kernel.rows))
        and kernel.name not in profile.sections
    ]
    if missing:
        hint = ""
        if any(name.startswith(("moe_", "dense_", "mlp_shared")) for name in missing):
            hint = ": it is not the profile of a model with these experts"
        elif missing[0] in HEAD:
            hint = ": they run on the last stage"
        raise UserError(
            f"{profile.path}: no section {', '.join(missing)}{hint}; {job.model.name} needs "
            f"{'it' if len(missing) == 1 else 'them'} on stage {job.pp_rank}"
        )


def _unused(profile: Profile, table: tuple[Kernel, ...]) -> list[str]:
    """Every measured section is used or named."""
    names = {kernel.name for kernel in table}
    unknown = [name for name in profile.sections if name not in names]
    return [f"{profile.path}: not used by this model: {', '.join(unknown)}"] if unknown else []


def unused_on_stage(job: Job, times: ComputeTimes) -> list[str]:
    """Measured kernels of the model that run on other stages only."""
    rows = stage(job).keys()
    return [kernel.name for kernel in times.table if kernel.name in times.kernels and not rows & set(kernel.rows)]


def _ns(microseconds: float) -> int:
    require(microseconds < 1e15, f"a time of {microseconds:g} us in the profile: no kernel takes 30 years")
    return round(microseconds * NS_PER_US)


def _kernel_time(kernel: Kernel, section: KernelTime) -> Nanoseconds:
    """Forward as measured (the median, where the file has it); gradients likewise, or estimated where it has none.

    Estimate: a GEMM's input and weight gradient cost what its forward does; the backward of other kernels costs twice
    the forward (attention, norms, activations: 2 to 2.5), all of it input gradient; the embedding's is weight gradient.
    """
    forward = _ns(section.forward)
    ig, wg = section.input_grad, section.weight_grad
    if kernel.gradients == NONE:
        return Nanoseconds(ig=forward)  # the optimizer's one column is ig
    estimate = {
        GEMM: Nanoseconds(forward, forward, forward),
        INPUT: Nanoseconds(forward, 2 * forward, 0),
        WEIGHT: Nanoseconds(forward, 0, forward),
    }[kernel.gradients]
    return Nanoseconds(forward, estimate.ig if ig is None else _ns(ig), estimate.wg if wg is None else _ns(wg))


def _gradients(profile: Profile, table: tuple[Kernel, ...]) -> str:
    """Say how the gradients of the profile's kernels came about."""
    used = [kernel for kernel in table if kernel.name in profile.sections and kernel.gradients != NONE]
    estimated = []
    for kernel in used:
        section = profile.sections[kernel.name]
        lacks_ig = kernel.gradients in (GEMM, INPUT) and section.input_grad is None
        lacks_wg = kernel.gradients in (GEMM, WEIGHT) and section.weight_grad is None
        if lacks_ig or lacks_wg:
            estimated.append(kernel.name)
    if not estimated:
        return "measured"
    rule = "GEMM, embedding: as forward; other kernels: 2 x forward"
    if len(estimated) == len(used):
        return f"estimated ({rule})"
    return f"measured, but for {', '.join(estimated)} estimated ({rule})"


def _scale_step_end(job: Job, profile: Profile, kernels: dict[str, Nanoseconds]) -> list[str]:
    """What runs once a step is bound by memory: its time goes with the elements of the rank's share."""
    elements, said = step_end_elements(job), []
    for name, line in STEP_END.items():
        stated, wanted = units.whole_number(profile.origin.get(line, "")), elements[line]
        if name in kernels and stated and stated != wanted:
            kernels[name] = Nanoseconds(ig=round(kernels[name].ig * wanted / stated))
            said.append(f"{name} scaled from the {stated:,} parameters it was measured on to this rank's {wanted:,}")
    return said


def _scale_routed(job: Job, table: tuple[Kernel, ...], kernels: dict[str, Nanoseconds]) -> list[str]:
    """Profiles are measured under uniform routing; the busiest rank has more tokens."""
    skew = job.training.moe_load_imbalance
    if skew == 1:
        return []
    routed = [kernel.name for kernel in table if kernel.routed and kernel.name in kernels]
    for name in routed:
        kernels[name] = Nanoseconds(*(round(time * skew) for time in kernels[name]))
    return [f"{', '.join(routed)} scaled by --moe_load_imbalance {skew:g} (measured under uniform routing)"]
