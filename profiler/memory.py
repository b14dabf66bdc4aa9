"""Whether kernels fit into the device's memory, and what the device itself says when something fails on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from aicb.errors import UserError
from profiler.device import Device

GIB = 2**30
_NO_MEMORY = ("out of memory", "allocate memory", "STATUS_ALLOC_FAILED")
_OF_DEVICE = ("CUDA", "cuDNN", "CUDNN", "CUBLAS", "NCCL")


def check_memory(needs: Mapping[str, int], device: Device) -> None:
    """Raise UserError when a kernel needs more memory than is free: `needs` in bytes, by name."""
    free = device.free_bytes()
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > free:
        raise UserError(_too_little(f"{largest} needs {needs[largest] / GIB:.2f} GiB", device, free))


def _too_little(what: str, device: Device, free: int) -> str:
    return (
        f"{what} and {device.name} has {free / GIB:.2f} GiB free: lower --micro_batch or --seq_length, or raise "
        "--tensor_model_parallel_size (--tp)"
    )


@contextmanager
def device_errors(what: str, device: Device) -> Iterator[None]:
    """Turn an allocation that fails all the same, and what the device or its libraries refuse, into a user's error."""
    free = device.free_bytes()
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(_too_little(f"{what} ran out of memory: {first_line(error)};", device, free)) from error
        if any(word in str(error) for word in _OF_DEVICE):
            raise UserError(f"{what} failed on {device.name}: {first_line(error)}") from error
        raise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: torch's own, the CPU's, the driver's, or one inside cuBLAS or cuDNN."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in _NO_MEMORY)


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0].rstrip(". ")
