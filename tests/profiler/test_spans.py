"""Which kernels a call runs: PyTorch's operators on a CPU, CUDA's kernels through a stand-in for torch.profiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.spans import kernel_spans, operator_spans


def test_operators_of_a_call_in_the_order_they_ran() -> None:
    one = torch.randn(64, 64, requires_grad=True)
    grad = torch.randn(64, 64)
    spans = operator_spans(lambda: torch.autograd.grad(torch.tanh(one @ one), one, grad))
    names = [name for name, _ in spans]
    assert names[:2] == ["aten.mm", "aten.tanh"]
    assert "aten.tanh_backward" in names
    assert names.count("aten.mm") == 3
    assert all(us > 0 for _, us in spans)


def test_what_runs_on_the_card_is_kept_and_what_the_host_did_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, us: float, device: str) -> Any:
        time_range = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, time_range=time_range, device_type=SimpleNamespace(name=device))

    steps: list[str] = []

    class Seen:
        def __init__(self, activities: list[Any]) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Seen:
            steps.append("begin")
            return self

        def __exit__(self, *_: object) -> None:
            steps.append("end")

        def events(self) -> list[Any]:
            return [event("cudaLaunchKernel", 4, "CPU"), event("gemm", 50, "CUDA"), event("gelu", 2.5, "CUDA")]

    monkeypatch.setattr(torch.profiler, "profile", Seen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("wait"))
    assert kernel_spans(lambda: steps.append("call")) == [("gemm", 50.0), ("gelu", 2.5)]
    assert steps == ["begin", "call", "wait", "end"]
