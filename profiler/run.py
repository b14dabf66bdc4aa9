"""Profile a job on this machine: every kernel of kernel_table, forward and gradients, on every rank; then one file.

python aicb.py --aiob_enable -m 7 --tp 4
torchrun --nproc_per_node 8 aicb.py --aiob_enable -m 7 --tp 4
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.files import atomic_write
from aicb.step.kernels import GEMM, INPUT, NONE, OPTIMIZER, WEIGHT, Kernel, kernel_table
from aicb.times.profile import write_profile
from profiler.builders import Built, build, needed_bytes
from profiler.device import DEVICES, Device, pick_device
from profiler.implementations import Choices, choose
from profiler.layer import build_layer
from profiler.measure import COLD, HOT, MIN_SAMPLES, Budget, Samples, measure
from profiler.progress import progress
from profiler.ranks import Ranks, host, process_group
from profiler.report import FORWARD, INPUT_GRAD, WEIGHT_GRAD, RankResult, layer_kernels, profile_of, raw_json

CAP_S = 0.3
"""How long one measurement may wait for its spread to settle."""
WAYS = {GEMM: (INPUT_GRAD, WEIGHT_GRAD), INPUT: (INPUT_GRAD,), WEIGHT: (WEIGHT_GRAD,), NONE: ()}
LAYER = "whole layer"
_BURN_IN_SHARE = 0.1
_NO_MEMORY = ("out of memory", "allocate memory", "STATUS_ALLOC_FAILED")
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    train_iter: int = 10
    """Samples of each measurement, at least (fewer only within a time_budget, and then the profile says so)."""
    device: str = "auto"
    """auto or cuda: this rank's card; cpu: this machine's processor."""
    l2: str = COLD
    """Whether the last-level cache is flushed before each call."""
    time_budget: float | None = None
    """Seconds for the whole measuring on a rank."""
    show_progress: bool = True

    def __post_init__(self) -> None:
        require(self.train_iter >= 1, f"--train_iter {self.train_iter} must be at least 1")
        require(self.device in DEVICES, f"--device {self.device} must be one of {', '.join(DEVICES)}")
        require(self.l2 in (COLD, HOT), f"--l2 {self.l2} must be {COLD} or {HOT}")
        require(
            self.time_budget is None or 0 < self.time_budget < float("inf"),
            f"--time_budget {self.time_budget} must be a number of seconds above 0",
        )


def profile_job(job: Job, settings: Settings, name_of: Callable[[str], Path]) -> Path | None:
    """Measure `job` on every rank; return the profile's path on rank 0, None elsewhere.

    `name_of` gives that path for the GPU's short name, or refuses it by a UserError. The raw samples lie beside it as
    JSON. Raises UserError on every rank when it failed on any; the files are then as they were before.
    """
    ranks = Ranks.from_environment()
    with process_group(ranks):
        device = ranks.together(lambda: pick_device(settings.device, ranks.local_rank, ranks.local_size))
        _require_own_cards(ranks.exchange((host(), device.identity)))
        named = ranks.together(lambda: name_of(device.slug))  # may refuse, and must before anything is measured
        own = ranks.together(lambda: measure_job(job, settings, device, ranks))
        everyone = ranks.exchange(own)
        return ranks.together(lambda: _write(job, settings, named, everyone) if not ranks.rank else None)


def _require_own_cards(cards: list[tuple[str, str]]) -> None:
    """Raise UserError, on every rank alike, where two of a host measure on one card."""
    first: dict[tuple[str, str], int] = {}
    for rank, card in enumerate(cards):
        require(
            not card[1] or card not in first,
            f"ranks {first.get(card)} and {rank} ({card[0]}) measure on one GPU ({card[1]}): give each a card of its "
            "own (CUDA_VISIBLE_DEVICES), or lower torchrun's --nproc_per_node",
        )
        first[card] = rank


def _write(job: Job, settings: Settings, path: Path, results: list[RankResult]) -> Path:
    """Write the samples, then the profile: a profile that exists is complete."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    profile = profile_of(
        job, results, path=str(path), train_iter=max(settings.train_iter, MIN_SAMPLES), l2=settings.l2, date=now
    )
    with atomic_write(samples_path(path)) as file:
        file.write(raw_json(profile, results))
    write_profile(profile, path)
    return path


def samples_path(profile: Path) -> Path:
    """Where the raw samples of `profile` lie: the same name, .json instead of .txt."""
    return profile.with_suffix(".json") if profile.suffix == ".txt" else profile.with_name(profile.name + ".json")


def measure_job(job: Job, settings: Settings, device: Device, ranks: Ranks) -> RankResult:
    """Measure every kernel of `job`, then one whole layer, on this rank's device.

    Raises UserError before anything is allocated when a kernel does not fit into the device's memory.
    """
    table = kernel_table(job)
    check_memory(table, job, device)
    choices = choose(job, device.torch_device)
    gc.freeze()  # what is loaded by now stays: collecting after each kernel would walk all of torch
    parts = sum(1 + len(WAYS[kernel.gradients]) for kernel in table) + 2  # the layer: forward and backward
    budget = Budget(settings.time_budget, parts, CAP_S, device.now)
    device.burn_in(min(device.burn_in_s, _BURN_IN_SHARE * (settings.time_budget or float("inf"))))
    start = device.telemetry()
    kernels: dict[str, dict[str, Samples]] = {}
    notes: dict[str, str] = {}
    with progress(len(table) + 1, settings.show_progress and ranks.rank == 0) as step:
        for kernel in table:
            step(kernel.name)
            with _memory_errors(kernel.name, device):
                built = build(kernel, job, device.torch_device, choices, device.free_bytes())
                kernels[kernel.name] = _times(built, WAYS[kernel.gradients], settings, device, budget)
            if built.note:
                notes[kernel.name] = " ".join(built.note.split())
            del built
            device.release()
        step(LAYER)
        layer, why = _layer(job, settings, device, choices, budget)
    return RankResult(
        rank=ranks.rank,
        host=host(),
        facts=device.facts(),
        start=start,
        end=device.telemetry(),
        choices=origin_of(choices, table),
        notes=notes,
        kernels=kernels,
        layer=layer,
        layer_note=why,
    )


def _times(
    built: Built, ways: tuple[str, ...], settings: Settings, device: Device, budget: Budget
) -> dict[str, Samples]:
    """Time the forward call of `built`, then its gradients `ways`."""
    calls = {FORWARD: built.forward, INPUT_GRAD: built.input_grad, WEIGHT_GRAD: built.weight_grad}
    times = {}
    for way in (FORWARD, *ways):
        call = calls[way]
        if call is None:
            raise TypeError(f"the builder gave no {way} to measure: {built.note}")
        samples = measure(
            call,
            device,
            samples=max(settings.train_iter, MIN_SAMPLES),
            cap_s=budget.next_cap(),
            l2=settings.l2,
            least=MIN_SAMPLES if settings.time_budget else settings.train_iter,
        )
        times[way] = samples.scaled(built.scale)
    return times


def _layer(
    job: Job, settings: Settings, device: Device, choices: Choices, budget: Budget
) -> tuple[dict[str, Samples], str]:
    """Time one whole layer for the sum check; nothing and the reason where it does not fit into memory."""
    needed, free = sum(needed_bytes(kernel, job) for kernel in layer_kernels(job)), device.free_bytes()
    if needed > free:
        return {}, f"one layer needs up to {needed / _GIB:.1f} GiB of {free / _GIB:.1f} GiB free"
    try:
        return _layer_times(job, settings, device, choices, budget), ""
    except RuntimeError as error:  # the check may fail; what was measured before it must not be lost
        why = f"{LAYER}: {'ran out of memory: ' if is_out_of_memory(error) else ''}{_first_line(error)}"
    device.release()  # not in the handler, whose traceback holds the layer
    return {}, why


def _layer_times(job: Job, settings: Settings, device: Device, choices: Choices, budget: Budget) -> dict[str, Samples]:
    index = job.model.moe_layer_freq.index(1) if job.model.num_experts else 0
    built = build_layer(job, device.torch_device, choices, index)
    both = {INPUT_GRAD: built.input_grad, WEIGHT_GRAD: built.weight_grad}
    ways = tuple(way for way, call in both.items() if call is not None)
    times = _times(built, ways, settings, device, budget)
    del built, both
    device.release()
    return times


def check_memory(table: Iterable[Kernel], job: Job, device: Device) -> None:
    """Raise UserError when a kernel needs more memory than is free; the optimizer's builder takes what there is."""
    free = device.free_bytes()
    needs = {kernel.name: needed_bytes(kernel, job) for kernel in table if kernel.name != OPTIMIZER}
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > free:
        raise UserError(_too_little(f"{largest} needs {needs[largest] / _GIB:.2f} GiB", device, free))


def _too_little(what: str, device: Device, free: int) -> str:
    return (
        f"{what} and {device.name} has {free / _GIB:.2f} GiB free: lower --micro_batch or --seq_length, or raise "
        "--tensor_model_parallel_size (--tp)"
    )


@contextmanager
def _memory_errors(what: str, device: Device) -> Iterator[None]:
    """Turn an allocation that fails all the same into the user's error."""
    free = device.free_bytes()
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_too_little(f"{what} ran out of memory: {_first_line(error)};", device, free)) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: torch's own, the CPU's, the driver's, or one inside cuBLAS or cuDNN."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in _NO_MEMORY)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ")


def origin_of(choices: Choices, table: Iterable[Kernel]) -> dict[str, str]:
    """Return the origin lines of what runs for attention, norms, grouped GEMMs (if any) and the optimizer, and why."""
    parts = {"attention": choices.attention, "norm": choices.norm, "optimizer": choices.optimizer}
    if any(kernel.op == "grouped_gemm" for kernel in table):
        parts["grouped_gemm"] = choices.grouped_gemm
    lines: dict[str, str] = {}
    for part, choice in parts.items():
        lines |= {f"{part}_implementation": choice.name, f"{part}_reason": " ".join(choice.reason.split())}
    return lines
