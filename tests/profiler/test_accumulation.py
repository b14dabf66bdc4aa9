"""Weight gradients are added to an fp32 main gradient, by the kernel that is there; what runs is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aicb.config.job import Job
from profiler import accumulation
from profiler.accumulation import choose_accumulation
from profiler.builders import build
from profiler.candidates import Wanted
from profiler.implementations import Choices, choose
from profiler.layer import build_layer
from tests.profiler.conftest import Install
from tests.profiler.numerics import CPU, assert_close, gradients, kernels, small_job


def apex_wgrad(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32's signature and rules, in float64."""
    assert total_input.dtype == grad_output.dtype
    assert main_grad.dtype == torch.float32
    assert total_input.dim() == grad_output.dim() == main_grad.dim() == 2
    main_grad += (grad_output.double().t() @ total_input.double()).float()


@pytest.mark.parametrize(
    ("dtype", "fused", "name", "reason"),
    [
        ("bfloat16", None, "GEMM, then add", "torch addmm into fp32 refused: "),
        ("bfloat16", False, "GEMM, then add", "--gradient_accumulation_fusion is off"),
        ("float32", None, "GEMM, then add", "for 16-bit types only, unless typed"),
        ("float32", True, "torch addmm in place", "apex's fused weight gradient is not installed"),
    ],
)
def test_what_runs_on_a_cpu_and_why(install: Install, dtype: str, fused: bool | None, name: str, reason: str) -> None:
    """PyTorch's addmm into fp32 has no CPU kernel."""
    del install
    choice, _ = choose_accumulation(small_job("gpt", dtype), CPU, Wanted(gradient_accumulation_fusion=fused))
    assert choice.name == name
    assert reason in choice.reason


def test_apex_s_kernel_is_taken_first(install: Install) -> None:
    install("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=apex_wgrad)
    choice, _ = choose_accumulation(small_job("gpt", "bfloat16"), CPU, Wanted())
    assert (choice.name, choice.reason) == ("apex wgrad_gemm_accum_fp32", "the first choice, and it works here")


def test_an_apex_of_other_contents_is_refused(install: Install) -> None:
    install("fused_weight_gradient_mlp_cuda", something=1)
    choice, _ = choose_accumulation(small_job("gpt", "bfloat16"), CPU, Wanted())
    assert choice.name == "GEMM, then add"
    assert "apex has no wgrad_gemm_accum_fp32" in choice.reason


def check_weight_gradients(job: Job, choices: Choices) -> None:
    """A GEMM's and a whole layer's, twice: what is there is added to, not replaced."""
    ready = build(kernels(job)["atten_linear"], job, CPU, choices)
    x, grad = (ready.tensors[name].double() for name in ("input", "grad_out"))
    for _ in range(2):
        assert_close(gradients(ready)[1], grad.t() @ x, 1e-4, "GEMM")
    layer = build_layer(job, CPU, choices, 0)
    first, second = gradients(layer), gradients(layer)
    for one, other in zip(first, second, strict=True):
        assert_close(other, one.double(), 1e-4, "layer")


@pytest.mark.filterwarnings("ignore")
def test_pytorch_s_addmm_into_fp32_is_called_as_its_schema_says() -> None:
    """Its CUDA kernel cannot run here: one of the test's own stands in, behind the same schema, in float64."""

    def kernel(
        main: Tensor, grad: Tensor, x: Tensor, out_dtype: torch.dtype, *, beta: int = 1, alpha: int = 1, out: Tensor
    ) -> Tensor:
        assert (beta, alpha) == (1, 1)
        assert out_dtype == main.dtype == torch.float32
        assert grad.dtype == x.dtype == torch.bfloat16
        assert out is main
        return out.add_((grad.double() @ x.double()).float())

    job = small_job("gpt", "bfloat16")
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", kernel, "CPU")
        choices = choose(job, CPU)
        assert choices.weight_grad.name == "torch addmm into fp32"
        assert "apex's fused weight gradient does not run on cpu" in choices.weight_grad.reason
        check_weight_gradients(job, choices)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("kind", ["gpt", "moe_loop_shared_sp"])
def test_every_way_adds_the_same(install: Install, kind: str, fused: bool | None) -> None:
    """Dense and, in a loop, the experts' GEMMs."""
    install("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=apex_wgrad)
    torch.manual_seed(0)
    job = small_job(kind)
    choices = choose(job, CPU, Wanted(gradient_accumulation_fusion=fused))
    assert choices.weight_grad.name == ("apex wgrad_gemm_accum_fp32" if fused else "GEMM, then add")
    check_weight_gradients(job, choices)
    if job.model.num_experts:
        assert choices.grouped_gemm.name == f"loop over experts, each {choices.weight_grad.name}"
        ready = build(kernels(job)["mlp_linear_1"], job, CPU, choices)
        halves = zip(*(ready.tensors[name].double().tensor_split(2) for name in ("grad_out", "input")), strict=True)
        assert_close(gradients(ready)[1], torch.stack([grad.t() @ x for grad, x in halves]), 1e-5, "experts")


def test_in_place_fp32_adds() -> None:
    main, grad, x = torch.randn(8, 4), torch.randn(16, 8), torch.randn(16, 4)
    expected = main.double() + grad.double().t() @ x.double()
    accumulation.add_in_gemm_fp32(main, grad, x)
    assert_close(main, expected, 1e-5, "sum")
