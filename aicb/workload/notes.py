"""Where SimAI's analytical simulator counts otherwise than its users would think; no defect of a workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aicb import units
from aicb.step.collectives import Groups
from aicb.workload.rules import COLUMNS, FIELDS, SMALL_BYTES, SUFFIXES, TIME_MAX, is_digits

COUNTED_GROUPS = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of ranks for which the simulator has figures for a collective under 1 MiB; over others it takes no time."""
GPUS_A_SERVER = 8
NEAR = 0.9


def notes(groups: Groups, counted: Iterable[tuple[list[str], int]]) -> Iterator[str]:
    """Yield one line for each surprise. `counted`: the 12 fields of each row and its occurrences."""
    small: dict[str, int] = {}
    longest = (0, "")
    for fields, count in counted:
        row = dict(zip(FIELDS, fields, strict=True))
        for column in COLUMNS:
            kind, _, suffix = row[f"{column}_comm"].partition("_")
            group = SUFFIXES[column].get(f"_{suffix}" if suffix else "")
            time, size = row[f"{column}_time"], row[f"{column}_bytes"]
            if not (is_digits(time) and is_digits(size)) or len(time) > 18 or len(size) > 18:
                continue
            longest = max(longest, (int(time), f"{row['name'][:40]} {column}"))
            if kind != "NONE" and group and int(size) < SMALL_BYTES:
                small[group] = small.get(group, 0) + count
    for group, count in sorted(small.items()):
        ranks = getattr(groups, group.lower())
        if ranks not in (1, *COUNTED_GROUPS):
            yield (
                f"the simulator counts the {count:,} collectives under 1 MiB over {group} as 0: its groups have "
                f"{ranks} ranks, and it has figures for 2, 4, 8 ... 128"
            )
    if groups.tp > GPUS_A_SERVER and groups.tp % GPUS_A_SERVER:
        yield f"the simulator takes a TP group of {groups.tp} ranks for one node, whatever a server has"
    if longest[0] > NEAR * TIME_MAX:
        yield f"{longest[1]} takes {units.duration(longest[0])}: above {units.duration(TIME_MAX)} the simulator hangs"
