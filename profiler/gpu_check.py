"""The measuring half of scripts/gpu_check.sh: four models profiled twice, what was achieved, how far two runs differ.

    python3 -m profiler.gpu_check OUT [DEVICE]

Each profile is made by a process of its own, so that its wall time includes the start.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aicb import units
from aicb.config.configure import configure
from aicb.errors import UserError
from aicb.times.profile import Profile, read_profile
from aicb.times.rates import compare, peak_of, rates
from aicb.times.samples import kernels_of, samples_path
from profiler.run import profile_jobs
from profiler.settings import Settings

RUNS: dict[str, dict[str, Any]] = {
    "7-tp4": {"model_size": "7", "tensor_model_parallel_size": 4},
    "llama3-8b-tp1": {
        "model_size": "llama3-8b",
        "tensor_model_parallel_size": 1,
        "enable_sequence_parallel": False,
    },
    "moe-tp2-ep4": {
        "model_size": "moe",
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "enable_sequence_parallel": True,
        "moe_grouped_gemm": True,
    },
    "deepseek16-ep8": {
        "model_size": "deepseek16",
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "moe_grouped_gemm": True,
    },
}
"""What is profiled: a dense model split and whole, experts, latent attention."""
TIME_BUDGET_S = 10.0
_LIMIT_S = 90.0
_ONE = "--one"


def main(arguments: Sequence[str]) -> int:
    """Profile everything in RUNS; return 0 when all of it came out."""
    if arguments[:1] == [_ONE]:
        return _one(*arguments[1:])
    out, device = Path(arguments[0]), arguments[1] if len(arguments) > 1 else "cuda"
    return int(sum(_succeeds(name, out, device) for name in RUNS) < len(RUNS))


def _succeeds(name: str, out: Path, device: str) -> bool:
    """Print one run's report, or why there is none."""
    try:
        _say(_run_twice(name, RUNS[name], out, device))
    except (UserError, subprocess.SubprocessError, OSError, ValueError) as error:
        _say(f"{name}: FAILED: {error}")
        return False
    return True


def _one(typed: str, folder: str, name: str, device: str) -> int:
    """Make one profile and print its path: the child process."""
    settings = Settings(device=device, time_budget=TIME_BUDGET_S, force=True, show_progress=False)
    job = configure(json.loads(typed)).job
    (path,) = profile_jobs([(job, lambda slug: Path(folder) / f"{slug}-{name}.txt")], settings)
    _say(str(path))
    return 0


def _run_twice(name: str, typed: Mapping[str, Any], out: Path, device: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        first, first_s = _timed(name, typed, out, device)
        second, second_s = _timed(name, typed, Path(scratch), device)
        return report(name, read_profile(first), read_profile(second), (first_s, second_s))


def _timed(name: str, typed: Mapping[str, Any], folder: Path, device: str) -> tuple[Path, float]:
    """Run the child; return the profile and the child's wall time, start included."""
    command = [sys.executable, "-m", "profiler.gpu_check", _ONE, json.dumps(typed), str(folder), name, device]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        raise UserError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    path = Path(done.stdout.split("\n")[-2])
    size = samples_path(path).stat().st_size
    _say(f"{name}: {seconds:.1f} s, {path.name} and {size / 2**20:.1f} MiB of samples")
    return path, seconds


def report(name: str, first: Profile, second: Profile, seconds: tuple[float, float]) -> str:
    """Return the table of two profiles of the same job: times, rates, share of peak, difference."""
    peak, achieved, spans = peak_of(first), rates(first), _spans(first)
    rows, apart = [], []
    for one in compare(first, second)[0]:
        if not one.a or not one.b:
            continue
        percent = abs(one.b / one.a - 1) * 100
        apart.append((percent, f"{one.name} {one.part}"))
        rate = achieved.get(one.name, {}).get(one.part)
        rows.append(
            (
                one.name,
                one.part,
                f"{one.a:.1f}",
                f"{one.b:.1f}",
                f"{percent:.1f}",
                "-" if rate is None or rate.tflops is None else f"{rate.tflops:.1f}",
                "-" if rate is None or rate.gb_per_s is None else f"{rate.gb_per_s:.0f}",
                "-" if rate is None else "unknown" if rate.share is None else f"{rate.share:.0%}",
                f"{one.a / spans[one.name, one.part]:.2f}" if spans.get((one.name, one.part)) else "-",
            )
        )
    known = f"{peak.tflops_16bit:g} TFLOP/s, {peak.gb_per_s:g} GB/s" if peak else "unknown"
    worst, where = max(apart)
    over = [what for percent, what in apart if percent > 3]
    head = ("kernel", "part", "run 1 us", "run 2 us", "apart %", "TFLOP/s", "GB/s", "of peak", "time/spans")
    return "\n".join(
        [
            f"\n== {name} on {first.origin['gpu']} (peak {known})",
            units.table(head, rows),
            f"wall time, start included: {seconds[0]:.1f} s and {seconds[1]:.1f} s",
            f"two runs at most {worst:.1f} % apart ({where}); over 3 %: {', '.join(over) or 'none'}",
            _weight_gradients(first),
            *_told(first),
        ]
    )


def _spans(profile: Profile) -> dict[tuple[str, str], float]:
    """Sum of the device's kernels in each call, us, from the samples beside the profile, where there are any."""
    return {
        (name, way): sum(us for _, us in kernels)
        for name, ways in kernels_of(Path(profile.path)).items()
        for way, kernels in ways.items()
    }


def _weight_gradients(profile: Profile) -> str:
    """What adding to fp32 costs: an input gradient is as many FLOPs, and is not added to anything."""
    both = [
        (section.input_grad, section.weight_grad)
        for name, section in profile.sections.items()
        if section.input_grad and section.weight_grad
    ]
    ours, plain = sum(weight for _, weight in both), sum(other for other, _ in both)
    everything = sum(section.forward + (section.input_grad or 0) for section in profile.sections.values()) + ours
    return (
        f"weight gradients into fp32 ({profile.origin.get('weight_grad_implementation', 'unknown')}): {ours:.1f} us, "
        f"input gradients of the same GEMMs {plain:.1f} us; the difference is {(ours - plain) / everything:.1%} of all"
    )


def _told(profile: Profile) -> list[str]:
    """What the profile says about its own quality and the device."""
    told = ["sum_of", "whole_layer", "warning", "not_settled", "samples_per", "note_", "time_over"]  # of its quality
    told += ["attention_impl", "attention_reason", "norm_", "weight_grad_", "elementwise_", "grouped_gemm_"]
    told += ["optimizer_impl", "optimizer_reason", "clocks", "power", "temperature", "throttle"]
    return [f"{key}: {value}" for key, value in profile.origin.items() if key.startswith(tuple(told))]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
