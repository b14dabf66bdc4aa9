"""The code that runs on a GPU, at the sizes of real models, on a CUDA device that computes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

from tests.profiler.fakes import ROOT

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "GPT 7B, TP 4": {"model_size": "7", "tensor_model_parallel_size": 4},
    "GPT 7B, unfused": {"model_size": "7", "tensor_model_parallel_size": 4, "use_flash_attn": False},
    "Llama 3 8B": {"model_size": "llama3-8b", "tensor_model_parallel_size": 1},
    "Mixtral": {
        "model_size": "moe", "tensor_model_parallel_size": 2, "enable_sequence_parallel": True,
        "expert_model_parallel_size": 4, "moe_grouped_gemm": True,
    },
    "Mixtral, looped": {"model_size": "moe", "tensor_model_parallel_size": 1, "expert_model_parallel_size": 4},
    "DeepSeek V3": {
        "model_size": "deepseek671", "tensor_model_parallel_size": 1, "expert_model_parallel_size": 64,
        "world_size": 64, "moe_grouped_gemm": True,
    },
    "Qwen3 235B": {
        "model_size": "qwen3-235b-a22b", "tensor_model_parallel_size": 4, "enable_sequence_parallel": True,
        "expert_model_parallel_size": 8, "moe_grouped_gemm": True,
    },
    "Llama 3 405B, TP 8": {"model_size": "405", "tensor_model_parallel_size": 8, "enable_sequence_parallel": True},
}  # fmt: skip
ALL_FP32 = ("grad_zero", "grad_scale", "grad_clip", "optimizer")
WORKSPACE = 64 * 2**20
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the stand-in for a CUDA device")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stand-in") / "stand_in_cuda.so"
    command = [str(COMPILER), "-O0", "-shared", "-fPIC", "-std=c++20", str(HERE / "stand_in_cuda.cpp"), "-o", str(out)]
    command += [f"-I{folder}" for folder in include_paths()] + [f"-L{folder}" for folder in library_paths()]
    done = subprocess.run([*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the stand-in for a CUDA device does not compile: {done.stderr.strip().splitlines()[0]}")
    return out


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_builder_and_a_layer_run_on_a_cuda_device(name: str, library: Path) -> None:
    """Devices, types, that backward runs; and that the memory said before is 1 to 1.5 times what is held at once."""
    command = [sys.executable, "-m", "tests.profiler.stand_in_cuda", str(library), json.dumps(CONFIGURATIONS[name])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert sum(one["op"] == "layer" for one in report.values()) == 2
    for kernel, one in report.items():
        assert one["devices"] == ["cuda:0"], kernel
        check_types(kernel, one)
        gradients = [*one.get("input_grad", []), *one.get("weight_grad", [])]
        assert bool(gradients) == (one["op"] not in ALL_FP32), kernel
        assert all(device == "cuda:0" and shape for device, shape in gradients), kernel
        if one["op"] not in ALL_FP32:  # they take what there is
            slack = 0 if one["op"] == "layer" else WORKSPACE
            assert one["peak"] <= one["said"] <= 1.5 * one["peak"] + slack, kernel


def check_types(kernel: str, one: dict[str, Any]) -> None:
    """Parameters and activations in bfloat16, main gradients in fp32, what is counted in integers."""
    for tensor, dtype in one["types"].items():
        if one["op"] in ALL_FP32 or "main_grad" in tensor:
            expected = {"torch.float32"}
        elif tensor in ("ids", "target", "order", "mask"):
            expected = {"torch.int64", "torch.bool"}
        elif one["op"] in ("router", "cross_entropy") and tensor.startswith("grad_out"):
            expected = {"torch.float32"}
        else:
            expected = {"torch.bfloat16"}
        assert dtype in expected, f"{kernel} {tensor}"
