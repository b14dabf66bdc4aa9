"""Clocks, power, temperature and throttling of one card through nvidia-ml-py: recorded, never changed.

Whatever cannot be read is "unknown"; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

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

    def snapshot(self) -> dict[str, str]:
        """Read `clocks`, `power`, `temperature` and `throttle` as they are now."""
        if self._card is None:
            return dict(NO_TELEMETRY)
        nvml, card = self._nvml, self._card
        sm = self._read(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))
        memory = self._read(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM))
        milliwatts = self._read(lambda: nvml.nvmlDeviceGetPowerUsage(card))
        celsius = self._read(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))
        return {
            "clocks": f"SM {_number(sm, 'MHz')}, memory {_number(memory, 'MHz')}",
            "power": UNKNOWN if milliwatts is None else f"{milliwatts / 1000:.0f} W",
            "temperature": _number(celsius, "C"),
            "throttle": _reasons(self._read(self._event_reasons)),
        }

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
