"""Which device is taken, what it is called, and what NVML says of it; CUDA itself is tested in tests/gpu."""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from aicb.errors import UserError
from profiler import device
from profiler.device import Cpu, Cuda, pick_device
from profiler.measure import measure
from profiler.telemetry import NO_TELEMETRY, Telemetry


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_without_a_gpu_both_ways_out_are_named(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        pick_device(wanted)
    for way_out in (f"--device {wanted}", "--comp_filepath", "--device cpu"):
        assert way_out in str(caught.value)


def test_a_rank_without_a_card_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match="LOCAL_RANK 4: this machine shows 4 CUDA GPU"):
        pick_device("auto", 4)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="--device tpu must be one of auto, cuda, cpu"):
        pick_device("tpu")


def test_names_in_files() -> None:
    for name, slug in (("NVIDIA H200", "H200"), ("NVIDIA GeForce RTX 4090", "RTX-4090")):
        card = Cuda.__new__(Cuda)
        card.name = name
        assert card.slug == slug
    assert Cpu().slug == "CPU"


def test_the_cpu_is_measured_by_the_same_function() -> None:
    cpu = pick_device("cpu")
    cpu.burn_in(0.01)
    one = torch.randn(64, 64)
    samples = measure(lambda: torch.mm(one, one), cpu, samples=5, cap_s=0.2)
    assert samples.min > 0
    assert cpu.telemetry() == NO_TELEMETRY
    assert cpu.facts()["gpu"].startswith("CPU ")


def test_ranks_of_a_host_share_its_memory() -> None:
    assert Cpu(ranks_here=4).free_bytes() == pytest.approx(Cpu().free_bytes() / 4, rel=0.2)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1048576 kB\n",
        "/sys/fs/cgroup/memory.max": "1000\n",
        "/sys/fs/cgroup/memory.current": "400\n",
    }
    monkeypatch.setattr(device, "_text", lambda path: files.get(path, ""))
    cpu = Cpu()
    assert cpu.free_bytes() == 600
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert cpu.free_bytes() == 2**30


# NVML


class FakeNvml(ModuleType):
    """Two cards, found by UUID or PCI address; `broken` names the calls that fail."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, broken: tuple[str, ...] = (), reasons: int = 0) -> None:
        super().__init__("pynvml")
        self.broken, self.reasons = broken, reasons
        self.asked: list[str] = []

    def _do(self, name: str, result: Any) -> Any:
        self.asked.append(name)
        if name in self.broken:
            raise RuntimeError(name)
        return result

    def nvmlInit(self) -> None:  # noqa: N802
        self._do("init", None)

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return bytes(self._do("driver", b"580.1"))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        return self._do("uuid", {"GPU-b": 1}[uuid])

    def nvmlDeviceGetHandleByPciBusId(self, pci: str) -> Any:  # noqa: N802
        return self._do("pci", {"00000000:1B:00.0": 1}[pci])

    def nvmlDeviceGetClockInfo(self, card: int, kind: int) -> Any:  # noqa: N802
        return self._do("clock", 1000 * card + kind)

    def nvmlDeviceGetPowerUsage(self, card: int) -> Any:  # noqa: N802
        return self._do("power", 350_400 * card)

    def nvmlDeviceGetTemperature(self, card: int, kind: int) -> Any:  # noqa: N802
        return self._do("temperature", 40 * card + kind)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: int) -> Any:  # noqa: N802
        return self._do("throttle", self.reasons * card)

    def nvmlDeviceGetEnforcedPowerLimit(self, card: int) -> Any:  # noqa: N802
        return self._do("limit", 700_000 * card)

    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1

    def nvmlDeviceGetViolationStatus(self, card: int, policy: int) -> Any:  # noqa: N802
        return self._do("violations", SimpleNamespace(violationTime=(1 + policy) * 1_500_000_000 * card))


READ = {"clocks": "SM 1001 MHz, memory 1002 MHz", "power": "350 W", "temperature": "40 C", "throttle": "none"}


def telemetry(monkeypatch: pytest.MonkeyPatch, nvml: ModuleType | None, uuid: str | None, pci: str | None) -> Telemetry:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return Telemetry(uuid, pci)


def test_the_card_is_found_by_uuid_not_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    found = telemetry(monkeypatch, FakeNvml(), "b", None)
    assert found.driver == "580.1"
    assert found.snapshot() == READ


def test_else_by_its_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry(monkeypatch, FakeNvml(), None, "00000000:1B:00.0").snapshot() == READ
    assert telemetry(monkeypatch, FakeNvml(("uuid",)), "b", "00000000:1B:00.0").snapshot() == READ


def test_throttling_names_its_reasons_and_idle_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = telemetry(monkeypatch, FakeNvml(reasons=0x01 | 0x04 | 0x40), "b", None)
    assert hot.snapshot()["throttle"] == "power cap, thermal (hardware)"
    assert telemetry(monkeypatch, FakeNvml(reasons=0x03), "b", None).snapshot()["throttle"] == "none"


def test_what_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    partly = telemetry(monkeypatch, FakeNvml(("power", "throttle")), "b", None)
    assert partly.snapshot() == READ | {"power": "unknown", "throttle": "unknown"}
    for nvml in (None, FakeNvml(("init",)), FakeNvml(("uuid", "pci"))):
        absent = telemetry(monkeypatch, nvml, "b", "00000000:1B:00.0")
        assert absent.snapshot() == NO_TELEMETRY


def test_the_card_is_read_again_and_again_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(reasons=0x04)
    card = telemetry(monkeypatch, nvml, "b", None)
    with card.watch() as seen:
        deadline = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(seen) >= 3
    assert seen[0] == (1001, 1002, 350.4, 40, "power cap")
    after, asked = len(seen), len(nvml.asked)
    time.sleep(0.3)
    assert (len(seen), len(nvml.asked)) == (after, asked)  # and no more once the block has ended
    with telemetry(monkeypatch, None, "b", None).watch() as unseen:
        pass
    assert unseen == []


def test_limits_of_the_card_and_how_long_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    card = telemetry(monkeypatch, FakeNvml(), "b", None)
    assert card.power_limit() == "700 W"
    assert card.violations_s() == {"power": 1.5, "heat": 3.0}
    silent = telemetry(monkeypatch, FakeNvml(("limit", "violations")), "b", None)
    assert (silent.power_limit(), silent.violations_s()) == ("unknown", {})
    absent = telemetry(monkeypatch, None, "b", None)
    assert (absent.power_limit(), absent.violations_s()) == ("unknown", {})


def test_torch_tells_who_the_card_is_as_far_as_it_can() -> None:
    whole = SimpleNamespace(uuid="b", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert device._identity(whole) == ("b", "00000000:1B:00.0")
    assert device._identity(SimpleNamespace()) == (None, None)
