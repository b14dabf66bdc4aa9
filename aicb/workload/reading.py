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
from aicb.workload.notes import notes
from aicb.workload.own import OWN_KEYS, own_faults
from aicb.workload.rules import (
    COLUMNS,
    ERROR,
    FIELDS,
    HEADER_KEYS,
    INT_MAX,
    KEYWORD,
    NOTE,
    REQUIRED_KEYS,
    SUFFIXES,
    WARNING,
    Fault,
    group_sizes,
    header_faults,
    row_faults,
    survives_stoi,
)

LINE_MAX = 1 << 16
LINES_KEPT = 100_000
FINDINGS_MAX = 100


class Finding(NamedTuple):
    """One defect, or with level NOTE one hint, at a line of the file (from 1)."""

    line: int
    text: str
    level: str = ERROR


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


class Header(NamedTuple):
    """Line 1 as read."""

    values: dict[str, int | None]
    """The simulator's keys; None: no plain number."""
    own: dict[str, int | None]
    """The keys that this program adds."""
    faults: list[Fault]

    def groups(self) -> Groups | None:
        """Return the group sizes; None where the header does not tell."""
        known = {key: value for key, value in self.values.items() if value}
        whole = set(REQUIRED_KEYS) <= set(known) and all(fault.level == WARNING for fault in self.faults)
        return group_sizes(known) if whole else None


def parse_header(line: bytes) -> Header:
    """Return what line 1 says and what is wrong with it."""
    words = _fields(line)
    if not words:
        return Header({}, {}, [Fault(f"no header: line 1 must start with {KEYWORD}")])
    found = Header({}, {}, [])
    if words[0] != KEYWORD:
        found.faults.append(Fault(f"the header must start with {KEYWORD}, not {words[0][:40]!r}"))
    pairs = list(zip(words, [*words[1:], ""], strict=True))
    for word, following in pairs:
        key, colon, rest = word.partition(":")
        if key in HEADER_KEYS and colon:
            _read_key(found, key, rest, following)
        elif key in OWN_KEYS and colon and not rest:
            found.own[key] = whole_number(following)
    for word, following in pairs:
        if word == "pp_comm":
            _read_bare_pp_comm(found, following)
    found.faults.extend(header_faults(found.values))
    return found


def _read_key(found: Header, key: str, rest: str, following: str) -> None:
    value = None if rest else whole_number(following)
    if key in found.values:
        found.faults.append(Fault(f"{key}: given twice", WARNING if value == found.values[key] else ERROR))
    found.values[key] = value
    if rest:
        level = ERROR if key in REQUIRED_KEYS and key != "all_gpus" else WARNING  # as if it were not there
        found.faults.append(Fault(f"{key}:{rest[:40]}: a blank is needed after the colon", level))
    elif value is None:
        level = WARNING if survives_stoi(following) else ERROR
        found.faults.append(Fault(f"{key}: {following[:40]!r} is no plain whole number up to {INT_MAX}", level))


def _read_bare_pp_comm(found: Header, following: str) -> None:
    """The simulator takes this one key without its colon too."""
    value = whole_number(following)
    if value is None or value > INT_MAX:
        what = f"{following[:40]!r} is no number that it can read" if following else "no value follows"
        found.faults.append(Fault(f"pp_comm without a colon: the simulator takes it as well, and crashes: {what}"))
    elif found.values.get("pp_comm", value) != value:
        given = found.values["pp_comm"]
        found.faults.append(
            Fault(f"pp_comm {value} without a colon stands beside pp_comm: {given}: the last one counts")
        )
    else:
        found.values["pp_comm"] = value
        found.faults.append(Fault(f"pp_comm {value} without a colon: the simulator alone reads it so", WARNING))


def check(path: Path, with_notes: bool = False) -> Iterator[Finding]:
    """Yield every defect of the workload `path`, line by line, then what its rows lack together; notes if wanted.

    Raises UserError for what is no text file.
    """
    head, second, rest = first_lines(path)
    header = parse_header(head)
    yield from (Finding(1, *fault) for fault in header.faults)
    groups = header.groups()
    stated = row_count(second)
    if stated is None:
        yield Finding(2, f"expected the number of rows alone, not {_text(second).strip()[:40]!r}")
    counts = Counter[bytes]() if header.own.get("aicb_version") is not None or with_notes else None
    rows = yield from _row_findings(rest, groups, counts)
    if rows == stated == 0:
        yield Finding(2, "no rows: a workload of nothing")
    if stated is not None and rows != stated:
        effect = "the missing ones would be copies of the last" if rows < stated else "the others would be ignored"
        yield Finding(2, f"{stated} rows announced, {rows} found: {effect}")
    if counts is not None and len(counts) <= LINES_KEPT:
        counted = [(fields, count) for line, count in counts.items() if (fields := _fields(line))]
        if header.own.get("aicb_version") is not None:
            names = Counter[str]()
            for fields, count in counted:
                names[fields[0]] += count
            yield from (Finding(*one) for one in own_faults(header.values, header.own, names))
        if with_notes and groups is not None:
            whole = [(fields, count) for fields, count in counted if len(fields) == len(FIELDS)]
            yield from (Finding(1, text, NOTE) for text in notes(groups, whole))


def _row_findings(
    rest: Iterator[list[bytes]], groups: Groups | None, counts: Counter[bytes] | None
) -> Generator[Finding, None, int]:
    """Yield the defects of the rows, from line 3; return how many rows there are. `counts`: filled, unless None."""
    sound: set[bytes] = set()  # micro-batches repeat, so a block mostly holds lines already seen
    number, rows, blank = 3, 0, 0
    for lines in rest:
        if counts is not None and len(counts) <= LINES_KEPT:
            counts.update(lines)
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
                    yield Finding(blank, "an empty line between rows", WARNING)
                    blank = 0
            if line.strip() and line not in sound:
                found = row_faults(_fields(line), groups)
                for fault in found:
                    yield Finding(number, *fault)
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
    """Total the workload `path`. Raises UserError with the first error where the simulator would misread it."""
    for finding in (found for found in check(path) if found.level == ERROR):
        raise UserError(f"{path}:{finding.line}: {finding.text}; `aicb check` lists every finding")
    head, _, rest = first_lines(path)
    counts: Counter[bytes] = Counter()
    for lines in rest:
        counts.update(lines)
    for line in [line for line in counts if not line.strip()]:
        del counts[line]
    total = Totals(parse_header(head).values, counts.total(), *(Counter() for _ in range(6)))
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
