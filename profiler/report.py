"""From every rank's samples to one profile: sections over all ranks, the origin lines, the raw samples as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aicb import __version__
from aicb.config.job import Job
from aicb.step.kernels import Kernel, kernel_table, slice_of, step_end_elements
from aicb.times.profile import KernelTime, Profile
from profiler.conditions import conditions, some
from profiler.measure import SETTLED_SPREAD, pool
from profiler.results import FORWARD, RankResult, Times, as_json

SUM_TOLERANCE = 0.10
"""How far the sum of a layer's parts may be from the whole layer without a warning."""
_DENSE_ROWS = ("mlp_column", "mlp_row", "mlp_layer")


def profile_of(job: Job, results: Sequence[RankResult], *, path: str, train_iter: int, l2: str, date: str) -> Profile:
    """Return the profile of all ranks' samples: none dropped, max, min and avg over all of them."""
    pooled = _pooled(results)
    origin = {
        "format_version": "2",
        "unit": "us",
        **results[0].facts,
        **results[0].choices,
        "l2": l2,
        **conditions(results, pooled),
        "host": ", ".join(dict.fromkeys(result.host for result in results)),
        "date": date,
        "tool_version": __version__,
        **_ranks(results),
        **results[0].origin,
        **_quality(pooled, train_iter),
        **_sum_check(job, results, pooled),
        **{line: str(elements) for line, elements in step_end_elements(job).items()},
        **{f"note_{name}": note for name, note in results[0].notes.items()},
        **slice_of(job),
    }
    sections = {name: _section(times) for name, times in pooled.items()}
    return Profile(path, train_iter, origin, sections)


def raw_json(profile: Profile, results: Sequence[RankResult]) -> bytes:
    """Return the raw samples (us, in the order taken) of every rank, with the origin of the profile."""
    ranks: list[dict[str, Any]] = [
        {
            "rank": result.rank,
            "host": result.host,
            **result.facts,
            "start": dict(result.start),
            "end": dict(result.end),
            "kernels": {name: as_json(times) for name, times in result.kernels.items()},
            "layer": as_json(result.layer),
        }
        for result in results
    ]
    document = {"train_iter": profile.train_iter, "origin": dict(profile.origin), "ranks": ranks}
    return (json.dumps(document, indent=1) + "\n").encode()


def _pooled(results: Sequence[RankResult]) -> dict[str, Times]:
    return {name: _pool_times([result.kernels[name] for result in results]) for name in results[0].kernels}


def _pool_times(many: Sequence[Times]) -> Times:
    return {what: pool(times[what] for times in many) for what in many[0]}


def _section(times: Times) -> KernelTime:
    forward = times[FORWARD]
    more: dict[str, float] = {}
    for what, samples in times.items():
        if what != FORWARD:
            more |= {f"{what}_avg": samples.avg, f"{what}_min": samples.min, f"{what}_max": samples.max}
        more |= {f"{what}_median": samples.median, f"{what}_p20": samples.p20, f"{what}_p80": samples.p80}
    more["samples"] = len(forward.raw)
    return KernelTime(forward.avg, forward.min, forward.max, more)


def _ranks(results: Sequence[RankResult]) -> dict[str, str]:
    """How many measured, the slowest, how far apart they are."""
    slowest = max(results, key=lambda result: result.total)
    fastest = min(result.total for result in results)
    percent = (slowest.total / fastest - 1) * 100 if fastest > 0 else 0.0
    lines = {
        "ranks_measured": str(len(results)),
        "slowest_rank": f"{slowest.rank} ({slowest.host}), {slowest.total:.1f} us for all kernels",
        "rank_spread_percent": f"{percent:.2f}",
    }
    if len({result.facts["gpu"] for result in results}) > 1:
        named = ", ".join(f"rank {result.rank} {result.facts['gpu']}" for result in results)
        lines["warning_gpus"] = f"the ranks measured different devices: {named}"
    return lines


def _quality(pooled: Mapping[str, Times], train_iter: int) -> dict[str, str]:
    """How many samples each measurement has, what did not settle, what got fewer than asked for."""
    everything = [(f"{name} {what}", samples) for name, times in pooled.items() for what, samples in times.items()]
    counts = [len(samples.raw) for _, samples in everything]
    lines = {"samples_per_measurement": f"{min(counts)} to {max(counts)}", "not_settled": "none"}
    unsettled = [name for name, samples in everything if not samples.settled]
    if unsettled:
        lines["not_settled"] = some(unsettled, len(counts))
        did = f" did not settle within {SETTLED_SPREAD * 100:g} % (IQR / median)"
        lines["warning_not_settled"] = some(unsettled, len(counts), did)
    short = [f"{name} {len(samples.raw)}" for name, samples in everything if len(samples.raw) < train_iter]
    if short:
        got = f" got fewer than {train_iter} samples within the time budget"
        lines["warning_samples"] = some(short, len(counts), got)
    return lines


def experts_in_layer(job: Job) -> bool:
    """Whether the layer of the sum check is a mixture of experts: it is, where the model has any."""
    return job.model.num_experts > 0


def layer_kernels(job: Job) -> Iterator[Kernel]:
    """Return the kernels of the one layer that the sum check measures whole."""
    experts = experts_in_layer(job)
    for kernel in kernel_table(job):
        if any(_in_layer(row, experts) for row in kernel.rows):
            yield kernel


def _in_layer(row: str, experts: bool) -> bool:
    if row.startswith("attention"):
        return True
    return row.startswith(("mlp_moelayer", "mlp_shared")) if experts else row in _DENSE_ROWS


def _sum_check(job: Job, results: Sequence[RankResult], pooled: Mapping[str, Times]) -> dict[str, str]:
    """Sum of the parts' medians over the whole layer's median; a warning beyond SUM_TOLERANCE."""
    key = "sum_of_parts_over_whole"
    if not all(result.layer for result in results):
        why = next(result.layer_note for result in results if not result.layer)
        return {f"{key}_forward": f"not measured: {why}", f"{key}_backward": f"not measured: {why}"}
    whole = _pool_times([result.layer for result in results])
    parts = [pooled[kernel.name] for kernel in layer_kernels(job)]
    ratios = {
        "forward": sum(_forward(times) for times in parts) / _forward(whole),
        "backward": sum(_backward(times) for times in parts) / _backward(whole),
    }
    lines = {f"{key}_{way}": f"{ratio:.3f}" for way, ratio in ratios.items()}
    lines["whole_layer"] = f"forward {_forward(whole):.1f} us, backward {_backward(whole):.1f} us"
    off = [
        f"{ratio:.3f} x the measured layer in {way}" for way, ratio in ratios.items() if abs(ratio - 1) > SUM_TOLERANCE
    ]
    if off:
        said = f"the sum of the kernels is {' and '.join(off)} (more than {SUM_TOLERANCE:.0%} apart)"
        lines["warning_sum_of_parts"] = said
    return lines


def _forward(times: Times) -> float:
    return times[FORWARD].median


def _backward(times: Times) -> float:
    return sum(samples.median for what, samples in times.items() if what != FORWARD)
