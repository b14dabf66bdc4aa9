"""Write the SimAI workload text.

Line 1: HYBRID_TRANSFORMER_FWD_IN_BCKWD and `key: value` pairs. Line 2: the number of rows. Then one row a line:
`name placeholder fwd_time fwd_comm fwd_bytes ig_time ig_comm ig_bytes wg_time wg_comm wg_bytes process_time`,
times in ns, sizes in bytes. Nothing is written that breaks a rule (rules.py): the simulator never reports a bad row.
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
from aicb.workload.rules import COLUMNS, INT_MAX, KEYWORD, SUFFIXES, group_sizes, header_faults, row_faults

HEADER_FLAGS = {  # what a value that is too large follows from
    "pp_comm": "; lower --micro_batch, --seq_length or --hidden_size",
    "all_gpus": "; lower --world_size",
    "ga": "; lower --global_batch",
}
CHUNK = 1 << 20


def header(
    job: Job, iterations: int, min_comm_bytes: int = 0, micro_batches_written: int | None = None
) -> dict[str, int]:
    """Return the header of the stage of `job`. Keys from pp_rank on are ours; the simulator ignores them.

    `micro_batches_written`: how many micro-batches of rows a short file has, in place of ga; None: it is no short one.
    """
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
        **({} if micro_batches_written is None else {"micro_batches_written": micro_batches_written}),
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


def text(values: Mapping[str, int], iteration: Iteration, iterations: int) -> Iterator[bytes]:
    """Yield the workload in chunks of about 1 MiB, whatever its length. Raises UserError where a rule is broken."""
    rows = iteration.rows * iterations
    require(
        rows <= INT_MAX,
        f"{rows} rows are more than the simulator can count ({INT_MAX}): lower --epoch_num, or --global_batch "
        "for fewer micro-batches",
    )
    for fault in header_faults(values):
        flags = next((flags for key, flags in HEADER_FLAGS.items() if fault.text.startswith(key)), "")
        raise UserError(f"the simulator cannot read this workload: {fault.text}{flags}")
    groups = group_sizes(values)
    head, body, tail = (_lines(part, groups) for part in (iteration.start, iteration.micro_batch, iteration.end))
    pairs = " ".join(f"{key}: {value}" for key, value in values.items())
    yield f"{KEYWORD} {pairs}\n{rows}\n".encode()
    at_once = max(1, CHUNK // max(1, len(body)))
    many = body * min(at_once, iteration.micro_batches)
    for _ in range(iterations):
        yield head
        for _ in range(iteration.micro_batches // at_once):
            yield many
        yield body * (iteration.micro_batches % at_once) + tail


def _lines(rows: tuple[Row, ...], groups: Groups) -> bytes:
    seen: dict[Row, str] = {}  # layers repeat
    for row in rows:
        if row not in seen:
            fields = row_fields(row)
            for fault in row_faults(fields, groups):
                advice = "lower --micro_batch or --seq_length, or split the model over more ranks"
                if "_time" in fault.text:
                    advice = "look at the profile or --fixed_compute_ns, or split the model over more ranks"
                raise UserError(f"row {row.name}: {fault.text}; {advice}")
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
