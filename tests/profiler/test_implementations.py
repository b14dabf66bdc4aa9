"""Which implementation runs, and that the profile can say why: with stand-ins for flash-attn and apex, and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from aicb.errors import UserError
from profiler import candidates, implementations
from profiler.builders import build
from profiler.implementations import choose
from tests.profiler import standins
from tests.profiler.conftest import Install
from tests.profiler.numerics import CPU, REFERENCES, as_double, assert_close, kernels, small_job


def check_norms(job_kind: str, hidden: int, name: str, reason: str) -> None:
    torch.manual_seed(0)
    job = small_job(job_kind, model={"hidden_size": hidden})
    choices = choose(job, CPU)
    assert choices.norm.name == name
    assert reason in choices.norm.reason
    kernel = kernels(job)["layernorm"]
    ready = build(kernel, job, CPU, choices)
    wanted = [parameter for parameter in ("input", "weight", "bias") if parameter in ready.tensors]
    exact = as_double(ready.tensors, wanted)
    out = REFERENCES["norm"](exact, kernel.shape)
    assert_close(ready.forward(), out, 1e-5, "output")
    assert ready.input_grad is not None
    expected = torch.autograd.grad(out, [exact[parameter] for parameter in wanted], exact["grad_out"])
    for mine, reference in zip(ready.input_grad(), expected, strict=True):  # type: ignore[call-overload]
        assert_close(mine, reference, 1e-5, "gradient")


def install_apex(install: Install) -> None:
    install("apex.contrib.layer_norm", FastLayerNorm=standins.FastLayerNorm)
    install("apex.normalization", FusedLayerNorm=standins.FusedLayerNorm, FusedRMSNorm=standins.FusedRMSNorm)
    install("apex.optimizers", FusedAdam=standins.FusedAdam)


def test_apex_norms_are_used_where_they_have_a_kernel(install: Install) -> None:
    """1024 is in FastLayerNorm's list, 320 is not."""
    install_apex(install)
    check_norms("gpt", 1024, "apex FastLayerNorm", "the first choice")
    check_norms("gpt", 320, "apex FusedLayerNorm", "apex FastLayerNorm has no kernel for width 320")
    check_norms("llama_gqa", 1024, "apex FusedRMSNorm", "the first choice")


def test_without_apex_torch_norms_run_and_the_reason_is_recorded(install: Install) -> None:
    del install
    check_norms("gpt", 1024, "torch LayerNorm", "apex is not installed")
    check_norms("llama_gqa", 1024, "torch RMSNorm", "apex is not installed")


def test_the_unrelated_apex_of_pypi_is_not_taken_for_nvidia_s(install: Install) -> None:
    """`pip install apex` installs a web package of 2013."""
    install("apex", __path__=[])
    check_norms("gpt", 1024, "torch LayerNorm", "apex is not installed (no module apex.contrib)")


def test_norms_of_several_widths_are_all_named(install: Install) -> None:
    """Query and key norms are as wide as a head, which FastLayerNorm does not take."""
    install_apex(install)
    job = small_job("gpt", model={"hidden_size": 1024, "qk_layernorm": True})
    choice = choose(job, CPU).norm
    assert choice.name == "apex FastLayerNorm (1024), apex FusedLayerNorm (256)"
    assert "no kernel for width 256" in choice.reason


def test_a_norm_that_works_nowhere_is_one_clear_error(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    del install

    def refuse(*_: object, **__: object) -> nn.Module:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(nn, "LayerNorm", refuse)
    with pytest.raises(UserError, match="torch LayerNorm refused: no kernel image is available"):
        choose(small_job("gpt"), CPU)


def test_the_optimizer_is_apex_then_fused_then_foreach(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(small_job("gpt"), CPU).optimizer
    assert choice.name == "torch AdamW fused"
    assert "apex is not installed" in choice.reason
    real = torch.optim.AdamW

    def no_fused(params: list[Tensor], **options: Any) -> torch.optim.AdamW:
        if options.get("fused"):
            raise RuntimeError("`fused=True` requires all the params to be on supported devices")
        return real(params, **options)

    monkeypatch.setattr(torch.optim, "AdamW", no_fused)
    choice = choose(small_job("gpt"), CPU).optimizer
    assert choice.name == "torch AdamW foreach"
    assert "torch AdamW fused refused" in choice.reason
    monkeypatch.undo()
    monkeypatch.setattr(candidates, "EXTENSION_DEVICES", ("cpu",))
    install_apex(install)
    assert choose(small_job("gpt"), CPU).optimizer.name == "apex FusedAdam"


def test_grouped_gemms_are_chosen_by_the_flag_and_by_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(small_job("gpt"), CPU).grouped_gemm.name == "none"
    choice = choose(small_job("moe_loop_shared_sp"), CPU).grouped_gemm
    assert (choice.name, choice.reason) == ("loop over experts, each GEMM, then add", "--moe_grouped_gemm is off")
    monkeypatch.setattr(functional, "grouped_mm", None, raising=False)
    monkeypatch.setattr(torch, "_grouped_mm", None, raising=False)
    choice = choose(small_job("moe_bias"), CPU).grouped_gemm
    assert choice.name.startswith("loop over experts")
    assert "has no grouped matmul" in choice.reason


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="a PyTorch without grouped matmuls")
def test_grouped_gemms_run_in_one_kernel_where_torch_has_it() -> None:
    """Expert widths that are no multiple of 16 bytes are refused by the kernel, and that is recorded."""
    assert choose(small_job("moe_bias"), CPU).grouped_gemm.name == "torch grouped_mm, then add"
    choice = choose(small_job("moe_bias", model={"moe_ffn_hidden_size": 46}), CPU).grouped_gemm
    assert choice.name.startswith("loop over experts")
    assert "torch grouped_mm, then add refused: " in choice.reason


@pytest.mark.parametrize(
    ("capability", "dtype", "refused"),
    [
        ((9, 0), torch.bfloat16, False),
        ((10, 0), torch.bfloat16, False),
        ((9, 0), torch.float16, True),
        ((8, 0), torch.bfloat16, True),
        ((12, 0), torch.bfloat16, True),
    ],
)
def test_grouped_mm_is_not_named_where_it_would_loop(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, refused: bool
) -> None:
    """PyTorch falls back to one GEMM an expert, without a word, where it has no kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    said = implementations.grouped_mm_refusal(dtype, torch.device("cuda", 0))
    assert bool(said) == refused
    if refused:
        assert f"{capability[0]}.{capability[1]}" in said
        monkeypatch.setattr(implementations, "grouped_mm_refusal", lambda *_: said)
        choice = choose(small_job("moe_bias", "bfloat16"), CPU).grouped_gemm
        assert (choice.name, choice.reason) == ("loop over experts, each GEMM, then add", said)


def test_extensions_are_not_tried_where_they_have_no_kernels() -> None:
    """On a machine with a GPU, `--device cpu` must not record apex or flash-attn as what ran."""
    job = small_job("gpt", "bfloat16", flash=True)
    choices = choose(job, CPU)
    assert choices.attention.reason == "flash-attn does not run on cpu"
    assert "apex does not run on cpu" in choices.norm.reason
