"""The class for a CUDA card, end to end, with torch.cuda's events and streams replaced by stand-ins: no GPU runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler import device
from profiler.device import Cuda
from profiler.measure import measure

IDLE_HZ, FULL_HZ = 345e6, 1980e6
"""The SM clock before the burn-in and after it."""


class Card:
    """A queue of its own clock, us: kernels take time there, launches on the host."""

    def __init__(self) -> None:
        self.hz = IDLE_HZ
        self.host = self.done = 0.0
        self.seen = 1

    def launch(self, us: float, host_us: float = 4.0) -> None:
        self.host += host_us
        self.done = max(self.done, self.host) + us

    def spin(self, cycles: int) -> None:
        self.launch(cycles / self.hz * 1e6)

    def synchronize(self, *_: object) -> None:
        self.host = max(self.host, self.done)

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        card = self

        class Event:
            at: float

            def record(self) -> None:
                card.host += 1.0
                card.done = max(card.done, card.host)
                self.at = card.done

            def elapsed_time(self, other: Event) -> float:
                assert card.host >= other.at, "read before the queue was waited for"
                return (other.at - self.at) / 1000

        return Event()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    properties = SimpleNamespace(name="NVIDIA Fake 9", total_memory=8 * 2**30, L2_cache_size=2**20, uuid="abc")
    for name, value in {
        "device_count": lambda: made.seen,
        "set_device": lambda _: None,
        "get_device_properties": lambda _: properties,
        "synchronize": made.synchronize,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _: 3000,
        "memory_allocated": lambda _: 1000,
        "mem_get_info": lambda _: (5000, 9000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device, "_event", made.event)
    monkeypatch.setattr(device, "_spin_cycles", made.spin)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: real(*size, **{**more, "device": "cpu"}))

    def wake(self: device.Device, seconds: float) -> None:
        assert self.kind == "cuda"
        made.host += seconds * 1e6
        made.hz = FULL_HZ

    monkeypatch.setattr(device.Device, "burn_in", wake)
    monkeypatch.setattr(device.Device, "now", lambda _: made.host / 1e6)
    return made


def test_the_lead_is_counted_at_the_clock_that_measures(card: Card) -> None:
    """A 30-launch backward of 60 us that takes the host 120 us to queue: without a full lead its gaps are timed."""
    cuda = Cuda(0)
    cuda.burn_in(1.0)
    before = card.done
    cuda.spin(200e-6)
    cuda.synchronize()
    assert card.done - before == pytest.approx(200, rel=0.05)

    def backward() -> None:
        for _ in range(30):
            card.launch(2.0)

    samples = measure(backward, cuda, samples=10, cap_s=0.3, l2="hot")
    assert samples.median == pytest.approx(60, abs=2)


def test_one_visible_card_is_taken_whatever_the_local_rank(card: Card) -> None:
    """The scheduler shows each rank its own: CUDA's index is 0 for all, and the UUID tells them apart."""
    assert card.seen == 1
    cuda = Cuda(5)
    assert cuda.torch_device == torch.device("cuda", 0)
    assert cuda.identity == "abc"
    card.seen = 8
    assert Cuda(5).torch_device == torch.device("cuda", 5)


def test_what_a_profile_says_of_the_card(card: Card) -> None:
    assert card.seen
    cuda = Cuda(0)
    assert cuda.facts()["gpu"] == "NVIDIA Fake 9"
    assert cuda.facts()["gpu_memory_gib"] == "8.0"
    assert cuda.free_bytes() == 5000 + 2000
    assert cuda.slug == "Fake-9"
    cuda.release()
