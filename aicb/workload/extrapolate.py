"""From two short simulations to the whole iteration: what the simulator prints is affine in the micro-batches of rows.

With the header fixed (`ga` among its keys), T(ga) = T(j) + (ga - j) (T(k) - T(j)) / (k - j) for every figure, the
bubble included. The simulator prints whole microseconds: the error is at most that of the last digit, carried so far.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from aicb import units
from aicb.errors import UserError, require
from aicb.files import Refusals, printable_path, read_text
from aicb.workload.reading import first_lines, parse_header

FIRST = "File name"  # of the summary's columns
TOTAL = "Total time"
MARK = re.compile(r"-?micro_batches_written(\d{1,9})")
_REFUSALS = Refusals(
    UserError,
    unreadable=": cannot be read ({reason})",
    irregular=": {what}, expected a result of the simulator (...EndToEnd.csv)",
    too_large=": {size} bytes, and the result of a short file has at most {most}",
    no_text=":{line}: the byte {byte} is no text: expected a result of the simulator (...EndToEnd.csv)",
)


class Result(NamedTuple):
    """One result file."""

    path: Path
    name: str
    """As the simulator calls the run."""
    figures: dict[str, Fraction]
    """Microseconds, by column."""
    digit: Fraction
    """What the last printed digit is worth, us."""
    rows: Counter[str]


class Run(NamedTuple):
    """What was simulated: the micro-batches of rows, of how many, and all else that must agree in a pair."""

    written: int
    ga: int
    same: object


class Estimate(NamedTuple):
    """One figure of the whole iteration, us."""

    value: Fraction
    error: Fraction


class Extrapolation(NamedTuple):
    """The figures at `ga` micro-batches."""

    name: str
    ga: int
    written: tuple[int, int]
    figures: dict[str, Estimate]


def read_result(path: Path) -> Result:
    """Read a result. Raises UserError, one line that names the file: no result, or one without a number."""
    shown = printable_path(path)
    lines = [[cell.strip() for cell in line.split(",")] for line in read_text(path, shown, _REFUSALS).splitlines()]
    heads = [number for number, line in enumerate(lines) if line[0] == FIRST]
    require(
        len(heads) == 1 and heads[0] + 1 < len(lines),
        f"{shown}: no summary of the analytical simulator in it (a line from {FIRST!r}, then one of values)",
    )
    head, values = lines[heads[0]], lines[heads[0] + 1]
    width = len(head) - (not head[-1])  # a comma may end the line
    require(
        len(values) >= width and TOTAL in head, f"{shown}: its summary has {len(values)} values for {width} columns"
    )
    figures, digit = {}, Fraction(1)
    for column, cell in zip(head[1:width], values[1:width], strict=True):
        found = re.fullmatch(r"(-?\d{1,18}(?:\.(\d{1,9}))?)(?:\s*\(.*\))?", cell, re.ASCII)
        if found is None:
            raise UserError(f"{shown}: {column} is {units.printable(cell)[:40]!r}: the simulation did not go well")
        figures[column] = Fraction(found[1])
        digit = min(digit, Fraction(1, 10 ** len(found[2] or "")))
    rows = Counter(line[0] for line in lines[: heads[0]] if len(line) > 2 and line[0] not in ("", "layer_name"))
    return Result(path, values[0], figures, digit, rows)


def _run(result: Result, workload: Path | None) -> Run:
    """Find out what was simulated: from the workload, given or beside the result, else from the names."""
    beside = result.path.with_name(result.path.name.removesuffix("-EndToEnd.csv") + ".txt")
    if workload is None and beside != result.path and beside.is_file():
        workload = beside
    if workload is not None:
        return _run_of(workload)
    for name in (result.name, result.path.name):
        mark, ga = MARK.search(name), _ga(name)
        if mark and ga and int(mark[1]):
            return Run(int(mark[1]), ga, MARK.sub("", name))
    raise UserError(
        f"{printable_path(result.path)}: neither its name nor a workload beside it says how many micro-batches were "
        "simulated: give both workloads (--workload A.txt --workload B.txt)"
    )


def _run_of(workload: Path) -> Run:
    line = first_lines(workload)[0]
    header = parse_header(line)
    written, ga = header.own.get("micro_batches_written"), header.values.get("ga")
    if not written or not ga:
        raise UserError(f"{printable_path(workload)}: its header does not say ga: and micro_batches_written:")
    words = line.split()
    where = words.index(b"micro_batches_written:")
    return Run(written, ga, tuple(words[:where] + words[where + 2 :]))


def _ga(name: str) -> int | None:
    """Read ga of a result's name, or derive it of a workload's."""
    if found := re.search(r"-ga(\d{1,9})-", name):
        return int(found[1])
    known = {key: int(number) for key, number in re.findall(r"-?(world_size|tp|pp|gbs|mbs)(\d{1,9})(?=-|$)", name)}
    if len(known) < 5 or not all(known.values()):
        return None
    ranks = known["world_size"] // (known["tp"] * known["pp"]) * known["mbs"]
    return known["gbs"] // ranks if ranks else None


def extrapolate(paths: Sequence[Path], workloads: Sequence[Path] = ()) -> Extrapolation:
    """Return the figures of the whole iteration from two results. Raises UserError where they are no pair."""
    require(len(workloads) in (0, 2), f"--workload is there {len(workloads)} time(s): give it for both results, or not")
    results = [read_result(path) for path in paths]
    given: Sequence[Path | None] = workloads or (None, None)
    pairs = [(result, _run(result, workload)) for result, workload in zip(results, given, strict=True)]
    (one, short), (other, long) = sorted(pairs, key=lambda pair: pair[1].written)
    shown = " and ".join(printable_path(path) for path in paths)
    require(
        short.written != long.written,
        f"{shown}: both have {short.written} micro-batches: the pair of `aicb generate --short` has 1 and 17",
    )
    require(
        short.ga == long.ga and short.same == long.same,
        f"{shown}: not results of one pair: their headers or names differ in more than the micro-batches written",
    )
    require(list(one.figures) == list(other.figures), f"{shown}: their summaries have other columns")
    for name in sorted(one.rows.keys() | other.rows.keys()):
        a, b = one.rows[name], other.rows[name]
        fits = a == b or a * long.written == b * short.written
        require(
            fits, f"{shown}: {a} and {b} rows {units.printable(name)[:40]}: not results of one stage of one workload"
        )
    far = Fraction(short.ga - short.written, long.written - short.written)
    error = max(abs(far), abs(1 - far)) * max(one.digit, other.digit)
    figures = {
        column: Estimate(value + far * (other.figures[column] - value), error) for column, value in one.figures.items()
    }
    return Extrapolation(MARK.sub("", one.name), short.ga, (short.written, long.written), figures)


def as_json(found: Extrapolation) -> dict[str, Any]:
    """Return the figures, us, for JSON."""
    figures = {column: {"us": float(one.value), "error_us": float(one.error)} for column, one in found.figures.items()}
    return {"name": found.name, "ga": found.ga, "micro_batches_written": list(found.written), "figures": figures}


def as_csv(found: Extrapolation) -> str:
    """Return the two lines of the simulator's summary: whole us, and shares of the total time."""
    total = found.figures[TOTAL].value
    cells = [found.name]
    for column, one in found.figures.items():
        share = f" ({100 * float(one.value / total):.2f}%)" if total and column != TOTAL else ""
        cells.append(f"{round(one.value)}{share}")
    return f"{','.join([FIRST, *found.figures])}\n{','.join(cells)}"


def as_table(found: Extrapolation) -> str:
    """Return the figures as a table."""
    rows = [
        (column, f"{float(one.value):.1f}", f"{float(one.error):.1f}", units.duration(float(one.value) * 1000))
        for column, one in found.figures.items()
    ]
    short, long = found.written
    head = f"{found.name}\nga {found.ga}, from simulations of {short} and {long} micro-batches"
    return f"{head}\n\n" + units.table(("figure", "us", "+- us", "time"), rows)
