"""What measuring gives: the times of a kernel, all of one rank, and their one form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profiler.measure import Samples
from profiler.telemetry import Reading

FORWARD, INPUT_GRAD, WEIGHT_GRAD = "forward", "input_grad", "weight_grad"

Times = Mapping[str, Samples]
"""`forward`, `input_grad`, `weight_grad`: as many as the kernel has."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel, measured."""

    times: Times
    note: str = ""
    """What its builder had to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank measured, all that the others need of it."""

    rank: int
    host: str
    facts: Mapping[str, str]
    """gpu, gpu_memory_gib, driver, cuda, torch."""
    start: Mapping[str, str]
    """clocks, power, temperature, throttle after the burn-in."""
    end: Mapping[str, str]
    """The same after the last kernel."""
    choices: Mapping[str, str]
    """Origin lines: what ran for attention, norms, ... and why."""
    notes: Mapping[str, str]
    """Kernel to what its builder had to say."""
    kernels: Mapping[str, Times]
    layer: Times
    """One whole transformer layer; empty where it was not measured."""
    layer_note: str = ""
    """Why it was not."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Further origin lines: what came from an earlier try or another profile of this run."""

    @property
    def total(self) -> float:
        """Sum of the medians of everything measured kernel by kernel, us."""
        return sum(samples.median for times in self.kernels.values() for samples in times.values())


def as_json(times: Times) -> dict[str, Any]:
    """Return times as JSON holds them: us in the order taken, what the card did meanwhile, which kernels ran."""
    return {
        way: {
            "settled": samples.settled,
            "us": [round(time, 4) for time in samples.raw],
            **({"readings": [reading._asdict() for reading in samples.readings]} if samples.readings else {}),
            **({"spans": [[name, round(us, 4)] for name, us in samples.spans]} if samples.spans else {}),
        }
        for way, samples in times.items()
    }


def from_json(document: Mapping[str, Any]) -> dict[str, Samples]:
    """Read what as_json returned. Raises ValueError, KeyError, TypeError where it is something else."""
    return {way: _samples(values) for way, values in document.items()}


def _samples(values: Mapping[str, Any]) -> Samples:
    raw = tuple(float(time) for time in values["us"])
    if len(raw) < 2 or not all(0 <= time < float("inf") for time in raw):
        raise ValueError("times that are no times")
    readings = tuple(Reading(**reading) for reading in values.get("readings", ()))
    spans = tuple((str(name), float(us)) for name, us in values.get("spans", ()))
    return Samples(raw, bool(values["settled"]), readings, spans)
