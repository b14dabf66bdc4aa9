"""Element-wise kernels fused by torch.compile: where, why not, and that they compute the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aicb.config.job import Job
from profiler import fusion
from profiler.builders import Built, build
from profiler.candidates import Wanted
from profiler.fusion import choose_fusion, compiled
from profiler.implementations import Choices, choose
from profiler.layer import build_layer
from tests.profiler.numerics import CPU, assert_close, gradients, kernels, small_job

KERNELS = {
    "gpt": ("mlp_gelu", "atten_residual", "atten_core_softmax"),
    "gpt_tp": ("mlp_gelu", "atten_residual"),
    "llama_gqa": ("mlp_gelu", "atten_rope", "mlp_residual"),
    "partial_rotary": ("atten_rope",),
    "mla": ("atten_rope",),
}


def test_a_cpu_s_kernels_are_not_fused_and_the_profile_says_so() -> None:
    choice, _ = choose_fusion(small_job("gpt"), CPU, Wanted())
    assert (choice.name, choice.reason) == ("none", "not fused on cpu")
    choice, _ = choose_fusion(small_job("gpt"), CPU, Wanted(fusion=False))
    assert (choice.name, choice.reason) == ("none", "--fusion is off")


def test_a_compiler_that_does_not_work_here_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card too old for Triton, or no C compiler, shows when the first function is called."""
    monkeypatch.setattr(fusion, "COMPILED_DEVICES", ("cpu",))

    def refuse(*_: object, **__: object) -> Callable[..., Tensor]:
        def call(*_: object) -> Tensor:
            raise RuntimeError("Cannot find a working triton installation.\nmore")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    choice, fused = choose_fusion(small_job("gpt"), CPU, Wanted())
    assert choice.name == "none"
    assert f"torch.compile {torch.__version__} refused: Cannot find a working triton installation." in choice.reason
    assert fused == fusion.Elementwise()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without its code generator, which takes long here: traced, differentiated, run as traced."""
    monkeypatch.setattr(fusion, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(fusion, "compiled", lambda: compiled("aot_eager"))


def one_of_each(job: Job, name: str, choices: Choices, plain: Choices) -> list[Built]:
    """The kernel on the same numbers, fused and not."""
    ready = []
    for one in (choices, plain):
        torch.manual_seed(1)
        ready.append(build(kernels(job)[name], job, CPU, one))
    return ready


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", KERNELS)
def test_fused_kernels_compute_the_same(kind: str) -> None:
    """Forward, and backward on one graph many times over."""
    job = small_job(kind)
    choices, plain = choose(job, CPU), choose(job, CPU, Wanted(fusion=False))
    assert choices.elementwise.name == f"torch.compile {torch.__version__}"
    for name in KERNELS[kind]:
        ready = one_of_each(job, name, choices, plain)
        for _ in range(2):
            outs = [out if isinstance(out := one.forward(), tuple) else (out,) for one in ready]
            for mine, other in zip(*outs, strict=True):
                assert_close(mine, other.detach().double(), 1e-6, name)
            for grad, expected in zip(*(gradients(one) for one in ready), strict=True):
                assert_close(grad, expected.double(), 1e-6, f"gradient of {name}")


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", ["gpt_dropout", "llama_gqa", "mla_moe"])
def test_a_layer_of_fused_kernels_runs(kind: str) -> None:
    """The fused functions meet every shape of a job within what torch.compile is allowed."""
    job = small_job(kind)
    choices = choose(job, CPU)
    for index in range(2):
        layer = build_layer(job, CPU, choices, index)
        for _ in range(2):
            layer.forward()
            assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients(layer))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: torch.compile generates C++ for a CPU")
def test_generated_code_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function with torch.compile as it is used on a GPU."""
    monkeypatch.setattr(fusion, "COMPILED_DEVICES", ("cpu",))
    job = small_job("llama_gqa")
    choices, plain = choose(job, CPU), choose(job, CPU, Wanted(fusion=False))
    assert choices.elementwise.reason == "the first choice, and it works here"
    ready = one_of_each(job, "mlp_gelu", choices, plain)
    for _ in range(2):
        for mine, other in zip(*(gradients(one) for one in ready), strict=True):
            assert_close(mine, other.double(), 1e-6, "gradient")
