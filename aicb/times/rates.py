"""What a profile's times mean: achieved TFLOP/s and GB/s of each kernel, and the share of the GPU's peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from aicb import units
from aicb.config.job import Job
from aicb.config.model import ModelConfig
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig
from aicb.errors import UserError
from aicb.step.kernels import GEMM, NONE, STEP_END, WEIGHT, Kernel, kernel_table
from aicb.times.profile import KernelTime, Profile

FORWARD = "forward"


class Peak(NamedTuple):
    """Dense peak rates of one GPU."""

    tflops_16bit: float
    """bfloat16 and float16 tensor cores without sparsity, fp32 accumulation, TFLOP/s."""
    gb_per_s: float
    """Memory bandwidth, GB/s (10^9)."""


# By the name CUDA reports. Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU" (2023),
# "H200 Tensor Core GPU" (2024), "DGX B200" (2024, an eighth of the system: 64 TB/s, 18 PFLOP/s dense 16 bit), "L40S"
# (2023), and the whitepaper "Ada GPU Architecture" (2022) for the RTX 4090; "H100 NVL" and "GH200 Grace Hopper" (2023),
# "HGX B300" (2025, an eighth), "GB200 NVL72" (2024, a 72nd). H800 and A800 differ from H100 and A100 in NVLink alone;
# the H20's are as published by its vendors (2024). Figures given with sparsity are halved.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": Peak(312, 1555),
    "NVIDIA A100-PCIE-40GB": Peak(312, 1555),
    "NVIDIA A100-SXM4-80GB": Peak(312, 2039),
    "NVIDIA A100 80GB PCIe": Peak(312, 1935),
    "NVIDIA A800-SXM4-80GB": Peak(312, 2039),
    "NVIDIA A800 80GB PCIe": Peak(312, 1935),
    "NVIDIA H100 80GB HBM3": Peak(989.5, 3350),
    "NVIDIA H100 PCIe": Peak(756.5, 2000),
    "NVIDIA H100 NVL": Peak(835.5, 3900),
    "NVIDIA H800": Peak(989.5, 3350),
    "NVIDIA H800 PCIe": Peak(756.5, 2000),
    "NVIDIA H20": Peak(148, 4000),
    "NVIDIA GH200 480GB": Peak(989.5, 4000),
    "NVIDIA GH200 144G HBM3e": Peak(989.5, 4900),
    "NVIDIA H200": Peak(989.5, 4800),
    "NVIDIA B200": Peak(2250, 8000),
    "NVIDIA B300 SXM6 AC": Peak(2250, 8000),
    "NVIDIA GB200": Peak(2500, 8000),
    "NVIDIA L40S": Peak(362.05, 864),
    "NVIDIA GeForce RTX 4090": Peak(165.2, 1008),
}


class Rate(NamedTuple):
    """Achieved rate of one kernel's forward (or gradient)."""

    tflops: float | None
    """None where the kernel is bound by memory or its work is not known."""
    gb_per_s: float | None
    share: float | None
    """Of the GPU's peak of the same kind; None: unknown."""


def peak_of(profile: Profile) -> Peak | None:
    """Return the peaks of the profile's GPU; None, not a guess, when it is not in the table."""
    return PEAKS.get(profile.origin.get("gpu", ""))


def table_of(profile: Profile) -> dict[str, Kernel]:
    """Rebuild the kernel table of the slice that the profile states; empty when it states none or a broken one."""
    try:
        job = job_of(profile.origin, profile.sections)
        table = {kernel.name: kernel for kernel in kernel_table(job)}
    except (KeyError, ValueError, TypeError):  # absent, refused by a rule, or no number where one belongs
        return {}
    for name, line in STEP_END.items():  # their sizes are no part of the slice
        kernel, stated = table.pop(name), units.whole_number(profile.origin.get(line, ""))
        if stated:
            table[name] = _resized(kernel, stated)
    return table


def _resized(kernel: Kernel, elements: int) -> Kernel:
    per_element = kernel.bytes // kernel.shape["elements"]
    return replace(kernel, shape={**kernel.shape, "elements": elements}, bytes=per_element * elements)


def job_of(origin: Mapping[str, str], sections: Mapping[str, KernelTime]) -> Job:
    """Build a one-layer job with the slice that `origin` states. Raises KeyError, ValueError where it does not."""
    values = {name: _value(text) for name, text in origin.items()}
    given = {field.name: values[field.name] for field in fields(ModelConfig) if field.name in values}
    pattern = (0, 1) if "dense_linear_1" in sections else (1,)
    sizes: dict[str, Any] = {
        "name": "profile",
        "num_layers": len(pattern),
        "vocab_size": values["padded_vocab_size"],
        "make_vocab_size_divisible_by": 1,
        "max_position_embeddings": values["seq_length"],
        "moe_layer_freq": pattern if given.get("num_experts") else (),
    }
    given.setdefault("ffn_hidden_size", given.get("moe_ffn_hidden_size"))
    tp, ep = values["tensor_model_parallel_size"], values["expert_model_parallel_size"]
    parallel = ParallelConfig(
        world_size=tp * ep,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        enable_sequence_parallel=values["enable_sequence_parallel"],
    )
    training = TrainingConfig(
        global_batch=values["micro_batch"] * ep,
        micro_batch=values["micro_batch"],
        seq_length=values["seq_length"],
        dtype=values["dtype"],
        use_flash_attn="atten_flash" in sections,
    )
    return Job(model=ModelConfig(**{**sizes, **given}), parallel=parallel, training=training)


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if (number := units.whole_number(text)) is not None:
        return number
    try:
        return float(text)
    except ValueError:
        return text


def rates(profile: Profile) -> dict[str, dict[str, Rate]]:
    """Return, by section, the rates of `forward`, `input_grad` and `weight_grad` where they are known."""
    peak, found = peak_of(profile), {}
    for name, kernel in table_of(profile).items():
        section = profile.sections.get(name)
        if section is not None:
            found[name] = _rates(kernel, section, peak, profile.origin.get("dtype", ""))
    return found


def _rates(kernel: Kernel, section: KernelTime, peak: Peak | None, dtype: str) -> dict[str, Rate]:
    known = peak if dtype in ("bfloat16", "float16") else None  # float32 depends on TF32, which the table cannot know
    result = {}
    if section.forward > 0:
        result[FORWARD] = _rate(kernel.flops, kernel.bytes, section.forward, known)
    for name, us in (("input_grad", section.input_grad), ("weight_grad", section.weight_grad)):
        if (
            us
            and kernel.flops
            and kernel.gradients not in (NONE, WEIGHT)
            and (name == "input_grad" or kernel.gradients == GEMM)
        ):
            result[name] = _rate(kernel.gradient_flops(), 0, us, known)
    return result


def _rate(flops: int, traffic: int, us: float, peak: Peak | None) -> Rate:
    if flops:
        tflops = flops / us / 1e6
        return Rate(tflops, traffic / us / 1e3 if traffic else None, tflops / peak.tflops_16bit if peak else None)
    gb_per_s = traffic / us / 1e3
    return Rate(None, gb_per_s, gb_per_s / peak.gb_per_s if peak else None)


class Ratio(NamedTuple):
    """One kernel in two profiles: times in us, None where it is absent."""

    name: str
    part: str
    a: float | None
    b: float | None


def compare(a: Profile, b: Profile) -> tuple[list[Ratio], list[tuple[str, str, str]]]:
    """Return kernel by kernel times of two profiles, and each origin key that differs with both values.

    Raises UserError: no section is in both.
    """
    if not a.sections.keys() & b.sections.keys():
        raise UserError(f"{a.path} and {b.path} have no section in common")
    ratios = []
    for name in dict.fromkeys((*a.sections, *b.sections)):
        one, other = a.sections.get(name), b.sections.get(name)
        for part in (FORWARD, "input_grad", "weight_grad"):
            times = [getattr(section, part) if section else None for section in (one, other)]
            if any(time is not None for time in times):
                ratios.append(Ratio(name, part, *times))
    keys = dict.fromkeys((*a.origin, *b.origin))
    missing = "not stated"
    pairs = [(key, a.origin.get(key, missing), b.origin.get(key, missing)) for key in keys]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    return ratios, differing
