"""A device whose every duration the test decides, and processes started as torchrun starts them."""

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class FakeDevice:
    """A queue with a clock: each call takes the next of `durations_us`; the host's clock moves when it waits."""

    def __init__(
        self, durations_us: Iterator[float] | tuple[()] = (), flush_s: float = 0.0, queue_s: float = 0.0
    ) -> None:
        self.durations_us = iter(durations_us)
        self.flush_s, self.queue_s = flush_s, queue_s
        self.host_s = self.device_s = 0.0
        self.log: list[str] = []
        self.spins: list[float] = []
        self.calls = 0

    def now(self) -> float:
        return self.host_s

    def call(self) -> None:
        self.log.append("call")
        self.calls += 1
        self.host_s += self.queue_s
        self.work(next(self.durations_us))

    def work(self, us: float) -> None:
        self._queue(us / 1e6)

    def mark(self) -> float:
        self.log.append("mark")
        return self.device_s

    def elapsed_us(self, start: float, end: float) -> float:
        assert self.log[-1] == "sync", "read before the queue was waited for"
        return (end - start) * 1e6

    def spin(self, seconds: float) -> None:
        self.log.append("spin")
        self.spins.append(seconds)

    def flush(self) -> None:
        self.log.append("flush")
        self._queue(self.flush_s)

    def synchronize(self) -> None:
        self.log.append("sync")
        self.host_s = max(self.host_s, self.device_s)

    def _queue(self, seconds: float) -> None:
        self.device_s = max(self.device_s, self.host_s) + seconds


def processes(code: str, size: int) -> list[subprocess.Popen[str]]:
    """Run `code` in each of `size` processes, as torchrun would; a UserError is printed, exit code 2."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = textwrap.indent(textwrap.dedent(code), " " * 4)
    whole = (
        f"from aicb.errors import UserError\ncode = 0\ntry:\n{body}\n"
        "except UserError as error:\n    print('error:', error)\n    code = 2\nraise SystemExit(code)\n"
    )
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", whole],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(running: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    try:
        out = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, text) for process, text in zip(running, out, strict=True)]
