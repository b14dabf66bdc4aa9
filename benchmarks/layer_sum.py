"""Sum of the parts against the whole layer on this CPU: `make bench`, or python benchmarks/layer_sum.py [SECONDS].

A layer of -m 7's shape at a size where it takes at least 50 ms, in float32, on one process. The profiler measures each
kernel apart and then one whole layer, forward and backward; the two should agree within 10 %.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from aicb.configure import configure
from aicb.profile import read_profile
from benchmarks.bench import processor
from profiler.run import Settings, profile_job

SHAPES = {
    "learned positions, GELU, LayerNorm, biases": {"model_size": "7", "num_attention_heads": 8},
    "rotary, SwiGLU, RMSNorm, GQA": {"model_size": "llama3-8b", "num_attention_heads": 8, "num_query_groups": 2},
}
SIZE = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_layers": 1, "vocab_size": 1000, "seq_length": 512}
ONE = {"tensor_model_parallel_size": 1, "world_size": 1, "global_batch": 1, "dtype": "float32"}


def main() -> int:
    """Print one table; return 1 when a sum is more than 10 % off."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print(f"{processor()}, {os.cpu_count()} cores; hidden 1024, ffn 4096, sequence 512, float32; medians")
    print("| layer | whole layer | parts / whole, forward | backward |\n|---|---|---|---|")
    worst = 0.0
    for name, model in SHAPES.items():
        job = configure({**SIZE, **ONE, **model}).job
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.txt"
            settings = Settings(device="cpu", time_budget=seconds, output=path, show_progress=False)
            profile_job(job, settings, Path)  # output wins over any name
            origin = read_profile(path).origin
        forward, backward = (float(origin[f"sum_of_parts_over_whole_{way}"]) for way in ("forward", "backward"))
        worst = max(worst, abs(forward - 1), abs(backward - 1))
        print(f"| {name} | {origin['whole_layer']} | {forward:.3f} | {backward:.3f} |")
    return int(worst > 0.10)


if __name__ == "__main__":
    raise SystemExit(main())
