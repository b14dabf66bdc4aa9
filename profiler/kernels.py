"""Measures one job on one rank's device, kernel by kernel and then one whole layer; each kernel is kept as it comes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aicb import __version__
from aicb.config.job import Job
from aicb.step.kernels import GEMM, INPUT, NONE, STEP_END, WEIGHT, Kernel, kernel_table, slice_of, step_end_elements
from profiler.builders import Built, build
from profiler.device import Device
from profiler.footprint import kernel_bytes, layer_bytes
from profiler.implementations import Choices, choose
from profiler.interrupts import heeded
from profiler.layer import build_layer
from profiler.measure import MIN_SAMPLES, Budget, Samples, measure
from profiler.memory import GIB, check_memory, device_errors, first_line, is_out_of_memory
from profiler.partial import Partial
from profiler.progress import Step, progress
from profiler.ranks import Ranks, host
from profiler.results import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Measured, RankResult
from profiler.settings import Settings

CAP_S = 0.3
"""How long one measurement may wait for its spread to settle, or three times what it must last."""
WAYS = {GEMM: (INPUT_GRAD, WEIGHT_GRAD), INPUT: (INPUT_GRAD,), WEIGHT: (WEIGHT_GRAD,), NONE: ()}
LAYER = "whole layer"
_BURN_IN_SHARE = 0.1


class Known(NamedTuple):
    """A kernel that this run has measured, and for which profile."""

    profile: str
    kernel: str
    measured: Measured


@dataclass(slots=True)
class Bench:
    """What measures: the device, how, and what this run knows already, by what decides a kernel's time."""

    device: Device
    settings: Settings
    ranks: Ranks
    known: dict[tuple[Any, ...], Known] = field(default_factory=dict)

    @property
    def min_s(self) -> float:
        """Seconds that each measurement samples at least; a time budget shares out what there is."""
        if self.settings.time_budget:
            return 0.0
        return self.device.min_time_s if self.settings.min_time is None else self.settings.min_time


@dataclass(slots=True)
class _Task:
    """One job on the bench."""

    job: Job
    bench: Bench
    choices: Choices
    budget: Budget
    profile: str


def choose_and_check(job: Job, bench: Bench) -> Choices:
    """Choose what runs for `job`. Raises UserError when nothing does, or a kernel does not fit into memory."""
    where = bench.device.torch_device
    choices = choose(job, where, bench.settings)
    alone = [kernel for kernel in kernel_table(job) if kernel.name not in STEP_END]  # whose builders take what there is
    check_memory({kernel.name: kernel_bytes(kernel, job, where, choices) for kernel in alone}, bench.device)
    return choices


def measure_job(job: Job, choices: Choices, bench: Bench, part: Partial, profile: str) -> RankResult:
    """Measure what `part` and the bench do not know of the kernels of `job`, then one whole layer, for `profile`."""
    device, settings, table = bench.device, bench.settings, kernel_table(job)
    chosen = origin_of(choices, table)
    earlier = part.open(_header(job, bench, chosen), len(table), settings.resume)
    for kernel in table:
        if kernel.name in earlier:
            bench.known.setdefault(_key(job, kernel), Known(profile, kernel.name, earlier[kernel.name]))
    gc.freeze()  # what is loaded by now stays: collecting after each kernel would walk all of torch
    fresh = {_key(job, kernel): kernel for kernel in table if _key(job, kernel) not in bench.known}
    parts = sum(1 + len(WAYS[kernel.gradients]) for kernel in fresh.values()) + 2  # the layer: forward and backward
    budget = Budget(settings.time_budget, parts, max(CAP_S, 3 * bench.min_s), device.now)
    device.burn_in(min(device.burn_in_s, _BURN_IN_SHARE * (settings.time_budget or float("inf"))))
    start, held_back = device.telemetry(), device.violations_s()
    task = _Task(job, bench, choices, budget, profile)
    shown = settings.show_progress and bench.ranks.rank == 0
    with heeded() as check, progress(len(table) + 1, shown) as show:

        def step(name: str) -> None:
            check()
            show(name)

        found, once = _kernels(task, table, earlier, part, step)
        step(LAYER)
        layer, why = _layer(task)
        check()
    return RankResult(
        rank=bench.ranks.rank,
        host=host(),
        facts=device.facts(),
        start=start,
        end=device.telemetry(),
        choices=chosen,
        notes={name: one.note for name, one in found.items() if one.note},
        kernels={name: one.times for name, one in found.items()},
        layer=layer,
        layer_note=why,
        origin=_history(earlier, once, held_back, device.violations_s()),
    )


def _kernels(
    task: _Task, table: tuple[Kernel, ...], earlier: Mapping[str, Measured], part: Partial, step: Step
) -> tuple[dict[str, Measured], list[str]]:
    """Return every kernel's times, each shape measured once; and which kernels have those of another."""
    found: dict[str, Measured] = {}
    once = []
    for kernel in table:
        step(kernel.name)
        key, known = _key(task.job, kernel), task.bench.known
        if kernel.name in earlier:
            found[kernel.name] = earlier[kernel.name]
            continue
        if key in known:
            of = f" of {known[key].profile}" if known[key].profile != task.profile else ""
            once.append(f"{kernel.name} as {known[key].kernel}{of}")
        else:
            known[key] = Known(task.profile, kernel.name, _measured(kernel, task))
        found[kernel.name] = known[key].measured
        part.add(kernel.name, found[kernel.name])
    return found, once


def _header(job: Job, bench: Bench, chosen: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What must agree for kernels of two tries to be parts of one profile."""
    return {
        "slice": {**slice_of(job), **{line: str(elements) for line, elements in step_end_elements(job).items()}},
        "device": dict(bench.device.facts()),
        "software": {**chosen, "tool_version": __version__},
        "measuring": {**bench.settings.sampling(), "ranks": str(bench.ranks.size), "rank": str(bench.ranks.rank)},
    }


def _key(job: Job, kernel: Kernel) -> tuple[Any, ...]:
    """What decides a kernel's time in one run: its shape, and whence the rows of a permutation come."""
    sources = (job.tp * job.ep, job.model.num_experts // job.ep) if kernel.shape.get("sorted") else ()
    return (kernel.op, tuple(sorted(kernel.shape.items())), kernel.gradients, *sources)


def _history(
    earlier: Mapping[str, Measured], once: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, str]:
    """Origin lines: which kernels an earlier try measured, which have the times of another, how long limits held."""
    lines = {}
    if earlier:
        lines["resumed"] = f"{len(earlier)} kernels are an earlier try's: {', '.join(earlier)}"
    if once:
        lines["measured_once"] = ", ".join(once)
    held = {name: after[name] - before.get(name, 0.0) for name in after}
    if held:
        lines["held_back"] = ", ".join(f"by {name} {seconds:.2f} s" for name, seconds in held.items())
    return lines


def _measured(kernel: Kernel, task: _Task) -> Measured:
    """Build one kernel, time it, see which of the device's kernels it runs, and give its memory back."""
    device = task.bench.device
    with device_errors(kernel.name, device):
        built = build(kernel, task.job, device.torch_device, task.choices, device.free_bytes())
        times = _times(built, WAYS[kernel.gradients], task)
        calls = _calls(built)
        times = {way: replace(one, spans=_spans(calls[way], device)).scaled(built.scale) for way, one in times.items()}
    note = " ".join(built.note.split())
    del built, calls
    device.release()
    return Measured(times, note)


def _calls(built: Built) -> dict[str, Callable[[], object] | None]:
    return {FORWARD: built.forward, INPUT_GRAD: built.input_grad, WEIGHT_GRAD: built.weight_grad}


def _spans(call: Callable[[], object] | None, device: Device) -> tuple[tuple[str, float], ...]:
    """Nothing where the device cannot tell: the times stand without it."""
    try:
        return tuple(device.spans(call)) if call is not None else ()
    except (RuntimeError, ImportError, AttributeError):
        return ()


def _times(built: Built, ways: tuple[str, ...], task: _Task) -> dict[str, Samples]:
    """Time the forward call of `built`, then its gradients `ways`."""
    calls, settings, device, times = _calls(built), task.bench.settings, task.bench.device, {}
    for way in (FORWARD, *ways):
        call = calls[way]
        if call is None:
            raise TypeError(f"the builder gave no {way} to measure: {built.note}")
        with device.watch() as readings:
            samples = measure(
                call,
                device,
                samples=max(settings.train_iter, MIN_SAMPLES),
                cap_s=task.budget.next_cap(),
                l2=settings.l2,
                least=MIN_SAMPLES if settings.time_budget else settings.train_iter,
                min_s=task.bench.min_s,
                sustained_s=settings.sustained,
            )
        times[way] = replace(samples, readings=tuple(readings))
    return times


def _layer(task: _Task) -> tuple[dict[str, Samples], str]:
    """Time one whole layer for the sum check; nothing and the reason where it does not fit into memory."""
    device, index = task.bench.device, _layer_index(task.job)
    needed, free = layer_bytes(task.job, device.torch_device, task.choices, index), device.free_bytes()
    if needed > free:
        return {}, f"one layer needs up to {needed / GIB:.1f} GiB of {free / GIB:.1f} GiB free"
    try:
        return _layer_times(task), ""
    except RuntimeError as error:  # the check may fail; what was measured before it must not be lost
        why = f"{LAYER}: {'ran out of memory: ' if is_out_of_memory(error) else ''}{first_line(error)}"
    device.release()  # not in the handler, whose traceback holds the layer
    return {}, why


def _layer_index(job: Job) -> int:
    """The first layer with experts, where there are any."""
    return job.model.moe_layer_freq.index(1) if job.model.num_experts else 0


def _layer_times(task: _Task) -> dict[str, Samples]:
    device = task.bench.device
    built = build_layer(task.job, device.torch_device, task.choices, _layer_index(task.job))
    ways = tuple(way for way, call in _calls(built).items() if call is not None and way != FORWARD)
    times = _times(built, ways, task)
    del built
    device.release()
    return times


def origin_of(choices: Choices, table: Iterable[Kernel]) -> dict[str, str]:
    """Return the origin lines of what runs for each kind of kernel that has a choice, and why."""
    parts = {"attention": choices.attention, "norm": choices.norm, "weight_grad": choices.weight_grad}
    parts |= {"elementwise_fusion": choices.elementwise, "optimizer": choices.optimizer}
    if any(kernel.op == "grouped_gemm" for kernel in table):
        parts["grouped_gemm"] = choices.grouped_gemm
    lines: dict[str, str] = {}
    for part, choice in parts.items():
        lines |= {f"{part}_implementation": choice.name, f"{part}_reason": " ".join(choice.reason.split())}
    return lines
