"""The name of the workload file: what this format's users know, plus what else sets two workloads apart."""

from __future__ import annotations

from aicb.config.job import Job


def workload_name(job: Job, gpu: str | None, fixed_times: bool) -> str:
    """Return the file name of the stage of `job`, such as gpt_7B-world_size32-tp4-pp1-...-flash_attn-True.txt.

    Placeholder times, SP, recompute and an undistributed optimizer are marked after it; whatever else differs, writing
    refuses to replace another workload (simai.write).
    """
    parallel, training, model = job.parallel, job.training, job.model
    known = [
        f"{model.name}-world_size{parallel.world_size}-tp{job.tp}-pp{job.pp}-ep{job.ep}",
        f"gbs{training.global_batch}-mbs{training.micro_batch}-seq{training.seq_length}",
        f"MOE-{model.num_experts > 0}-GEMM-{model.moe_grouped_gemm}-flash_attn-{training.use_flash_attn}",
    ]
    marks = {
        f"pp_rank{job.pp_rank}": job.pp_rank != 0,
        f"iter{training.epoch_num}": training.epoch_num != 1,
        "sp": job.sp,
        f"recompute_{training.recompute_granularity}": training.recompute_granularity != "none",
        "no_distributed_optimizer": not training.use_distributed_optimizer,
        training.dtype: training.dtype != "bfloat16",
        "fixed_compute": fixed_times,
    }
    parts = ([gpu] if gpu else []) + known + [mark for mark, given in marks.items() if given]
    return "-".join(parts) + ".txt"


def profile_name(job: Job, gpu: str) -> str:
    """Return the file name of a profile measured on `gpu`: what its kernels' shapes depend on."""
    training = job.training
    parts = [gpu, f"{job.model.name}-tp{job.tp}-ep{job.ep}-mbs{training.micro_batch}-seq{training.seq_length}"]
    parts += [training.dtype, f"flash_attn-{training.use_flash_attn}"] + ["sp"] * job.sp
    return "-".join(parts) + ".txt"


def gpu_slug(name: str) -> str:
    """Return a GPU's name as file names carry it: NVIDIA H100 80GB HBM3 is H100-80GB-HBM3."""
    words = "".join(c if c.isalnum() or c in "._" else " " for c in name).split()
    kept = [word.strip(".") for word in words if word.upper() not in ("NVIDIA", "GEFORCE", "TESLA")]
    return "-".join(word for word in kept if word) or "unknown"
