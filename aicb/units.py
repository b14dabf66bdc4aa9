"""Numbers as people write and read them, each with its unit."""

from __future__ import annotations

import re
from collections.abc import Sequence


def whole_number(text: str) -> int | None:
    """Read plain decimal digits, up to 18 of them; None for anything else (int() takes signs, blanks, other digits)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def percentage(text: str) -> float | None:
    """Read `5%` or `0.5 %` as a fraction; None for anything else, a number without its sign too."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?%", text)
    return float(found[1]) / 100 if found else None


def printable(text: str) -> str:
    """One line that does nothing to a terminal: control characters are shown, not sent."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def size(count: int) -> str:
    """Bytes in decimal units: 33554432 is 33.55 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError(value)


def duration(ns: float) -> str:
    """Nanoseconds in the unit that fits: 1820000 is 1.820 ms."""
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= factor:
            return f"{ns / factor:.3f} {unit}"
    return f"{ns:g} ns"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
