"""The profiler times the right computation: each builder against a float64 reference, and within its stated memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from aicb.config.job import Job
from aicb.config.model import make_model
from aicb.config.parallel import ParallelConfig
from aicb.config.presets import PRESETS
from aicb.config.training import TrainingConfig
from aicb.errors import UserError
from aicb.step.kernels import STEP_END, Kernel, kernel_table
from profiler.builders import OPS, Built, build
from profiler.builders.built import differentiated
from tests.profiler.numerics import (
    CPU,
    JOBS,
    REFERENCES,
    SECOND_OUTPUTS,
    TOLERANCES,
    as_double,
    assert_close,
    chosen,
    gradients,
    kernels,
    small_job,
)

DTYPES = tuple(TOLERANCES)
WANTED = {
    "embedding": ("weight", "positions"),
    "flash_attention": ("query", "key", "value"),
    "scores": ("query", "key"),
    "context": ("probabilities", "value"),
    "latent_rope": ("query", "key", "rotary"),
    "permute": ("input", "arrived"),
    "unpermute": ("input", "probabilities", "arrived"),
    "norm": ("input", "weight", "bias"),
    "gemm": ("input", "weight", "bias"),
    "grouped_gemm": ("input", "weight", "bias"),
    "router": ("input", "weight"),
    "activation": ("input", "bias"),
}
"""What each op's gradients are of, in order; the others: input."""


def cases() -> list[Any]:
    """Every kernel of every small job, with and without flash attention."""
    found = []
    for kind in JOBS:
        jobs = (small_job(kind), small_job(kind, "bfloat16", flash=True))
        table = {name: kernel for job in jobs for name, kernel in kernels(job).items() if name not in STEP_END}
        names = [name for name, kernel in table.items() if "dropout" not in kernel.shape]
        found += [pytest.param(kind, name, id=f"{kind}-{name}") for name in names]
    return found


def built(kind: str, name: str, dtype: str = "float32") -> tuple[Kernel, Built]:
    """Flash attention too in float32, where the reference can be compared closely, though no job has it."""
    torch.manual_seed(0)
    job = small_job(kind, dtype)
    if name == "atten_flash":
        flash = small_job(kind, "bfloat16", flash=True)
        return kernels(flash)[name], build(kernels(flash)[name], job, CPU, chosen(flash))
    return kernels(job)[name], build(kernels(job)[name], job, CPU, chosen(job))


def several(result: object) -> tuple[object, ...]:
    return result if isinstance(result, tuple) else (result,)


def check_against_reference(kernel: Kernel, ready: Built, tolerance: float) -> None:
    wanted = [name for name in WANTED.get(kernel.op, ("input",)) if name in ready.tensors]
    exact = as_double(ready.tensors, wanted)
    outs = [REFERENCES[kernel.op](exact, kernel.shape)]
    if "grad_out_2" in exact:
        outs.append(SECOND_OUTPUTS[kernel.op](exact, kernel.shape))
    found = [out for out in several(ready.forward()) if isinstance(out, Tensor) and out.is_floating_point()]
    assert len(found) == len(outs)
    for mine, reference in zip(found, outs, strict=True):
        assert_close(mine, reference, tolerance, "output")
    given = [exact[name] for name in ("grad_out", "grad_out_2")[: len(outs)]]
    expected = torch.autograd.grad(outs, [exact[name] for name in wanted], given)
    actual = gradients(ready)
    assert len(actual) == len(expected)
    for name, mine, reference in zip(wanted, actual, expected, strict=True):
        assert_close(mine, reference, tolerance, f"gradient of {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "name"), cases())
def test_output_and_gradients_are_those_of_a_float64_reference(kind: str, name: str, dtype: str) -> None:
    """A builder that computes something else would time something else."""
    kernel, ready = built(kind, name, dtype)
    if kernel.op == "residual":
        check_residual(ready, TOLERANCES[dtype])
    elif kernel.op == "router" and dtype != "float32":
        check_router_ignoring_near_ties(kernel, ready)
    else:
        check_against_reference(kernel, ready, TOLERANCES[dtype])


def check_residual(ready: Built, tolerance: float) -> None:
    """x reaches the loss past the branch (gradient grad_out) and through it (grad_branch)."""
    exact = as_double(ready.tensors, ())
    assert_close(ready.forward(), REFERENCES["residual"](exact, {}), tolerance, "output")
    total, branch, *bias = gradients(ready)
    assert_close(total, exact["grad_out"] + exact["grad_branch"], tolerance, "gradient of input")
    assert_close(branch, exact["grad_out"], tolerance, "gradient of branch")
    assert len(bias) == ("bias" in exact)
    for gradient in bias:
        assert_close(gradient, exact["grad_out"].sum(dim=0), tolerance, "gradient of bias")


def check_dropped(actual: Tensor, kept: Tensor, what: str) -> None:
    """A quarter of the elements is 0, the rest is that of `kept` over 3/4."""
    zero = actual == 0
    assert float(zero[kept != 0].double().mean()) == pytest.approx(0.25, abs=0.03), what
    assert_close(actual[~zero], kept[~zero] / 0.75, 1e-5, what)


@pytest.mark.parametrize("name", ["atten_residual", "mlp_residual"])
def test_a_quarter_of_the_branch_and_its_bias_is_dropped(name: str) -> None:
    """bias + dropout + add: 48 tokens of 64."""
    kernel, ready = built("gpt_dropout", name)
    assert kernel.shape["dropout"]
    exact = as_double(ready.tensors, ())
    out = cast("Tensor", ready.forward()).detach().double()
    added = exact["branch"] + exact["bias"]
    zero = (out - exact["input"]).abs() < 1e-6 * exact["input"].abs()
    check_dropped(torch.where(zero, 0.0, out - exact["input"]), added, "branch")
    total, branch, bias = gradients(ready)
    check_dropped(branch, exact["grad_out"], "gradient of branch")
    assert_close(bias, branch.double().sum(dim=0), 1e-5, "gradient of bias")
    assert_close(total, exact["grad_out"] + exact["grad_branch"], 1e-5, "gradient of input")


def test_a_quarter_of_the_attention_probabilities_is_dropped() -> None:
    kernel, ready = built("gpt_dropout", "atten_core_softmax")
    exact = as_double(ready.tensors, ())
    check_dropped(cast("Tensor", ready.forward()).detach(), REFERENCES["softmax"](exact, kernel.shape), "probabilities")


def test_dropped_attention_is_no_other_attention_on_average() -> None:
    """Unfused on a CPU, whose flash kernel has no dropout: the mean of many draws is the context without it."""
    torch.manual_seed(0)
    job = small_job("gpt_dropout", "bfloat16", flash=True, batch=1)
    kernel, ready = kernels(job)["atten_flash"], build(kernels(job)["atten_flash"], job, CPU, chosen(job))
    assert kernel.shape["dropout"]
    assert chosen(job).attention.name == "unfused"
    draws = torch.stack([cast("Tensor", ready.forward()).detach().double() for _ in range(400)])
    assert float(draws.std(dim=0).mean()) > 0.05
    mean = REFERENCES["flash_attention"](as_double(ready.tensors, ()), kernel.shape)
    assert_close(draws.mean(dim=0), mean, 0.05, "mean context")


def check_router_ignoring_near_ties(kernel: Kernel, ready: Built) -> None:
    """bfloat16 may order two nearly equal experts the other way: those it chose must have about the best logits."""
    probabilities, ids = cast("tuple[Tensor, Tensor]", ready.forward())
    exact = as_double(ready.tensors, ())
    everything = torch.softmax(exact["input"] @ exact["weight"].T, dim=1)
    assert_close(probabilities.gather(1, ids), everything.gather(1, ids), 2e-2, "probabilities")
    assert int((probabilities > 0).sum()) == kernel.shape["tokens"] * kernel.shape["topk"]
    best = everything.topk(kernel.shape["topk"], dim=1).values
    assert bool((everything.gather(1, ids) >= best * (1 - 2e-2)).all())


@pytest.mark.parametrize("kind", ["moe_bias", "mla_moe"])
@pytest.mark.parametrize("name", ["mlp_linear_1", "mlp_linear_2"])
def test_uneven_groups_are_multiplied_by_their_own_expert(kind: str, name: str) -> None:
    """m is no multiple of the experts when the router's copies are not: the first experts get one row more."""
    job = small_job(kind)
    kernel = kernels(job)[name]
    kernel = replace(kernel, shape={**kernel.shape, "m": 13, "experts": 3})
    check_against_reference(kernel, build(kernel, job, CPU, chosen(job)), 1e-5)


@pytest.mark.parametrize("kind", JOBS)
def test_gradients_are_measured_where_the_table_says(kind: str) -> None:
    """The runner asks for exactly these calls; a missing one would end the run, a spare one go unmeasured."""
    calls = {"gemm": (True, True), "input": (True, False), "weight": (False, True), "none": (False, False)}
    job = small_job(kind)
    for kernel in kernel_table(job):
        ready = build(kernel, job, CPU, chosen(job))
        assert (ready.input_grad is not None, ready.weight_grad is not None) == calls[kernel.gradients], kernel.name


@pytest.mark.parametrize("kind", [kind for kind in JOBS if not JOBS[kind][0].get("moe_grouped_gemm")])
def test_matmuls_do_the_work_that_the_table_states(kind: str) -> None:
    """TFLOP/s come from the table: what runs must be that many FLOPs, forward and in each gradient."""
    job = small_job(kind)
    for kernel in kernel_table(job):
        if kernel.flops:
            ready = build(kernel, job, CPU, chosen(job))
            calls = {"forward": ready.forward, "input_grad": ready.input_grad, "weight_grad": ready.weight_grad}
            for way, call in calls.items():
                if call is not None:
                    expected = kernel.flops if way == "forward" else kernel.gradient_flops()
                    with FlopCounterMode(display=False) as counted:
                        call()
                    assert counted.get_total_flops() == expected, (kernel.name, way)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_every_op_of_every_preset_has_a_builder(name: str, flash: bool) -> None:
    """A new op in the table without a builder fails here, not on a user's GPU."""
    preset = PRESETS[name]
    job = Job(
        model=make_model(preset.fields, {}),
        parallel=ParallelConfig(
            world_size=64,
            tensor_model_parallel_size=preset.tensor_model_parallel_size,
            enable_sequence_parallel=True,
        ),
        training=TrainingConfig(use_flash_attn=flash),
    )
    assert {kernel.op for kernel in kernel_table(job)} <= OPS.keys()


def test_an_unknown_op_is_a_key_error() -> None:
    job = small_job("gpt")
    kernel = replace(kernels(job)["Emb"], op="convolution")
    with pytest.raises(KeyError, match="convolution"):
        build(kernel, job, CPU, chosen(job))


def test_data_have_both_signs_and_ids_reach_other_shards() -> None:
    """Zeros and constants run faster than real data (13 % on an H200); a shard of a vocabulary misses most ids."""
    job = small_job("gpt_tp")
    for name, kernel in kernels(job).items():
        tensors = build(kernel, job, CPU, chosen(job)).tensors
        for tensor in (tensors[key] for key in ("input", "grad_out", "query") if key in tensors):
            assert 0.2 < float((tensor > 0).double().mean()) < 0.8, name
    _, ready = built("gpt_tp", "Emb")
    assert ready.tensors["weight"].size(0) == 128
    assert {int(i) // 128 for i in ready.tensors["ids"].flatten()} == {0, 1}


def test_a_missing_graph_is_said_plainly() -> None:
    """Without it, the backward would fail inside PyTorch, or not be measured at all."""
    job = small_job("gpt")
    kernel, choices = kernels(job)["mlp_gelu"], chosen(job)
    with torch.no_grad(), pytest.raises(UserError, match="mlp_gelu: requires_grad missing on the output"):
        build(kernel, job, CPU, choices)
    x, weight = torch.randn(2), torch.randn(2, requires_grad=True)
    with pytest.raises(UserError, match="mlp_gelu: requires_grad missing on input"):
        differentiated(kernel, lambda: x * weight, {"input": x, "weight": weight}, "input", "weight")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_optimizer_is_an_adam_step_and_a_copy(dtype: str) -> None:
    """AdamW (1711.05101) by hand for two steps; the step is compared, as it is tiny beside the parameter."""
    torch.manual_seed(0)
    job = small_job("gpt", dtype)
    ready = build(kernels(job)["param_time"], job, CPU, chosen(job))
    parameter = ready.tensors["parameter"]
    assert parameter.grad is not None
    gradient, before = parameter.grad.double(), parameter.detach().double()
    exact, m, v = before.clone(), torch.zeros_like(gradient), torch.zeros_like(gradient)
    for step in (1, 2):
        result = cast("tuple[Tensor, ...]", ready.forward())
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        exact = exact * (1 - 1e-4 * 0.01) - 1e-4 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    assert_close(parameter.double() - before, exact - before, 1e-4, "step")
    assert len(result) == (2 if dtype == "bfloat16" else 1)
    torch.testing.assert_close(result[-1].float(), parameter.to(result[-1].dtype).float(), rtol=0, atol=0)


def end_of_step(name: str, dtype: str = "bfloat16") -> tuple[Built, Tensor, Tensor]:
    """The kernel, the one gradient it goes over, and that as it was."""
    torch.manual_seed(0)
    job = small_job("gpt", dtype)
    ready = build(kernels(job)[name], job, CPU, chosen(job))
    grad = ready.tensors["grad"]
    held = job.parameters()
    assert grad.dtype == torch.float32
    assert grad.numel() == (held.dense if name != "grad_clip" else held.dense_buckets[0] // 8)
    return ready, grad, grad.clone()


def test_gradients_are_zeroed() -> None:
    ready, grad, before = end_of_step("grad_zero")
    assert float(before.abs().min()) > 0
    ready.forward()
    assert not bool(grad.any())


def test_every_gradient_is_scaled_and_stays_a_number_after_many_calls() -> None:
    ready, grad, before = end_of_step("grad_scale")
    ready.forward()
    assert torch.equal(grad, -before)
    for _ in range(1000):
        ready.forward()
    assert torch.equal(grad, -before)


def test_gradients_are_clipped_to_a_norm_of_1() -> None:
    ready, grad, before = end_of_step("grad_clip")
    norm = ready.forward()
    exact = before.double().square().sum().sqrt()
    assert isinstance(norm, Tensor)
    assert_close(norm, exact, 1e-5, "norm")
    assert_close(grad, before.double() / exact, 1e-5, "clipped")


@pytest.mark.parametrize(("name", "each"), [("grad_zero", 4), ("grad_scale", 4), ("grad_clip", 8)])
def test_gradients_too_many_are_passed_over_in_part(name: str, each: int) -> None:
    """32 MB hold 0.9 x 32e6 / 4 = 7,200,000 fp32 gradients, or half where parameters are held beside them."""
    job = small_job("gpt", "bfloat16")
    kernel = replace(kernels(job)[name], shape={"elements": 28_800_000_000})
    ready = build(kernel, job, CPU, chosen(job), memory=32_000_000)
    assert ready.tensors["grad"].numel() == 28_800_000 // each
    assert ready.scale == 1000 * each
    assert ready.note == f"measured on {28_800_000 // each:,} of 28,800,000,000 parameters, scaled"


def test_an_optimizer_too_large_is_measured_in_part_and_says_so() -> None:
    """32 MB hold 0.9 x 32e6 / 18 = 1,600,000 parameters of 18 bytes: fp32 p, g, m, v and the bfloat16 copy."""
    job = small_job("gpt", "bfloat16")
    kernel = replace(kernels(job)["param_time"], shape={"elements": 16_000_000_000, "copy": 1})
    ready = build(kernel, job, CPU, chosen(job), memory=32_000_000)
    assert ready.tensors["parameter"].numel() == 1_600_000
    assert ready.scale == 10_000
    assert ready.note == "measured on 1,600,000 of 16,000,000,000 parameters, scaled"
    whole = build(kernels(job)["param_time"], job, CPU, chosen(job), memory=32_000_000)
    assert (whole.scale, whole.note) == (1.0, "")
