"""Clocks, power, temperature and throttling of one card through nvidia-ml-py: recorded, never changed.

Whatever cannot be read is "unknown"; nothing here raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

UNKNOWN = "unknown"
NO_TELEMETRY = dict.fromkeys(("clocks", "power", "temperature", "throttle"), UNKNOWN)
# Bits of nvmlClocksEventReasons (nvml.h); idle and the clocks that an administrator chose are no throttling.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


SAMPLE_S = 0.1
"""How often a card is read while it measures."""


class Reading(NamedTuple):
    """The card at one moment; None where it does not say."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    watts: float | None = None
    celsius: int | None = None
    throttle: str = UNKNOWN
    """What slows the clock down, "none", or "unknown"."""


class Telemetry:
    """One card, found by its UUID or its PCI address: NVML's index need not be CUDA's."""

    def __init__(self, uuid: str | None, pci: str | None) -> None:
        """`uuid` as "GPU-..." or without the prefix, `pci` as "00000000:1B:00.0"; None where torch does not say."""
        self._nvml: Any = None
        self._card: Any = None
        self.driver = UNKNOWN
        try:
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception:  # noqa: BLE001 (absent, or any of NVML's own errors)
            return
        self.driver = _text(self._read(self._nvml.nvmlSystemGetDriverVersion))
        if uuid is not None:
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._card = self._read(lambda: self._nvml.nvmlDeviceGetHandleByUUID(name))
        if self._card is None and pci is not None:
            self._card = self._read(lambda: self._nvml.nvmlDeviceGetHandleByPciBusId(pci))

    def read(self) -> Reading:
        """Read the card as it is now."""
        if self._card is None:
            return Reading()
        nvml, card = self._nvml, self._card
        milliwatts = self._read(lambda: nvml.nvmlDeviceGetPowerUsage(card))
        return Reading(
            self._read(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
            self._read(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM)),
            None if milliwatts is None else milliwatts / 1000,
            self._read(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
            _reasons(self._read(self._event_reasons)),
        )

    def snapshot(self) -> dict[str, str]:
        """Read `clocks`, `power`, `temperature` and `throttle` as they are now."""
        if self._card is None:
            return dict(NO_TELEMETRY)
        now = self.read()
        return {
            "clocks": f"SM {_number(now.sm_mhz, 'MHz')}, memory {_number(now.memory_mhz, 'MHz')}",
            "power": UNKNOWN if now.watts is None else f"{now.watts:.0f} W",
            "temperature": _number(now.celsius, "C"),
            "throttle": now.throttle,
        }

    @contextmanager
    def watch(self) -> Iterator[list[Reading]]:
        """Read the card every SAMPLE_S while the block runs, by a thread: afterwards it would be idle."""
        seen: list[Reading] = []
        if self._card is None:
            yield seen
            return
        done = threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLE_S / 4 if not seen else SAMPLE_S):
                seen.append(self.read())

        thread = threading.Thread(target=sample, name="telemetry", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()

    def power_limit(self) -> str:
        """Watts that the card may take."""
        if self._card is None:
            return UNKNOWN
        milliwatts = self._read(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card))
        return UNKNOWN if milliwatts is None else f"{milliwatts / 1000:.0f} W"

    def violations_s(self) -> dict[str, float]:
        """Seconds for which power or heat has held the clock back, since the driver started."""
        if self._card is None:
            return {}
        nvml, card = self._nvml, self._card
        found: dict[str, float] = {}
        for name, policy in (("power", "NVML_PERF_POLICY_POWER"), ("heat", "NVML_PERF_POLICY_THERMAL")):
            time = self._read(partial(nvml.nvmlDeviceGetViolationStatus, card, getattr(nvml, policy, None)))
            if time is not None:
                found[name] = time.violationTime / 1e9
        return found

    def _event_reasons(self) -> Any:
        """The bits under their present name, or under the one of older releases."""
        new = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return (new or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(self._card)

    @staticmethod
    def _read(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # noqa: BLE001 (one value that this card or driver does not give)
            return None


def _number(value: int | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value} {unit}"


def _text(value: str | bytes | None) -> str:
    if value is None:
        return UNKNOWN
    return value.decode() if isinstance(value, bytes) else value


def _reasons(bits: int | None) -> str:
    if bits is None:
        return UNKNOWN
    return ", ".join(name for bit, name in _REASONS.items() if bits & bit) or "none"
