"""The ranks that measure, as torchrun starts them: all succeed or all fail, and everyone's results come together.

torchrun's variables decide only who measures; the simulated cluster is `--world_size`'s business. gloo carries the
exchange, so it needs no NCCL. Without torchrun there is one rank and no process group.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from aicb.errors import UserError, require

T = TypeVar("T")
TIMEOUT_S = 1800.0
"""How long a rank waits for a slower one; one that dies is noticed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among those that measure."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this host."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Ranks:
        """Read torchrun's variables. Raises UserError where they are incomplete or no numbers."""
        if "RANK" not in environ:  # WORLD_SIZE alone is not torchrun's: users export it for other tools
            return cls()
        names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
        found: dict[str, int] = {}
        for field, name in names.items():
            text = environ.get(name, "")
            require(
                text.isdecimal() and int(text) >= ("SIZE" in name),
                f"{name}={text or '(unset)'} is no rank or size as torchrun sets it; start through torchrun, or unset "
                "RANK and WORLD_SIZE to measure with one process",
            )
            found[field] = int(text)
        require(
            found["rank"] < found["size"],
            f"RANK={found['rank']} must be less than WORLD_SIZE={found['size']}, as torchrun sets them",
        )
        return cls(**found)

    def exchange(self, own: T) -> list[T]:
        """Return every rank's object, by rank. Raises UserError when a rank is gone or TIMEOUT_S has passed."""
        if self.size == 1:
            return [own]
        try:
            return [pickle.loads(each) for each in _all_gather(pickle.dumps(own), self.size)]  # of this very run
        except RuntimeError as error:
            lost = _line(error)
        # Not from within the handler: a traceback would hold the group, and what holds it past its end may abort.
        raise UserError(f"rank {self.rank} ({host()}) lost the other ranks: {lost}")

    def together(self, work: Callable[[], T]) -> T:
        """Return what `work` returns here, once it has succeeded on every rank.

        Raises UserError on every rank when it failed on any, with that rank's message; with one rank, whatever it
        raised. Ctrl-C and SIGTERM pass through.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 (whatever it is, the others must not wait for this rank)
            failure = error
        said = "" if failure is None else f"rank {self.rank} ({host()}): {_line(failure)}"
        failed = [message for message in self.exchange(said) if message]
        if failed:
            raise UserError("; ".join(failed)) from failure
        return result


@contextmanager
def process_group(ranks: Ranks, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Hold the process group of more than one rank; end it whatever happens inside.

    A gloo group that is still there when the interpreter unloads aborts the process now and then (exit code -6,
    "terminate called without an active exception"): so nothing may refer to it afterwards, no traceback either, and
    not torch.distributed.nn, whose functions take the group of the moment they are loaded as a default; it comes with
    torch.compile and the optimizers. Raises UserError when the ranks do not find each other.
    """
    if ranks.size == 1:
        yield
        return
    importlib.import_module("torch.distributed.nn.functional")  # while there is no group for it to hold
    unreached = None
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        unreached = _line(error)
    if unreached is not None:
        raise UserError(f"rank {ranks.rank} ({host()}) cannot reach the other ranks: {unreached}")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _all_gather(data: bytes, size: int) -> list[bytes]:
    """Return every rank's bytes, padded to the longest. Not all_gather_object: it needs numpy, which torch does not."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(int(length.item()) for length in lengths)
    buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(buffers, torch.frombuffer(bytearray(data).ljust(longest, b"\0"), dtype=torch.uint8))
    return [bytes(buffer.tolist()) for buffer in buffers]


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def _line(error: Exception) -> str:
    """One line: a message for users as it is, any other with its type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
