"""What a profile says of the device while it measured: clocks, power, heat, what held it back, time over spans."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profiler.measure import Samples
from profiler.results import RankResult, Times

CLOCK_DROP = 0.10
"""How far below the highest clock seen a measurement may run without a warning."""
_NAMED = 3
"""How many measurements an origin line names; the raw samples say it of every one."""


def conditions(results: Sequence[RankResult], pooled: Mapping[str, Times]) -> dict[str, str]:
    """Return origin lines: rank 0 at start and end, all ranks' devices meanwhile; as warnings, what slowed them."""
    first = results[0]
    lines = {f"{what}_start": first.start[what] for what in first.start}
    lines |= {f"{what}_end": first.end[what] for what in first.end}
    measured = [(f"{name} {way}", samples) for name, times in pooled.items() for way, samples in times.items()]
    return lines | _ranges(measured) | _throttled(results, measured) | _slow_clocks(measured) | _spans(measured)


def some(names: Sequence[str], total: int, did: str = "") -> str:
    """How many of all measurements `names` are, what they did, and the first of them."""
    such_as = ", such as" if len(names) > _NAMED else ":"
    return f"{len(names)} of {total} measurements{did}{such_as} {', '.join(names[:_NAMED])}"


Measurements = Sequence[tuple[str, Samples]]


def _values(measured: Measurements, field: str) -> Iterator[Any]:
    for _, samples in measured:
        for reading in samples.readings:
            value = getattr(reading, field)
            if value is not None:
                yield value


def _ranges(measured: Measurements) -> dict[str, str]:
    lines = {}
    for key, field, unit in (
        ("clocks_measuring", "sm_mhz", "MHz (SM)"),
        ("power_measuring", "watts", "W"),
        ("temperature_measuring", "celsius", "C"),
    ):
        values = list(_values(measured, field))
        if values:
            lines[key] = f"{min(values):.0f} to {max(values):.0f} {unit}"
    return lines


def _throttled(results: Sequence[RankResult], measured: Measurements) -> dict[str, str]:
    """What held the clocks back, in which measurements, or at start and end."""
    found: dict[str, list[str]] = {}
    for name, samples in measured:
        for reason in dict.fromkeys(reading.throttle for reading in samples.readings):
            found.setdefault(reason, []).append(name)
    said = [
        some(names, len(measured), f" under {reason}")
        for reason, names in found.items()
        if reason not in ("none", "unknown")
    ]
    said += [
        f"rank {result.rank} {state['throttle']}"
        for result in results
        for state in (result.start, result.end)
        if state["throttle"] not in ("none", "unknown")
    ]
    return {"warning_throttled": "; ".join(dict.fromkeys(said))} if said else {}


def _slow_clocks(measured: Measurements) -> dict[str, str]:
    """Measurements whose median SM clock was far below the highest seen: their times are those of a slower card."""
    highest = max(_values(measured, "sm_mhz"), default=0)
    slow = []
    for name, samples in measured:
        clocks = list(_values([(name, samples)], "sm_mhz"))
        if clocks and statistics.median(clocks) < (1 - CLOCK_DROP) * highest:
            slow.append(name)
    did = f" ran more than {CLOCK_DROP:.0%} below the highest SM clock seen ({highest} MHz)"
    return {"warning_clocks": some(slow, len(measured), did)} if slow else {}


def _spans(measured: Measurements) -> dict[str, str]:
    """Time between two marks over the sum of the kernels between them: above 1 where the device waits for the host."""
    totals = {name: (samples.median, sum(us for _, us in samples.spans)) for name, samples in measured}
    ratios = {name: median / total for name, (median, total) in totals.items() if total}
    if not ratios:
        return {}
    largest = max(ratios, key=lambda name: ratios[name])
    said = f"median {statistics.median(ratios.values()):.3f}, largest {ratios[largest]:.3f} ({largest})"
    return {"time_over_spans": said}
