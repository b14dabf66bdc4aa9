"""Time whole `aicb` processes, start to exit: `make bench`, or python benchmarks/bench.py [RUNS].

Each run is a process of its own in an empty folder; wall time and peak memory (resident) are the operating system's.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "workload" / "aiob_inputs" / "Example.txt"


class Case(NamedTuple):
    """One command and what it is held to."""

    name: str
    words: list[str]
    seconds: float
    """Goal for the median wall time."""
    megabytes: float
    """Goal for the peak memory, MB (10^6 bytes)."""


FIRST = "generate -m 7 --world_size 4096 --tensor_model_parallel_size 2 --pipeline_model_parallel 1 --frame Megatron"
FIRST += (
    " --global_batch 8192 --micro_batch 1 --seq_length 4096 --swiglu --use_flash_attn --aiob_enable --comp_filepath"
)
LARGE = "generate -m 7 --tp 4 --world_size 32 --global_batch 262144"
STAGES = "generate -m deepseek671 --world_size 2048 --ep 64 --pp 16 --decoder_first_pipeline_num_layers 3"
STAGES += " --decoder_last_pipeline_num_layers 2 --frame DeepSeek --pp_rank all"
CASES = [
    Case("--help", ["--help"], 0.30, 60),
    Case("-m 7, world 4096, Example.txt", [*FIRST.split(), str(EXAMPLE)], 0.30, 60),
    Case("-m 7, ga 32768 (2.5 million rows)", LARGE.split(), 1.0, 80),
    Case("-m deepseek671, world 2048, 16 stages", STAGES.split(), 1.0, 80),
]


def run(words: list[str]) -> tuple[float, float]:
    """Run `aicb` once; return seconds and MB."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "aicb", *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"aicb {' '.join(words)}: exit code {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def main() -> int:
    """Print one table; return 1 when a goal is missed."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(
        f"{processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; {runs} runs"
    )
    print("| command | median s | min to max s | goal s | peak MB | goal MB |\n|---|---|---|---|---|---|")
    missed = False
    for case in CASES:
        run(case.words)  # once, so that bytecode and page cache are warm for all
        samples = [run(case.words) for _ in range(runs)]
        seconds, peak = [sample[0] for sample in samples], max(sample[1] for sample in samples)
        median = statistics.median(seconds)
        missed |= median > case.seconds or peak > case.megabytes
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"| {case.name} | {median:.3f} | {spread} | {case.seconds:g} | {peak:.0f} | {case.megabytes:g} |")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
