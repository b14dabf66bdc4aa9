"""What `generate` says about a workload it wrote: one dict, as JSON or as text."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from aicb import units
from aicb.config.job import Job
from aicb.config.parameters import whole_model_parameters
from aicb.step.kernels import optimizer_elements
from aicb.times.compute import ComputeTimes, unused_on_stage
from aicb.workload import simai
from aicb.workload.notes import notes as simulator_notes
from aicb.workload.rows import Iteration
from aicb.workload.rules import group_sizes

Summary = dict[str, Any]
GPUS_A_SERVER = 8
WALL_SECONDS, WALL_BYTES = 1.05, 92_000
"""What the analytical simulator (SimAI 1.6) took for a micro-batch: time with measured times, memory without."""
LONG = {True: 64, False: 4096}
"""Micro-batches from which on the summary names the way out: with measured times, and without."""


def summarise(job: Job, times: ComputeTimes, iteration: Iteration, path: Path, notes: tuple[str, ...]) -> Summary:
    """Return the summary of one written file; times in ns, sizes in bytes, both of the whole file."""
    repeat = job.training.epoch_num
    sent: Counter[str] = Counter()
    for (_, collective), count in iteration.collectives().items():
        sent[collective.group] += collective.bytes * count * repeat
    held = job.parameters()
    return {
        "file": str(path),
        "model": job.model.name,
        "parameters_total": whole_model_parameters(job.model),
        "parameters_rank": held.dense + held.expert,
        "parameters_rank_optimizer": optimizer_elements(job),
        "world_size": job.parallel.world_size,
        "dp": job.dp,
        "tp": job.tp,
        "pp": job.pp,
        "ep": job.ep,
        "sequence_parallel": job.sp,
        "ga": job.ga,
        "global_batch": job.training.global_batch,
        "micro_batch": job.training.micro_batch,
        "seq_length": job.training.seq_length,
        "dtype": job.training.dtype,
        "iterations": repeat,
        "micro_batches_written": iteration.micro_batches,
        "pp_rank": job.pp_rank,
        "vpp": job.vpp,
        "pp_comm_bytes": job.pp_comm,
        "layers": len(job.layers),
        "first_layer": job.layers.start,
        "embedding": job.is_first,
        "head": job.is_last,
        "rows": iteration.rows * repeat,
        "bytes_per_group": dict(sorted(sent.items())),
        "compute_ns": {column: ns * repeat for column, ns in iteration.compute_ns()._asdict().items()},
        "times_from": times.source,
        "gradients": times.gradients,
        "simulate": shlex.join(simulator_command(path, job)),
        "notes": [*notes, *_notes(job, times), *_simulator_notes(job, times, iteration)],
        "warnings": list(times.warnings),
    }


def simulator_command(path: Path, job: Job) -> list[str]:
    """Return the words that run the analytical simulator on the file, its result beside it under a name of its own."""
    words = ["SimAI_analytical", "-w", str(path), "-g", str(job.parallel.world_size)]
    return [*words, "-g_p_s", str(GPUS_A_SERVER), "-n_p_s", str(GPUS_A_SERVER), "-r", f"{path.with_suffix('')}-"]


def result_path(path: Path) -> Path:
    """Return where `simulator_command` leaves the result."""
    return path.with_name(f"{path.stem}-EndToEnd.csv")


def _simulator_notes(job: Job, times: ComputeTimes, iteration: Iteration) -> list[str]:
    groups = group_sizes(simai.header(job, 1))
    notes = list(simulator_notes(groups, [(simai.row_fields(row), count) for row, count in iteration.counted()]))
    micro_batches = iteration.micro_batches * job.training.epoch_num
    if iteration.micro_batches != job.ga:
        notes.append(
            f"rows of {iteration.micro_batches} of {job.ga} micro-batches: only aicb extrapolate knows the rest"
        )
    elif micro_batches >= LONG[times.fixed is None]:
        cost = f"{units.duration(micro_batches * WALL_SECONDS * 1e9)} of waiting"
        if times.fixed is not None:
            cost = f"{units.size(micro_batches * WALL_BYTES)} of memory"
        notes.append(
            f"simulating {micro_batches:,} micro-batches costs about {cost}; --short writes two short files whose "
            "results give the same figures"
        )
    return notes


def _notes(job: Job, times: ComputeTimes) -> list[str]:
    notes = list(times.notes)
    elsewhere = unused_on_stage(job, times)
    if elsewhere:
        notes.append(f"measured, but run on other stages or not at all here: {', '.join(elsewhere)}")
    here = [kernel.name for kernel in times.table if kernel.rows and times.kernels]
    unmeasured = [name for name in here if name not in times.kernels]
    if unmeasured:
        notes.append(f"not measured by this profile, counted as 0: {', '.join(unmeasured)}")
    if job.pp > 1:
        notes.append("one file shows one stage (--pp_rank)")
        if job.vpp > 1 and job.parallel.num_layers_per_virtual_pipeline_stage == 1:
            notes.append(
                f"vpp {job.vpp} is this format's default, one layer a model chunk: the simulated bubble shrinks by it; "
                f"without interleaving pass --num_layers_per_virtual_pipeline_stage {len(job.layers)}"
            )
        if not job.model.untie_embeddings_and_output_weights and (job.is_first or job.is_last):
            notes.append("the tied embedding's all-reduce between first and last stage has no word in this format")
    experts = sum(job.model.has_experts(layer) for layer in job.layers)
    if experts and job.model.moe_router_enable_expert_bias:
        size = units.size(job.element_bytes * job.model.num_experts * experts)  # Float16Module casts the counters
        notes.append(f"the router bias's token counts, {size} all-reduced over TP x DP once a step, have no word here")
    if experts:
        skew = job.training.moe_load_imbalance
        notes.append("routing: uniform" if skew == 1 else f"routing: the busiest rank gets {skew:g} x the mean")
    return notes


def render(summary: Summary) -> str:
    """Return the summary as aligned lines."""
    s = summary
    parts = [f"layers {s['first_layer']} to {s['first_layer'] + s['layers'] - 1}"]
    parts += ["embedding"] * s["embedding"] + ["head"] * s["head"]
    groups = ", ".join(f"{group} {units.size(size)}" for group, size in s["bytes_per_group"].items())
    compute = ", ".join(f"{column} {units.duration(ns)}" for column, ns in s["compute_ns"].items())
    if s["gradients"] == "fixed":
        compute = "not measured: every time in the file is a placeholder (give a profile: --comp_filepath)"
    lines = {
        "model": f"{s['model']}, {s['parameters_total']:,} parameters; this rank {s['parameters_rank']:,}, "
        f"its optimizer shard {s['parameters_rank_optimizer']:,}",
        "split": f"{s['world_size']} GPUs = DP {s['dp']} x TP {s['tp']} x PP {s['pp']}, EP {s['ep']}, "
        f"sequence parallel {'on' if s['sequence_parallel'] else 'off'}",
        "batch": f"global {s['global_batch']}, micro {s['micro_batch']}, ga {s['ga']}, sequence {s['seq_length']}, "
        f"{s['dtype']}",
        "stage": f"{s['pp_rank']} of {s['pp']}: {', '.join(parts)}; vpp {s['vpp']}, "
        f"pp_comm {units.size(s['pp_comm_bytes'])}",
        "rows": f"{s['rows']:,} ({s['iterations']} iteration{'s' if s['iterations'] > 1 else ''} of "
        f"{s['micro_batches_written']} micro-batch{'es' if s['micro_batches_written'] > 1 else ''})",
        "collectives": f"{groups} (sizes of the tensors)" if groups else "none",
        "compute": compute,
        "times": s["times_from"] + ("" if s["gradients"] == "fixed" else f"; gradients {s['gradients']}"),
    }
    text = [f"{name:<12}{value}" for name, value in lines.items()]
    text += [f"{'note':<12}{note}" for note in s["notes"]]
    return "\n".join([*text, f"{'simulate':<12}{s['simulate']}", f"{'file':<12}{s['file']}"])
