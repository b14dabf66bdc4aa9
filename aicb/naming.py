"""The names of files: what this format's users know, and before `world_size` whatever sets two workloads apart.

SimAI's analytical simulator calls its result after the text before `world_size` and the numbers tp, pp, ep, gbs and mbs
behind it (dp and ga follow from them), whatever else the name says. So what is not the default stands before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from aicb.config.configure import Configured
from aicb.config.job import Job
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig

MODEL_MARKS_MAX, MARKS_MAX = 60, 120  # characters; a digest stands for what is longer
# In the result's name already; SP is marked where it has an effect.
_CARRIED = {"world_size", "tensor_model_parallel_size", "pipeline_model_parallel", "expert_model_parallel_size"}
_CARRIED |= {"global_batch", "enable_sequence_parallel"}
# As their users know them; any other is its name and value.
_SHORT = {"epoch_num": "iter{}", "recompute_granularity": "recompute_{}", "dtype": "{}", "micro_batch": "mbs{}"}
_SHORT |= {"seq_length": "seq{}", "use_distributed_optimizer": "no_distributed_optimizer"}
_SHORT |= {"use_flash_attn": "no_flash_attn"}
# A model's name must not read as a mark of what the rest of the name says once more.
_LIKE_A_MARK = re.compile(
    r"-(?=(?:seq\d+|mbs\d+|float32|no_flash_attn|with_experts|moe_grouped_gemm|(?:model|marks)[0-9a-f]{8})(?:-|$))"
)


def label(name: str, value: Any) -> str:
    """Return an option and its value as file names carry them: num_layers24, no_swiglu, moe_layer_freq0x3_1x89."""
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, tuple):  # in runs
        runs: list[list[int]] = []
        for item in value:
            if runs and runs[-1][0] == item:
                runs[-1][1] += 1
            else:
                runs.append([item, 1])
        value = "_".join(f"{item}x{count}" for item, count in runs)
    return f"{name}{value}"


def job_marks(job: Job) -> list[str]:
    """Return what is not the default of the stage, the split and the training, apart from what every name carries."""
    marks = [f"pp_rank{job.pp_rank}"] * (job.pp_rank != 0) + ["sp"] * job.sp
    for config, default in ((job.training, TrainingConfig()), (job.parallel, ParallelConfig())):
        for field in fields(config):
            name, value = field.name, getattr(config, field.name)
            implied = name == "use_flash_attn" and job.training.dtype == "float32"
            if name not in _CARRIED and value != getattr(default, name) and not implied:
                marks.append(_SHORT[name].format(value) if name in _SHORT else label(name, value))
    return marks


def workload_name(job: Job, marks: Sequence[str], gpu: str | None) -> str:
    """Return the file name of the stage of `job`, such as gpt_7B-sp-world_size32-tp4-pp1-...-flash_attn-True.txt.

    `marks`: what sets it apart from a plain command. Names that are equal still may mean different workloads: writing
    refuses to replace one by another (simai.write).
    """
    parallel, training, model = job.parallel, job.training, job.model
    known = [
        f"world_size{parallel.world_size}-tp{job.tp}-pp{job.pp}-ep{job.ep}",
        f"gbs{training.global_batch}-mbs{training.micro_batch}-seq{training.seq_length}",
        f"MOE-{model.num_experts > 0}-GEMM-{model.moe_grouped_gemm}-flash_attn-{training.use_flash_attn}",
    ]
    return (
        "-".join([_head(([gpu] if gpu else []) + [model.name]), *_digest(marks, MARKS_MAX, "marks"), *known]) + ".txt"
    )


def profile_name(job: Job, marks: Sequence[str], gpu: str) -> str:
    """Return the file name of a profile measured on `gpu`: what its kernels' shapes depend on.

    `marks`: what sets the model apart from its preset.
    """
    training = job.training
    parts = [gpu, job.model.name, *marks]
    parts += [f"tp{job.tp}-ep{job.ep}-mbs{training.micro_batch}-seq{training.seq_length}"]
    parts += [training.dtype, f"flash_attn-{training.use_flash_attn}"] + ["sp"] * job.sp
    return "-".join(parts) + ".txt"


def _head(names: list[str]) -> str:
    return _LIKE_A_MARK.sub("_", "-".join(names)).replace("world_size", "world-size")


def _digest(marks: Sequence[str], most: int, word: str) -> list[str]:
    """Return `marks`, or where they are longer than `most` one mark that stands for them."""
    text = "-".join(marks)
    return [f"{word}{hashlib.sha256(text.encode()).hexdigest()[:8]}"] if len(text) > most else list(marks)


def model_marks(configured: Configured) -> list[str]:
    """Return what sets the model apart from its preset or file.

    A name that is not a preset's says neither whether there are experts nor how their GEMMs run: the end of a file's
    name does, and the result's name does not.
    """
    apart, model = configured.apart, configured.job.model
    marks = [label(name, value) for name, value in apart.items()]
    if not configured.of_preset:
        marks += ["with_experts"] * (model.num_experts > 0 and "num_experts" not in apart)
        marks += ["moe_grouped_gemm"] * (model.moe_grouped_gemm and "moe_grouped_gemm" not in apart)
    return _digest(marks, MODEL_MARKS_MAX, "model")


def gpu_slug(name: str) -> str:
    """Return a GPU's name as file names carry it: NVIDIA H100 80GB HBM3 is H100-80GB-HBM3."""
    words = "".join(c if c.isalnum() or c in "._" else " " for c in name).split()
    kept = [word.strip(".") for word in words if word.upper() not in ("NVIDIA", "GEFORCE", "TESLA")]
    return "-".join(word for word in kept if word) or "unknown"
