"""Sum of the parts against the whole layer on this CPU: `make bench`, or python benchmarks/layer_sum.py [ROUNDS].

Layers at a size where one takes at least 50 ms, in float32, on one thread: dense ones, eight experts, latent attention.
Every kernel apart and one whole layer, forward and backward, should agree within 7 %. The speed of a shared machine
drifts by more than that in a minute, so parts and whole are measured in turns, a few seconds apart, by the shortest of
three calls each; the median of the rounds' ratios is what counts.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from aicb.config.configure import configure
from aicb.config.job import Job
from benchmarks.bench import processor
from profiler.builders import Built, build
from profiler.device import Cpu
from profiler.implementations import choose
from profiler.layer import build_layer
from profiler.measure import measure
from profiler.report import layer_kernels

SHAPES = {
    "learned positions, GELU, LayerNorm, biases": {"model_size": "7", "num_attention_heads": 8},
    "rotary, SwiGLU, RMSNorm, GQA": {"model_size": "llama3-8b", "num_attention_heads": 8, "num_query_groups": 2},
    "8 experts, 2 a token": {"model_size": "moe", "num_attention_heads": 8, "num_query_groups": 2},
    "latent attention": {"model_size": "deepseek16", "num_attention_heads": 8, "num_experts": 0},
}
TOLERANCE = 0.07
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36)}
"""Of glibc: freed memory stays with the process, as PyTorch's allocator on a GPU keeps it. Without, each temporary of
32 MB takes new pages, which cost this machine anything up to the GEMM's own time."""
SIZE = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_layers": 1, "vocab_size": 1000, "seq_length": 512}
ONE = {"tensor_model_parallel_size": 1, "world_size": 1, "global_batch": 1, "dtype": "float32"}


class Passes(NamedTuple):
    """Times of one forward and one backward, us."""

    forward: float
    backward: float


def time_of(built: Built, device: Cpu) -> Passes:
    """Measure a kernel or a layer: the profiler's own measuring, three samples of each call."""
    calls = (built.forward, built.input_grad, built.weight_grad)
    times = [measure(call, device, samples=3, cap_s=0.0).min for call in calls if call is not None]
    return Passes(times[0], sum(times[1:]))


def rounds(job: Job, count: int) -> Iterator[tuple[Passes, Passes]]:
    """Yield the sum of the parts and the whole layer, `count` times in turns."""
    device = Cpu()
    choices = choose(job, device.torch_device)
    parts = [build(kernel, job, device.torch_device, choices) for kernel in layer_kernels(job)]
    whole = build_layer(job, device.torch_device, choices, 0)
    for _ in range(count):
        times = [time_of(part, device) for part in parts]
        yield Passes(sum(one.forward for one in times), sum(one.backward for one in times)), time_of(whole, device)


def main() -> int:
    """Print one table; return 1 when a sum is more than TOLERANCE off."""
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_MEMORY})
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(
        f"\n{processor()}, one thread, float32, hidden 1024, ffn 4096, sequence 512, cold cache, memory kept; "
        f"{count} rounds"
    )
    print("| layer | whole forward, backward ms | parts / whole: forward (min to max) | backward |\n|---|---|---|---|")
    worst = 0.0
    for name, model in SHAPES.items():
        pairs = list(rounds(configure({**SIZE, **ONE, **model}).job, count))
        whole = [statistics.median(times) / 1e3 for times in zip(*(pair[1] for pair in pairs), strict=True)]
        cells = []
        for way in (0, 1):
            ratios = [parts[way] / layer[way] for parts, layer in pairs]
            worst = max(worst, abs(statistics.median(ratios) - 1))
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {name} | {whole[0]:.0f}, {whole[1]:.0f} | {cells[0]} | {cells[1]} |", flush=True)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
