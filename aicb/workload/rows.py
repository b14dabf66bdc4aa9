"""One iteration of one pipeline stage as rows: the steps of collectives.py with the times of their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from aicb.config.job import Job
from aicb.step import collectives
from aicb.step.collectives import Collective, Step
from aicb.step.kernels import Kernel
from aicb.times.compute import ComputeTimes, Nanoseconds


class Row(NamedTuple):
    """One line of the workload: compute (ns) and collective of forward, input gradient and weight gradient."""

    name: str
    time: Nanoseconds
    fwd: Collective | None
    ig: Collective | None
    wg: Collective | None


class Iteration(NamedTuple):
    """One training iteration of one stage: `start`, then `micro_batches` times `micro_batch`, then `end`."""

    start: tuple[Row, ...]
    micro_batch: tuple[Row, ...]
    end: tuple[Row, ...]
    micro_batches: int

    @property
    def rows(self) -> int:
        """Rows of the whole iteration."""
        return len(self.start) + self.micro_batches * len(self.micro_batch) + len(self.end)

    def counted(self) -> Iterator[tuple[Row, int]]:
        """Yield each row and how often it occurs in the iteration."""
        for row in (*self.start, *self.end):
            yield row, 1
        for row in self.micro_batch:
            yield row, self.micro_batches

    def compute_ns(self) -> Nanoseconds:
        """Sum the compute time of each column, ns."""
        totals = [sum(row.time[i] * count for row, count in self.counted()) for i in range(3)]
        return Nanoseconds(*totals)

    def collectives(self) -> Counter[tuple[str, Collective]]:
        """Count each (column, collective) of the iteration."""
        found: Counter[tuple[str, Collective]] = Counter()
        for row, count in self.counted():
            for column in ("fwd", "ig", "wg"):
                sent: Collective | None = getattr(row, column)
                if sent:
                    found[column, sent] += count
        return found


class _Builder:
    """Turns steps into rows, for one job and one source of times."""

    def __init__(self, job: Job, times: ComputeTimes, min_comm_bytes: int) -> None:
        self.recompute = job.training.recompute_granularity
        self.times = times
        self.min_comm_bytes = min_comm_bytes
        self.kernels: dict[str, list[Kernel]] = {}
        for kernel in times.table:
            for key in kernel.rows:
                self.kernels.setdefault(key, []).append(kernel)

    def _kept(self, sent: Collective | None) -> Collective | None:
        return sent if sent and sent.bytes >= self.min_comm_bytes else None

    def row(self, step: Step, again: int = 0) -> Row | None:
        """Build the row of `step`, with `again` ns recomputed in ig; None when it computes and sends nothing."""
        fwd, ig, wg = (self._kept(sent) for sent in (step.fwd, step.ig, step.wg))
        time = self.times.of(self.kernels.get(step.key, ()))
        if not (fwd or ig or wg or step.key in self.kernels):
            return None
        return Row(step.row, time._replace(ig=time.ig + again), fwd, ig, wg)

    def rows(self, steps: tuple[Step, ...]) -> list[Row]:
        """Build the rows of steps that are not recomputed."""
        return [row for step in steps if (row := self.row(step))]

    def layer(self, steps: tuple[Step, ...]) -> list[Row]:
        """Build the rows of one layer; recompute is part of backward, so forward never changes."""
        rows: list[Row | None] = []
        for step in steps:
            kernels = self.kernels.get(step.key, [])
            if self.recompute == "selective" and self.times.fixed is None:  # a placeholder stands for the whole cell
                rows.append(self.row(step, self.times.of(k for k in kernels if k.core_attention).fwd))
                continue
            rows.append(self.row(step))
            if self.recompute == "full":
                sent = self._kept(step.recomputed or step.fwd)
                if sent or kernels:
                    time = Nanoseconds(ig=self.times.of(kernels).fwd)
                    rows.append(Row(f"{step.row}_recompute", time, None, sent, None))
        return [row for row in rows if row]


def build(job: Job, times: ComputeTimes, min_comm_bytes: int = 0) -> Iteration:
    """Build one iteration of the stage of `job`; collectives under `min_comm_bytes` bytes are left out."""
    builder = _Builder(job, times, min_comm_bytes)
    steps = collectives.stage(job)
    layers = {kind: builder.layer(layer) for kind, layer in steps.layers.items()}
    micro_batch = builder.rows(steps.embedding)
    for layer in job.layers:
        micro_batch += layers[job.model.has_experts(layer)]
    micro_batch += builder.rows(steps.head)
    start, end = builder.rows(steps.start), builder.rows(steps.end)
    return Iteration(tuple(start), tuple(micro_batch), tuple(end), job.ga)
