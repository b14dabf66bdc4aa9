"""The device that is measured, CUDA or CPU: its clock, its queue, its cache, its memory and its name."""

from __future__ import annotations

import gc
import os
import platform
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from aicb.errors import UserError, require
from aicb.naming import gpu_slug
from profiler.spans import Spans, kernel_spans, operator_spans
from profiler.telemetry import NO_TELEMETRY, UNKNOWN, Reading, Telemetry

DEVICES = ("auto", "cuda", "cpu")
MIB = 2**20
_CPU_FLUSH_BYTES = 64 * MIB
# Any: torch leaves both untyped. Its own tests spin with `_sleep`, there is no public way.
_event: Any = torch.cuda.Event
_spin_cycles: Any = torch.cuda._sleep
_CPU_BURN_IN_S, _CUDA_BURN_IN_S = 0.1, 1.0
_CUDA_MIN_TIME_S = 0.1


class Device(ABC):
    """One device of one rank. Implements profiler.measure.Timer."""

    kind: str
    torch_device: torch.device
    name: str
    burn_in_s: float
    min_time_s: float = 0.0
    """How long each measurement samples at least: a card's clock follows its load only so fast."""
    identity: str = ""
    """Tells the card from others of its host; empty where it may be shared."""
    _buffer: torch.Tensor

    def now(self) -> float:
        """The host's clock, s."""
        return time.perf_counter()

    def flush(self) -> None:
        """Write a buffer larger than the last-level cache."""
        self._buffer.zero_()

    def release(self) -> None:
        """Give back what dropped tensors held."""
        gc.collect()

    def burn_in(self, seconds: float) -> None:
        """Multiply matrices for a while, so that clocks, libraries and allocator are awake."""
        size, dtype = (4096, torch.bfloat16) if self.kind == "cuda" else (256, torch.float32)
        one = torch.randn(size, size, device=self.torch_device, dtype=dtype)
        end = self.now() + seconds
        while self.now() < end:
            torch.mm(one, one)
            self.synchronize()

    def telemetry(self) -> dict[str, str]:
        """Clocks, power, temperature and throttling as they are now."""
        return dict(NO_TELEMETRY)

    def watch(self) -> AbstractContextManager[list[Reading]]:
        """Fill the list with what the card says while the block runs."""
        return nullcontext([])

    def violations_s(self) -> dict[str, float]:
        """Seconds for which limits have held the clock back so far, by what it was."""
        return {}

    @abstractmethod
    def spans(self, call: Callable[[], object]) -> Spans:
        """Name and time (us) of each kernel that `call` runs on the device."""

    @property
    def slug(self) -> str:
        """The name as part of a file name: NVIDIA H200 is H200."""
        return gpu_slug(self.name)

    @abstractmethod
    def mark(self) -> Any:
        """Note the time at this place of the queue."""

    @abstractmethod
    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time between two marks, us."""

    @abstractmethod
    def spin(self, seconds: float) -> None:
        """Keep the device busy that long."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the queue."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that this rank can still allocate."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What a profile says of the device: gpu, memory, driver, cuda, torch."""


class Cpu(Device):
    """This machine's CPU; calls run at once, so nothing is queued."""

    kind = "cpu"
    burn_in_s = _CPU_BURN_IN_S

    def __init__(self, ranks_here: int = 1) -> None:
        """`ranks_here` ranks share the machine's memory."""
        self.torch_device = torch.device("cpu")
        self.name = f"CPU {_cpu_model()}"
        self._ranks_here = ranks_here
        self._buffer = torch.empty(_CPU_FLUSH_BYTES, dtype=torch.uint8)

    @property
    def slug(self) -> str:
        """One word for all CPUs: their names fill lines."""
        return "CPU"

    def mark(self) -> int:
        """Nanoseconds."""
        return time.perf_counter_ns()

    def elapsed_us(self, start: int, end: int) -> float:
        """Time between two marks, us."""
        return (end - start) / 1000

    def spin(self, seconds: float) -> None:
        """Nothing: there is no queue to fill."""

    def synchronize(self) -> None:
        """Nothing: every call has ended when it returns."""

    def free_bytes(self) -> int:
        """This rank's part of the memory that the system calls available."""
        return _available_bytes() // self._ranks_here

    def spans(self, call: Callable[[], object]) -> Spans:
        """PyTorch's operators: a CPU has no kernels apart from them."""
        return operator_spans(call)

    def facts(self) -> dict[str, str]:
        """No GPU, and says so."""
        return {
            "gpu": self.name,
            "gpu_memory_gib": "none",
            "driver": "none",
            "cuda": "none",
            "torch": torch.__version__,
            "cpu_threads": str(torch.get_num_threads()),
        }


class Cuda(Device):
    """One card: CUDA events on the current stream."""

    kind = "cuda"
    burn_in_s = _CUDA_BURN_IN_S
    min_time_s = _CUDA_MIN_TIME_S

    def __init__(self, index: int = 0) -> None:
        """Take card `index` of those that CUDA_VISIBLE_DEVICES leaves."""
        count = torch.cuda.device_count()
        if count == 1:  # a scheduler may show each rank one card; whether it is its own, the ranks find out together
            index = 0
        require(
            index < count,
            f"LOCAL_RANK {index}: this machine shows {count} CUDA GPU(s), so torchrun's --nproc_per_node must be at "
            f"most {count}",
        )
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._properties: Any = torch.cuda.get_device_properties(index)
        self.name = self._properties.name
        uuid, pci = _identity(self._properties)
        self.identity = uuid or pci or f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {index}"
        self._telemetry = Telemetry(uuid, pci)
        cache = getattr(self._properties, "L2_cache_size", 0) or 128 * MIB  # unknown: more than any card of today
        self._buffer = torch.empty(2 * cache, dtype=torch.uint8, device=self.torch_device)
        self._cycles_per_s = self._calibrate()

    def _calibrate(self) -> float:
        """How many cycles torch's spinning kernel makes in a second."""
        cycles = 10_000_000
        for _ in range(2):  # the first run loads the kernel
            start = self.mark()
            _spin_cycles(cycles)
            end = self.mark()
            self.synchronize()
        return cycles / max(self.elapsed_us(start, end), 1.0) * 1e6

    def burn_in(self, seconds: float) -> None:
        """Wake the card, then count its cycles again: they are the SM's own, and at an idle clock there are fewer."""
        super().burn_in(seconds)
        self._cycles_per_s = self._calibrate()

    def mark(self) -> torch.cuda.Event:
        """Record an event; nothing waits for it."""
        event: torch.cuda.Event = _event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events, us."""
        return float(start.elapsed_time(end)) * 1000

    def spin(self, seconds: float) -> None:
        """Queue a kernel that only counts cycles: it leaves the cache alone."""
        _spin_cycles(int(seconds * self._cycles_per_s))

    def synchronize(self) -> None:
        """Wait for the card."""
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """Give back what dropped tensors held, torch's cache too."""
        gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """The card's free memory and what torch's cache holds unused."""
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + cached

    def telemetry(self) -> dict[str, str]:
        """Through NVML."""
        return self._telemetry.snapshot()

    def watch(self) -> AbstractContextManager[list[Reading]]:
        """Through NVML, by a thread."""
        return self._telemetry.watch()

    def violations_s(self) -> dict[str, float]:
        """Through NVML."""
        return self._telemetry.violations_s()

    def spans(self, call: Callable[[], object]) -> Spans:
        """Through CUPTI, which torch.profiler reads."""
        return kernel_spans(call)

    def facts(self) -> dict[str, str]:
        """Name, memory and the versions of the software below."""
        return {
            "gpu": self.name,
            "gpu_memory_gib": f"{self._properties.total_memory / 2**30:.1f}",
            "power_limit": self._telemetry.power_limit(),
            "driver": self._telemetry.driver,
            "cuda": torch.version.cuda or UNKNOWN,
            "torch": torch.__version__,
        }


def pick_device(wanted: str, local_rank: int = 0, ranks_here: int = 1) -> Device:
    """Return the device for `--device auto|cuda|cpu`; LOCAL_RANK picks the card.

    Raises UserError where there is no GPU: a CPU is profiled only when asked for by name.
    """
    require(wanted in DEVICES, f"--device {wanted} must be one of {', '.join(DEVICES)}")
    if wanted == "cpu":
        return Cpu(ranks_here)
    if not torch.cuda.is_available():
        raise UserError(
            f"--device {wanted}: torch {torch.__version__} finds no CUDA GPU on this machine; give a saved profile "
            "with --comp_filepath, or profile this CPU with --device cpu"
        )
    return Cuda(local_rank)


def _identity(properties: Any) -> tuple[str | None, str | None]:
    """UUID and PCI address, as far as this release of torch tells them."""
    uuid = getattr(properties, "uuid", None)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if part is not None]
    pci = "{:08X}:{:02X}:{:02X}.0".format(*known) if len(known) == len(parts) else None
    return (None if uuid is None else str(uuid)), pci


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or UNKNOWN


def _available_bytes() -> int:
    """What the kernel calls available, or what the container may still take where that is less."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    available = int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        return min(available, max(int(limit) - int(used), 0))
    return available


def _text(path: str) -> str:
    """A file's text; nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
