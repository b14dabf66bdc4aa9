"""The SimAI workload text: its grammar, written once and checked by the same rules.

Line 1: HYBRID_TRANSFORMER_FWD_IN_BCKWD and `key: value` pairs. Line 2: the number of rows. Then one row a line:
`name placeholder fwd_time fwd_comm fwd_bytes ig_time ig_comm ig_bytes wg_time wg_comm wg_bytes process_time`,
times in ns, sizes in bytes. The simulator never reports a bad row, so nothing is written that breaks a rule here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from aicb import __version__
from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.files import atomic_write
from aicb.step.collectives import Collective, Groups
from aicb.workload.rows import Iteration, Row

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
SIZE_MAX = 2**63 - 1
HEADER_FLAGS = {  # what a value that is too large follows from
    "pp_comm": "; lower --micro_batch, --seq_length or --hidden_size",
    "all_gpus": "; lower --world_size",
    "ga": "; lower --global_batch",
}
KINDS = ("ALLREDUCE", "ALLGATHER", "REDUCESCATTER", "ALLTOALL")
COLUMNS = ("fwd", "ig", "wg")
# Which group a word's suffix names, by column; a suffix that is not listed there means something else to the simulator.
SUFFIXES = {"fwd": {"": "TP", "_EP": "EP"}, "ig": {"": "TP", "_EP": "EP"}, "wg": {"": "DP", "_DP_EP": "DP_EP"}}
CHUNK = 1 << 20


def header(job: Job, iterations: int, min_comm_bytes: int = 0) -> dict[str, int]:
    """Return the header of the stage of `job`. Keys from pp_rank on are ours; the simulator ignores them."""
    routing = {"moe_load_imbalance_permille": round(1000 * job.training.moe_load_imbalance)}
    return {
        "model_parallel_NPU_group": job.tp,
        "ep": job.ep,
        "pp": job.pp,
        "vpp": job.vpp,
        "ga": job.ga,
        "all_gpus": job.parallel.world_size,
        "checkpoints": 0,
        "checkpoint_initiates": 0,
        "pp_comm": job.pp_comm,
        "pp_rank": job.pp_rank,
        "iterations": iterations,
        **(routing if job.model.num_experts else {}),
        **({"min_comm_bytes": min_comm_bytes} if min_comm_bytes else {}),
        "aicb_version": version_number(__version__),
    }


def version_number(version: str) -> int:
    """The tool version as an integer, since a header holds nothing else: 1.2.3 is 10203."""
    major, minor, patch = (int(part) for part in version.split("."))
    return (major * 100 + minor) * 100 + patch


def word(column: str, sent: Collective | None) -> tuple[str, int]:
    """Return the communication word and size of a collective in `column`."""
    if sent is None:
        return "NONE", 0
    suffix = {group: suffix for suffix, group in SUFFIXES[column].items()}[sent.group]
    return sent.kind + suffix, sent.bytes


def row_fields(row: Row) -> list[str]:
    """Return the 12 fields of `row`."""
    fields = [row.name, "-1"]
    for column, time, sent in zip(COLUMNS, row.time, (row.fwd, row.ig, row.wg), strict=True):
        kind, size = word(column, sent)
        fields += [str(time), kind, str(size)]
    return [*fields, "100"]


def group_faults(column: str, kind: str, size: int, groups: Groups | None) -> Iterator[str]:
    """Yield what is wrong with one communication word and its size."""
    if kind == "NONE":
        if size:
            yield f"{column}_bytes is {size} beside NONE: must be 0"
        return
    name = next((name for name in KINDS if kind == name or kind.startswith(f"{name}_")), None)
    suffix = kind[len(name) :] if name else ""
    if name is None or suffix not in ("", "_EP", "_DP_EP"):
        yield f"{column}_comm {kind[:40]!r} is no communication word: it would silently cost nothing"
        return
    group = SUFFIXES[column].get(suffix)
    if group is None:
        yield f"{column}_comm {kind}: the suffix {suffix} has no meaning in column {column}"
        return
    if size == 0:
        yield f"{column}_bytes is 0 beside {kind}: write NONE 0"
    if groups is not None and getattr(groups, group.lower()) == 1:
        yield f"{column}_comm {kind}: its {group} group has one rank: write NONE 0"
    limited = (group == "TP" and name != "ALLREDUCE") or (group == "EP" and name == "ALLTOALL")
    if limited and size > GROUP_BYTES_MAX:
        over = f"above {GROUP_BYTES_MAX} (16 GiB): the simulator ends without a result"
        yield f"{column}_bytes {size} of {kind} is {over}"


def row_faults(fields: list[str], groups: Groups | None) -> list[str]:
    """Return what is wrong with one row; `groups` None when the header could not be read."""
    if len(fields) != len(FIELDS):
        return [f"{len(fields)} fields, expected {len(FIELDS)}: {' '.join(FIELDS)}"]
    faults = []
    if "," in fields[0]:
        faults.append(f"name {fields[0][:40]!r} holds a comma")
    if not is_digits(fields[1].removeprefix("-")):
        faults.append(f"placeholder {fields[1][:40]!r} is no integer (by convention -1)")
    for i, column in ((2, "fwd"), (5, "ig"), (8, "wg")):
        time, kind, size = fields[i : i + 3]
        hangs = ": the simulator hangs or ends without a result"
        faults += number_faults(f"{column}_time", time, TIME_MAX, hangs)
        of_size = number_faults(f"{column}_bytes", size, SIZE_MAX)
        faults += of_size or group_faults(column, kind, int(size), groups)
    return faults + number_faults("process_time", fields[11], INT_MAX)


def number_faults(name: str, text: str, limit: int, effect: str = "") -> list[str]:
    """Return what is wrong with one number."""
    if not is_digits(text):
        return [f"{name} {text[:40]!r} is no plain whole number"]
    digits = text.lstrip("0")  # int() refuses digits by the thousand
    above = len(digits) > 19 or int(digits or "0") > limit
    return [f"{name} {text[:40]} is above {limit}{effect}"] if above else []


def is_digits(text: str) -> bool:
    """Plain decimal digits, the only number the simulator reads right."""
    return text.isascii() and text.isdigit()


def header_faults(values: Mapping[str, int | None]) -> list[str]:
    """Return what is wrong with a header; a value of None could not be read and is the reader's to report."""
    known = {key: value for key, value in values.items() if value is not None}
    over = {key: value for key, value in known.items() if value > INT_MAX}
    faults = [f"{key}: {value} is above {INT_MAX}: the simulator aborts" for key, value in over.items()]
    for key in REQUIRED_KEYS:
        if key not in values:
            faults.append(f"header has no {key}: (the simulator crashes or prints NaN)")
        elif known.get(key) == 0:
            faults.append(f"{key}: 0 must be at least 1 (the simulator crashes or prints NaN)")
    if "pp_comm" not in values:
        faults.append("header has no pp_comm: (bytes of one stage-to-stage send; 0 with one stage)")
    elif known.get("pp") and "pp_comm" in known and (known["pp"] > 1) != (known["pp_comm"] > 0):
        needed = "bytes of one stage-to-stage send" if known["pp"] > 1 else "0"
        faults.append(f"pp_comm: {known['pp_comm']} with pp: {known['pp']} must be {needed}")
    unused = {key: known.get(key, 0) for key in ("checkpoints", "checkpoint_initiates")}
    faults += [f"{key}: {value} must be 0" for key, value in unused.items() if 0 < value <= INT_MAX]
    return faults or _split_faults(known)


def _split_faults(known: Mapping[str, int]) -> list[str]:
    """Return what does not divide in a header that is sound otherwise."""
    if not set(REQUIRED_KEYS) <= set(known):
        return []
    tp, pp, ep, world = (known[key] for key in ("model_parallel_NPU_group", "pp", "ep", "all_gpus"))
    if world % (tp * pp):
        return [f"all_gpus: {world} is no multiple of model_parallel_NPU_group: {tp} x pp: {pp}"]
    if world // (tp * pp) % ep:
        return [f"ep: {ep} does not divide the {world // (tp * pp)} data-parallel ranks"]
    return []


def group_sizes(values: Mapping[str, int]) -> Groups:
    """Return the group sizes of a sound header."""
    tp, pp, ep = (values[key] for key in ("model_parallel_NPU_group", "pp", "ep"))
    dp = values["all_gpus"] // (tp * pp)
    return Groups(tp, ep, dp, dp // ep)


def text(values: Mapping[str, int], iteration: Iteration, iterations: int) -> Iterator[bytes]:
    """Yield the workload in chunks of about 1 MiB, whatever its length. Raises UserError where a rule is broken."""
    rows = iteration.rows * iterations
    require(
        rows <= INT_MAX,
        f"{rows} rows are more than the simulator can count ({INT_MAX}): lower --epoch_num, or --global_batch "
        "for fewer micro-batches",
    )
    for fault in header_faults(values):
        flags = next((flags for key, flags in HEADER_FLAGS.items() if fault.startswith(key)), "")
        raise UserError(f"the simulator cannot read this workload: {fault}{flags}")
    groups = group_sizes(values)
    head, body, tail = (_lines(part, groups) for part in (iteration.start, iteration.micro_batch, iteration.end))
    pairs = " ".join(f"{key}: {value}" for key, value in values.items())
    yield f"{KEYWORD} {pairs}\n{rows}\n".encode()
    at_once = max(1, CHUNK // max(1, len(body)))
    many = body * min(at_once, iteration.ga)
    for _ in range(iterations):
        yield head
        for _ in range(iteration.ga // at_once):
            yield many
        yield body * (iteration.ga % at_once) + tail


def _lines(rows: tuple[Row, ...], groups: Groups) -> bytes:
    seen: dict[Row, str] = {}  # layers repeat
    for row in rows:
        if row not in seen:
            fields = row_fields(row)
            for fault in row_faults(fields, groups):
                advice = "lower --micro_batch or --seq_length, or split the model over more ranks"
                if "_time" in fault:
                    advice = "look at the profile or --fixed_compute_ns, or split the model over more ranks"
                raise UserError(f"row {row.name}: {fault}; {advice}")
            seen[row] = "\t".join(fields) + "\n"
    return "".join(seen[row] for row in rows).encode()


def same_content(path: Path, chunks: Iterator[bytes]) -> bool:
    """Whether the file `path` holds exactly `chunks`."""
    with path.open("rb") as file:
        return all(file.read(len(chunk)) == chunk for chunk in chunks) and not file.read(1)


def is_written(path: Path, values: Mapping[str, int], iteration: Iteration, iterations: int) -> bool:
    """Whether `path` holds this workload already. Raises UserError when it holds something else."""
    if not path.is_file():
        return False
    if not same_content(path, text(values, iteration, iterations)):
        raise UserError(
            f"{path} holds a different workload: pass --force to replace it, or another --result_dir or --model_name"
        )
    return True


def write(path: Path, values: Mapping[str, int], iteration: Iteration, iterations: int, force: bool = False) -> None:
    """Write the workload whole or not at all.

    Raises UserError when `path` holds something else and `force` is not given, or a rule of the format is broken.
    """
    if not force and is_written(path, values, iteration, iterations):
        return
    chunks = text(values, iteration, iterations)
    first = next(chunks)  # rules are checked before the folder or the file is touched
    try:
        with atomic_write(path, replace=force) as file:
            file.write(first)
            for chunk in chunks:
                file.write(chunk)
    except FileExistsError:  # written by another process since
        if not is_written(path, values, iteration, iterations):
            raise
