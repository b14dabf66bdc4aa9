"""The rules of the SimAI workload text: one list, kept by the writer and held against any file by the checker.

The simulator never reports a bad row. What it misreads or dies of is an error; what its analytical build survives is
a warning, though ns-3 or another reader may not. The writer refuses both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from aicb.step.collectives import Groups

KEYWORD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
FIELDS = (
    *("name", "placeholder", "fwd_time", "fwd_comm", "fwd_bytes", "ig_time", "ig_comm", "ig_bytes"),
    *("wg_time", "wg_comm", "wg_bytes", "process_time"),
)
REQUIRED_KEYS = ("model_parallel_NPU_group", "ep", "pp", "vpp", "ga", "all_gpus")
HEADER_KEYS = (*REQUIRED_KEYS, "checkpoints", "checkpoint_initiates", "pp_comm")
INT_MAX = 2**31 - 1  # the header is read with std::stoi
TIME_MAX = INT_MAX - 64  # above it the simulator hangs or ends without a result
GROUP_BYTES_MAX = 16 * 2**30  # of one gather, scatter or all-to-all over TP, or all-to-all over EP
SMALL_BYTES = 2**20  # under it the simulator counts with other rules
SIZE_MAX = 2**63 - 1
KINDS = ("ALLREDUCE", "ALLGATHER", "REDUCESCATTER", "ALLTOALL")
COLUMNS = ("fwd", "ig", "wg")
# Which group a word's suffix names, by column; a suffix that is not listed there means something else to the simulator.
SUFFIXES = {"fwd": {"": "TP", "_EP": "EP"}, "ig": {"": "TP", "_EP": "EP"}, "wg": {"": "DP", "_DP_EP": "DP_EP"}}
ERROR, WARNING, NOTE = "error", "warning", "note"


class Fault(NamedTuple):
    """What is wrong, in one line, and how bad: ERROR, or WARNING where the simulator survives it."""

    text: str
    level: str = ERROR


def is_digits(text: str) -> bool:
    """Plain decimal digits, the only number the simulator reads right."""
    return text.isascii() and text.isdigit()


def survives_stoi(text: str) -> bool:
    """Whether std::stoi makes of `text`, which is no plain whole number, the number that it means: +2, 8388608.0."""
    found = re.fullmatch(r"\+?(\d{1,10})(\.0*)?", text, re.ASCII)
    return found is not None and int(found[1]) <= INT_MAX


def header_faults(values: Mapping[str, int | None]) -> list[Fault]:
    """Return what is wrong with a header; a value of None could not be read and is the reader's to report."""
    known = {key: value for key, value in values.items() if value is not None}
    over = {key: value for key, value in known.items() if value > INT_MAX}
    faults = [Fault(f"{key}: {value} is above {INT_MAX}: the simulator aborts") for key, value in over.items()]
    for key in REQUIRED_KEYS:
        level, effect = ERROR, "the simulator crashes or prints NaN"
        if key == "all_gpus":
            level, effect = WARNING, "ns-3 needs it; the analytical simulator does not use it"
        if key not in values:
            faults.append(Fault(f"header has no {key}: ({effect})", level))
        elif known.get(key) == 0:
            faults.append(Fault(f"{key}: 0 must be at least 1 ({effect})", level))
    if "pp_comm" not in values:
        effect = "bytes of one stage-to-stage send; 0 with one stage"
        faults.append(Fault(f"header has no pp_comm: ({effect})", WARNING))
    elif known.get("pp") and "pp_comm" in known and (known["pp"] > 1) != (known["pp_comm"] > 0):
        needed = "bytes of one stage-to-stage send" if known["pp"] > 1 else "0"
        faults.append(Fault(f"pp_comm: {known['pp_comm']} with pp: {known['pp']} must be {needed}", WARNING))
    unused = {key: known.get(key, 0) for key in ("checkpoints", "checkpoint_initiates")}
    faults += [Fault(f"{key}: {value} must be 0") for key, value in unused.items() if 0 < value <= INT_MAX]
    return faults if any(fault.level == ERROR for fault in faults) else faults + _faults_together(known)


def _faults_together(known: Mapping[str, int]) -> list[Fault]:
    """Return what does not fit together in a header whose values are sound one by one."""
    if not all(known.get(key) for key in REQUIRED_KEYS):
        return []
    tp, pp, ep, world = (known[key] for key in ("model_parallel_NPU_group", "pp", "ep", "all_gpus"))
    faults = []
    if known["ga"] * known["vpp"] > INT_MAX:
        effect = "the simulator multiplies them in 32 bits and gets a negative bubble, or NaN"
        faults.append(Fault(f"ga: {known['ga']} x vpp: {known['vpp']} is above {INT_MAX}: {effect}"))
    if world % (tp * pp):
        faults.append(Fault(f"all_gpus: {world} is no multiple of model_parallel_NPU_group: {tp} x pp: {pp}"))
    elif world // (tp * pp) % ep:
        faults.append(Fault(f"ep: {ep} does not divide the {world // (tp * pp)} data-parallel ranks"))
    return faults


def group_sizes(values: Mapping[str, int]) -> Groups:
    """Return the group sizes of a sound header."""
    tp, pp, ep = (values[key] for key in ("model_parallel_NPU_group", "pp", "ep"))
    dp = values["all_gpus"] // (tp * pp)
    return Groups(tp, ep, dp, dp // ep)


def row_faults(fields: list[str], groups: Groups | None) -> list[Fault]:
    """Return what is wrong with one row; `groups` None when the header could not be read."""
    if len(fields) != len(FIELDS):
        return [Fault(f"{len(fields)} fields, expected {len(FIELDS)}: {' '.join(FIELDS)}")]
    faults = []
    if "," in fields[0]:
        faults.append(Fault(f"name {fields[0][:40]!r} holds a comma: it shifts the columns of the result", WARNING))
    faults += _placeholder_faults(fields[1])
    for i, column in ((2, "fwd"), (5, "ig"), (8, "wg")):
        time, kind, size = fields[i : i + 3]
        hangs = ": the simulator hangs or ends without a result"
        faults += _number_faults(f"{column}_time", time, TIME_MAX, hangs)
        of_size = _number_faults(f"{column}_bytes", size, SIZE_MAX)
        faults += of_size or _word_faults(column, kind, int(size), groups)
    return faults + _number_faults("process_time", fields[11], INT_MAX)


def _placeholder_faults(text: str) -> list[Fault]:
    digits = text.removeprefix("-")
    if not is_digits(digits):
        return [Fault(f"placeholder {text[:40]!r} is no integer (by convention -1)")]
    significant = digits.lstrip("0") or "0"
    if len(significant) > 10 or int(significant) > INT_MAX + text.startswith("-"):
        effect = "the simulator loses this row and all that follow"
        return [Fault(f"placeholder {text[:40]} is outside 32 bits: {effect} (by convention -1)")]
    return []


def _number_faults(name: str, text: str, limit: int, effect: str = "") -> list[Fault]:
    """Return what is wrong with one number."""
    if not is_digits(text):
        return [Fault(f"{name} {text[:40]!r} is no plain whole number")]
    digits = text.lstrip("0")  # int() refuses digits by the thousand
    above = len(digits) > 19 or int(digits or "0") > limit
    return [Fault(f"{name} {text[:40]} is above {limit}{effect}")] if above else []


def _word_faults(column: str, kind: str, size: int, groups: Groups | None) -> Iterator[Fault]:
    """Yield what is wrong with one communication word and its size."""
    if kind == "NONE":
        if size:
            yield Fault(f"{column}_bytes is {size} beside NONE: must be 0", WARNING)
        return
    name = next((name for name in KINDS if kind == name or kind.startswith(f"{name}_")), None)
    suffix = kind[len(name) :] if name else ""
    if name is None or suffix not in ("", "_EP", "_DP_EP"):
        yield Fault(f"{column}_comm {kind[:40]!r} is no communication word: it would silently cost nothing")
        return
    group = SUFFIXES[column].get(suffix)
    if group is None:
        yield Fault(f"{column}_comm {kind}: the suffix {suffix} has no meaning in column {column}")
        return
    alone = groups is not None and getattr(groups, group.lower()) == 1
    level = ERROR if alone and group == "TP" and not 0 < size < SMALL_BYTES else WARNING  # NaN
    if size == 0:
        yield Fault(f"{column}_bytes is 0 beside {kind}: write NONE 0 (ns-3 stops on it)", level)
    if alone:
        yield Fault(f"{column}_comm {kind}: its {group} group has one rank: write NONE 0", level)
    limited = (group == "TP" and name != "ALLREDUCE") or (group == "EP" and name == "ALLTOALL")
    if limited and size > GROUP_BYTES_MAX:
        over = f"above {GROUP_BYTES_MAX} (16 GiB): the simulator ends without a result"
        yield Fault(f"{column}_bytes {size} of {kind} is {over}")
