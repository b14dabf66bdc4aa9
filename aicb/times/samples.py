"""The raw samples beside a profile: where they lie, and which kernels ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def samples_path(profile: Path) -> Path:
    """Where the raw samples of `profile` lie: the same name, .json instead of .txt."""
    return profile.with_suffix(".json") if profile.suffix == ".txt" else profile.with_name(profile.name + ".json")


def kernels_of(profile: Path) -> dict[str, dict[str, list[tuple[str, float]]]]:
    """Return, by section and direction, the kernels of one call on rank 0 by name, and their times, us.

    Empty where no samples of this profile lie beside it.
    """
    try:
        document = json.loads(samples_path(profile).read_bytes())
        kernels = document["ranks"][0]["kernels"]
        found = {
            name: {way: _spans(values) for way, values in times.items() if values.get("spans")}
            for name, times in kernels.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return {}
    return {name: ways for name, ways in found.items() if ways}


def _spans(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(str(name), float(us)) for name, us in values["spans"]]
