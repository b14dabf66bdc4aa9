"""Which kernels one call runs, and how long each takes: an account beside the time between two marks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Spans = list[tuple[str, float]]
"""Name and time, us, in the order in which they ran."""


def kernel_spans(call: Callable[[], object]) -> Spans:
    """Return every kernel, copy and fill that `call` puts on the CUDA device, as torch.profiler reads them of CUPTI."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write lines of its own to the terminal
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events: Any = seen.events() or ()
    return [(event.name, float(event.time_range.elapsed_us())) for event in events if event.device_type.name == "CUDA"]


def operator_spans(call: Callable[[], object]) -> Spans:
    """Return every PyTorch operator that `call` runs on the CPU, where each ends before the next begins."""
    seen = _Operators()
    with seen:
        call()
    return seen.spans


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operator that reaches a backend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans: Spans = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter_ns()
        out = func(*args, **(kwargs or {}))
        self.spans.append((str(func).removesuffix(".default"), (time.perf_counter_ns() - start) / 1000))
        return out
