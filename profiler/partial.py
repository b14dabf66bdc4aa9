"""What a rank has measured so far, on disk as it comes: lines of JSON that no reader takes for a profile.

The first line says what they are parts of; each other holds one kernel. A process that is killed leaves at most one
line unfinished, which is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aicb.errors import UserError, require
from profiler.ranks import Ranks
from profiler.results import Measured, as_json, from_json

SUFFIX = ".partial"


class Partial:
    """One rank's file beside the profile to be."""

    def __init__(self, profile: Path, ranks: Ranks) -> None:
        """`profile`: the path of the whole; with more ranks than one, each has a part of its own."""
        whose = f".rank{ranks.rank}" if ranks.size > 1 else ""
        self.path = profile.with_name(f"{profile.name}{whose}{SUFFIX}")
        self.count = 0
        """Kernels in it."""
        self._total, self._first = 0, ""

    def check(self, resume: bool, force: bool) -> None:
        """Raise UserError where an earlier try's kernels would be lost."""
        kept = 0 if resume or force else max(len(self._lines()) - 1, 0)
        require(
            not kept,
            f"{self.path} holds {kept} kernels of an earlier try: pass --resume to go on from there, or --force to "
            "start over",
        )

    def open(self, header: Mapping[str, Mapping[str, str]], total: int, resume: bool) -> dict[str, Measured]:
        """Begin anew, or with `resume` go on; return the kernels that are there, of `total`.

        `header`: what it is a part of. Raises UserError where the file is a part of something else.
        """
        lines = self._lines() if resume else []
        earlier = self._read(lines, header) if lines else {}
        self._first = "" if lines else json.dumps(header) + "\n"
        self.count, self._total = len(earlier), total
        if lines:
            os.truncate(self.path, len("".join(lines).encode()))
        else:
            self.path.unlink(missing_ok=True)
        return earlier

    def add(self, name: str, found: Measured) -> None:
        """Append one kernel."""
        line = json.dumps({"kernel": name, "note": found.note, "times": as_json(found.times)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self._first}{line}\n")
        self._first = ""
        self.count += 1

    def remove(self) -> None:
        """The profile is whole."""
        self.path.unlink(missing_ok=True)
        self.count = 0

    def kept(self) -> str:
        """Say what a failure leaves; empty where it is nothing."""
        if not self.count:
            return ""
        return f"{self.count} of {self._total} kernels are kept in {self.path}: --resume goes on from there"

    def _lines(self) -> list[str]:
        """The finished lines."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines = text.splitlines(keepends=True)
        return lines if not lines or lines[-1].endswith("\n") else lines[:-1]

    def _read(self, lines: list[str], header: Mapping[str, Any]) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        number = 1
        try:
            stated = json.loads(lines[0])
            differing = [
                f"{key} is {stated[part].get(key)} there, {value} here"
                for part, values in header.items()
                for key, value in values.items()
                if stated[part].get(key) != value
            ]
            for number, line in enumerate(lines[1:], start=2):  # noqa: B007 (the error names it)
                entry = json.loads(line)
                found[str(entry["kernel"])] = Measured(from_json(entry["times"]), str(entry["note"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{self.path}:{number}: no line of a profile's part; pass --force to start over") from error
        require(
            not differing,
            f"--resume: {self.path} is a part of another profile: {'; '.join(differing)}; pass --force to start over",
        )
        return found
