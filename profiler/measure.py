"""The one measuring function: warm up, queue a batch of timed calls, read the clocks once, until the spread settles.

After triton's `do_bench` and NVIDIA's nvbench: a pair of marks around each call, a cold cache and a full queue before
it, and no synchronisation between the calls of a batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from profiler.telemetry import Reading

COLD, HOT = "cold", "hot"
MIN_SAMPLES = 3
MAX_SAMPLES = 2000
WARM_UP_S = 0.025
SETTLED_SPREAD = 0.01
"""IQR / median at or under which a measurement counts as settled."""
SUSTAINED_BATCH_S = 0.05
"""How much work is queued at a time to load the device before the samples count."""
_LEAD_FACTOR, _LEAD_EXTRA_S, _LEAD_MOST_S = 2.0, 20e-6, 5e-3


class Timer(Protocol):
    """What measuring asks of a device (profiler.device; a fake in tests)."""

    def now(self) -> float:
        """The host's clock, s."""

    def mark(self) -> Any:
        """Note the time at this place of the queue, without waiting."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time between two marks, us; only after synchronize."""

    def spin(self, seconds: float) -> None:
        """Keep the device busy that long, so that the host runs ahead; nothing where calls are not queued."""

    def flush(self) -> None:
        """Put the last-level cache's content out by writing a buffer of at least its size."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of one call, us, in the order in which they were taken; none dropped."""

    raw: tuple[float, ...]
    settled: bool
    """Whether the spread settled before the time cap."""
    readings: tuple[Reading, ...] = ()
    """The device meanwhile, about every 100 ms."""
    spans: tuple[tuple[str, float], ...] = ()
    """The device's kernels in one further call, by name, and the time of each, us; empty where they are unknown."""

    @property
    def avg(self) -> float:
        """Mean, us."""
        return statistics.fmean(self.raw)

    @property
    def min(self) -> float:
        """Shortest, us."""
        return min(self.raw)

    @property
    def max(self) -> float:
        """Longest, us."""
        return max(self.raw)

    @property
    def median(self) -> float:
        """Median, us."""
        return statistics.median(self.raw)

    @property
    def p20(self) -> float:
        """20th percentile, us."""
        return statistics.quantiles(self.raw, n=5, method="inclusive")[0]

    @property
    def p80(self) -> float:
        """80th percentile, us."""
        return statistics.quantiles(self.raw, n=5, method="inclusive")[3]

    def scaled(self, factor: float) -> Samples:
        """The same times multiplied by `factor` (a part was measured for the whole)."""
        if factor == 1:
            return self
        spans = tuple((name, factor * us) for name, us in self.spans)
        return replace(self, raw=tuple(factor * time for time in self.raw), spans=spans)


def pool(many: Iterable[Samples]) -> Samples:
    """All samples of several ranks as one; settled where each rank's own were. Spans are those of the first."""
    ranks = list(many)
    return Samples(
        tuple(time for rank in ranks for time in rank.raw),
        all(rank.settled for rank in ranks),
        tuple(reading for rank in ranks for reading in rank.readings),
        ranks[0].spans,
    )


def spread(raw: Iterable[float]) -> float:
    """IQR / median, of at least two samples."""
    low, middle, high = statistics.quantiles(raw, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def measure(
    call: Callable[[], object],
    device: Timer,
    *,
    samples: int,
    cap_s: float,
    l2: str = COLD,
    least: int = MIN_SAMPLES,
    min_s: float = 0.0,
    sustained_s: float = 0.0,
) -> Samples:
    """Time `call` on `device`: `samples` times and for `min_s`, and on until IQR / median <= 1 % or an end is reached.

    An end: `cap_s`, or MAX_SAMPLES. `cap_s` covers the warm-up: at least 3 calls, and 25 ms or half of a shorter cap.
    Where it is short, fewer than `samples` come out, but never fewer than `least` or 3. Before all that, the device is
    kept under the load of `call` for `sustained_s`, without a pause.
    """
    _sustain(call, device, sustained_s)
    start = device.now()
    lead_s, each_s = _warm_up(call, device, l2, min(WARM_UP_S, cap_s / 2))
    sampling = device.now()
    raw: list[float] = []
    while True:
        left_s = cap_s - (device.now() - start)
        affordable = int(left_s / each_s) if each_s > 0 else MAX_SAMPLES
        wanted = min(max(samples, len(raw)), max(MAX_SAMPLES, samples) - len(raw))
        count = max(max(least, MIN_SAMPLES) - len(raw), min(wanted, affordable))
        if count < 1:
            return Samples(tuple(raw), settled=False)
        began = device.now()
        raw += _batch(call, device, count, lead_s, l2)
        each_s = (device.now() - began) / count
        long_enough = device.now() - sampling >= min_s or len(raw) >= MAX_SAMPLES
        if len(raw) >= samples and long_enough and spread(raw) <= SETTLED_SPREAD:
            return Samples(tuple(raw), settled=True)


def _sustain(call: Callable[[], object], device: Timer, seconds: float) -> None:
    """Queue `call` again and again, in batches of SUSTAINED_BATCH_S; nothing for 0 s."""
    ends, count = device.now() + seconds, 1
    while device.now() < ends:
        began = device.now()
        for _ in range(count):
            call()
        device.synchronize()
        took = max(device.now() - began, 1e-6)
        count = max(1, min(round(count * SUSTAINED_BATCH_S / took), 100_000))


def _warm_up(call: Callable[[], object], device: Timer, l2: str, seconds: float) -> tuple[float, float]:
    """Return how long the device must be kept busy for the host to queue one call, and how long one takes in all, s.

    Each call is waited for: the host could otherwise queue minutes of work in `seconds`.
    """
    start, calls = device.now(), 0
    queue_s = whole_s = float("inf")
    while calls < MIN_SAMPLES or device.now() - start < seconds:
        began = device.now()
        if l2 == COLD:
            device.flush()
        before = device.now()
        call()
        queued = device.now()
        device.synchronize()
        queue_s, whole_s = min(queue_s, queued - before), min(whole_s, device.now() - began)
        calls += 1
    return min(_LEAD_FACTOR * queue_s + _LEAD_EXTRA_S, _LEAD_MOST_S), whole_s


def _batch(call: Callable[[], object], device: Timer, count: int, lead_s: float, l2: str) -> list[float]:
    """Queue `count` timed calls and wait for them all at the end."""
    marks = []
    for _ in range(count):
        device.spin(lead_s)  # the host queues all of the below meanwhile: no launch latency between the marks
        if l2 == COLD:
            device.flush()
        start = device.mark()
        call()
        marks.append((start, device.mark()))
    device.synchronize()
    return [device.elapsed_us(start, end) for start, end in marks]


class Budget:
    """Shares out the seconds of `--time_budget`, or the default cap, over the measurements still to come."""

    def __init__(self, total_s: float | None, parts: int, each_s: float, now: Callable[[], float]) -> None:
        """`parts` measurements of `each_s` at the most; in `total_s` altogether from now on."""
        self._ends = None if total_s is None else now() + total_s
        self._parts, self._each_s, self._now = parts, each_s, now

    def next_cap(self) -> float:
        """Seconds that the next measurement may take: what earlier ones left is shared by the later ones."""
        parts, self._parts = self._parts, self._parts - 1
        if self._ends is None:
            return self._each_s
        return min(self._each_s, max(self._ends - self._now(), 0.0) / max(parts, 1))
