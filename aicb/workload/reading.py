"""Read a workload file back: check every rule of the format, and total its columns. Streams, so any length will do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from aicb.errors import UserError, require
from aicb.step.collectives import Groups
from aicb.units import whole_number
from aicb.workload.simai import (
    COLUMNS,
    FIELDS,
    HEADER_KEYS,
    INT_MAX,
    KEYWORD,
    SUFFIXES,
    group_sizes,
    header_faults,
    row_faults,
)

LINE_MAX = 1 << 16
LINES_KEPT = 100_000
FINDINGS_MAX = 100


class Finding(NamedTuple):
    """One defect, at a line of the file (from 1)."""

    line: int
    text: str


def blocks(path: Path) -> Iterator[list[bytes]]:
    """Yield the lines of a text file, some thousands at a time. Raises UserError for what is no text file."""
    require(path.exists(), f"{path}: no such file")
    require(path.is_file(), f"{path}: not a regular file")
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            require(b"\0" not in chunk, f"{path}: holds a NUL byte: not a text file")
            *lines, rest = (rest + chunk).split(b"\n")
            require(len(rest) < LINE_MAX, f"{path}: holds a line of {LINE_MAX} bytes or more: not a workload")
            if lines:
                yield lines
    if rest:
        yield [rest]


def first_lines(path: Path) -> tuple[bytes, bytes, Iterator[list[bytes]]]:
    """Return lines 1 and 2, empty where the file ends, and the blocks of the others."""
    found = blocks(path)
    lines = next(found, [])
    while len(lines) < 3 and (more := next(found, None)) is not None:
        lines += more
    first, second = [*lines, b"", b""][:2]
    return first, second, chain([lines[2:]], found)


def parse_header(line: bytes) -> tuple[dict[str, int | None], list[str]]:
    """Return the header's known keys with their values (None: no plain number), and what is wrong with it."""
    words = _fields(line)
    if not words:
        return {}, [f"no header: line 1 must start with {KEYWORD}"]
    faults = [] if words[0] == KEYWORD else [f"the header must start with {KEYWORD}, not {words[0][:40]!r}"]
    values: dict[str, int | None] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, colon, rest = word.partition(":")
        if key not in HEADER_KEYS or not colon:
            continue
        if key in values:
            faults.append(f"{key}: given twice")
        values[key] = None if rest else whole_number(following)
        if rest:
            faults.append(f"{word[:60]}: a blank is needed after the colon")
        elif values[key] is None:
            faults.append(f"{key}: {following[:40]!r} is no plain whole number up to {INT_MAX}")
    return values, faults + header_faults(values)


def check(path: Path) -> Iterator[Finding]:
    """Yield every defect of the workload `path`, line by line, then a wrong count.

    Raises UserError for what is no text file.
    """
    head, second, rest = first_lines(path)
    values, faults = parse_header(head)
    yield from (Finding(1, fault) for fault in faults)
    groups = None if faults else group_sizes({key: value for key, value in values.items() if value is not None})
    stated = row_count(second)
    if stated is None:
        yield Finding(2, f"expected the number of rows alone, not {_text(second).strip()[:40]!r}")
    rows = yield from _row_findings(rest, groups)
    if rows == stated == 0:
        yield Finding(2, "no rows: a workload of nothing")
    if stated is not None and rows != stated:
        effect = "the missing ones would be copies of the last" if rows < stated else "the others would be ignored"
        yield Finding(2, f"{stated} rows announced, {rows} found: {effect}")


def _row_findings(rest: Iterator[list[bytes]], groups: Groups | None) -> Generator[Finding, None, int]:
    """Yield the defects of the rows, from line 3; return how many rows there are."""
    sound: set[bytes] = set()  # micro-batches repeat, so a block mostly holds lines already seen
    number, rows, blank = 3, 0, 0
    for lines in rest:
        if sound.issuperset(lines) and not blank:
            rows += len(lines)
            number += len(lines)
            continue
        for line in lines:
            if not line.strip():
                blank = blank or number
            else:
                rows += 1
                if blank:
                    yield Finding(blank, "an empty line between rows")
                    blank = 0
            if line.strip() and line not in sound:
                found = row_faults(_fields(line), groups)
                for fault in found:
                    yield Finding(number, fault)
                if not found and len(sound) < LINES_KEPT:
                    sound.add(line)
            number += 1
    return rows


def row_count(line: bytes) -> int | None:
    """Read line 2; None unless it is the number of rows alone."""
    count = whole_number(_text(line.strip()))
    return count if count is not None and count <= INT_MAX else None


def _fields(line: bytes) -> list[str]:
    return [_text(field) for field in line.split()]  # of bytes: blanks are ASCII's, as to the simulator


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


class Totals(NamedTuple):
    """What a workload adds up to."""

    header: dict[str, int | None]
    rows: int
    compute_ns: Counter[str]
    """By column."""
    row_compute_ns: Counter[str]
    """All columns, by row name."""
    row_counts: Counter[str]
    row_bytes: Counter[str]
    """All groups, by row name."""
    sent: Counter[tuple[str, str, str]]
    """Bytes by (column, kind, group)."""
    calls: Counter[tuple[str, str, str]]

    def group_bytes(self) -> dict[str, int]:
        """Bytes by group."""
        found: Counter[str] = Counter()
        for (_, _, group), size in self.sent.items():
            found[group] += size
        return dict(found)


def totals(path: Path) -> Totals:
    """Total the workload `path`. Raises UserError with the first finding where it breaks a rule."""
    for finding in check(path):
        raise UserError(f"{path}:{finding.line}: {finding.text}; `aicb check` lists every finding")
    head, _, rest = first_lines(path)
    counts: Counter[bytes] = Counter()
    for lines in rest:
        counts.update(lines)
    for line in [line for line in counts if not line.strip()]:
        del counts[line]
    total = Totals(parse_header(head)[0], counts.total(), *(Counter() for _ in range(6)))
    for line, count in counts.items():
        _add(total, dict(zip(FIELDS, _fields(line), strict=True)), count)
    return total


def _add(total: Totals, row: dict[str, str], count: int) -> None:
    name = row["name"]
    total.row_counts[name] += count
    for column in COLUMNS:
        time, word, size = int(row[f"{column}_time"]), row[f"{column}_comm"], int(row[f"{column}_bytes"])
        total.compute_ns[column] += time * count
        total.row_compute_ns[name] += time * count
        if word != "NONE":
            kind, _, suffix = word.partition("_")
            key = (column, kind, SUFFIXES[column][f"_{suffix}" if suffix else ""])
            total.sent[key] += size * count
            total.calls[key] += count
            total.row_bytes[name] += size * count
