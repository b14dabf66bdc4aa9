"""Every builder and a whole layer of one configuration on a CUDA device that is none: `python -m ... LIBRARY OPTIONS`.

Prints one JSON object: for each kernel and the layer, the devices and types of its tensors, the gradients that came,
the memory that was held at once (bytes) and the memory that was said before. Needs a process of its own.
"""

# ruff: noqa: E402 (the library comes before torch)

from __future__ import annotations

import ctypes
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

ORIGIN = cast("str", cast("Any", find_spec("torch")).origin)
ctypes.CDLL(str(Path(ORIGIN).parent / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from aicb.config.configure import configure
from aicb.config.job import Job
from aicb.step.kernels import kernel_table
from profiler import footprint
from profiler.accumulation import add_in_gemm
from profiler.attention import Unfused
from profiler.builders import Built, build
from profiler.candidates import Choice
from profiler.footprint import PeakMemory, call_all, kernel_bytes, layer_bytes, one_thread
from profiler.fusion import Elementwise
from profiler.grouped import Grouped, Loop
from profiler.implementations import Choices
from profiler.layer import build_layer

DEVICE = torch.device("cuda", 0)


def choices_of(job: Job) -> Choices:
    """What an H100 without extensions would run, but for flash attention's own kernels."""
    unused = Choice("stand-in", "no GPU")
    norm = partial(getattr(nn, job.model.normalization), device=DEVICE, dtype=torch.bfloat16)  # not to be moved there
    grouped = Grouped(functional.grouped_mm) if job.model.moe_grouped_gemm else Loop(add_in_gemm)
    flash = job.training.use_flash_attn
    return Choices(
        attention=unused,
        norm=unused,
        grouped_gemm=unused,
        weight_grad=unused,
        elementwise=unused,
        optimizer=unused,
        attend=footprint._flash if flash else Unfused(),
        norms={k.shape["width"]: partial(norm, k.shape["width"]) for k in kernel_table(job) if k.op == "norm"},
        experts=grouped,
        accumulate=add_in_gemm,
        fused=Elementwise(),
        make_optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
    )


def seen(built: Built) -> dict[str, Any]:
    """Where the tensors lie and of what type they are, and how many gradients each call gives."""
    call_all(built)
    found: dict[str, Any] = {
        "devices": sorted({str(tensor.device) for tensor in built.tensors.values()}),
        "types": {name: str(tensor.dtype) for name, tensor in built.tensors.items()},
    }
    for way in ("input_grad", "weight_grad"):
        call = getattr(built, way)
        if call is not None:
            gradients = cast("tuple[Tensor, ...]", call())
            found[way] = [[str(one.device), list(one.shape)] for one in gradients]
    return found


def main() -> None:
    """Print what was found."""
    job = configure(json.loads(sys.argv[2])).job
    report: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), one_thread():
        choices = choices_of(job)
        for kernel in kernel_table(job):
            with PeakMemory() as memory:
                one = seen(build(kernel, job, DEVICE, choices))
            report[kernel.name] = {**one, "op": kernel.op, "peak": memory.peak}
        for index in {0, job.model.num_layers - 1}:
            with PeakMemory() as memory:
                one = seen(build_layer(job, DEVICE, choices, index))
            report[f"layer {index}"] = {**one, "op": "layer", "peak": memory.peak}
    for kernel in kernel_table(job):
        report[kernel.name]["said"] = kernel_bytes(kernel, job, DEVICE, choices)
    for index in {0, job.model.num_layers - 1}:
        report[f"layer {index}"]["said"] = layer_bytes(job, DEVICE, choices, index)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
