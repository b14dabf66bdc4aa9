"""Which implementation runs, and that the profile can say why: with stand-ins for flash-attn and apex, and without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from aicb.errors import UserError
from profiler import implementations
from profiler.builders import build
from profiler.implementations import choose
from tests.profiler import standins
from tests.profiler.numerics import CPU, REFERENCES, as_double, assert_close, kernels, small_job

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a module importable, with these attributes; without any, make sure that it is not."""
    monkeypatch.setattr(implementations, "EXTENSION_DEVICES", ("cpu",))

    def put(name: str, **attributes: Any) -> None:
        module: ModuleType | None = None
        if attributes:
            module = ModuleType(name)
            module.__dict__.update(attributes)
            for end in (i for i, letter in enumerate(name) if letter == "."):
                monkeypatch.setitem(sys.modules, name[:end], sys.modules.get(name[:end]) or ModuleType(name[:end]))
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("flash_attn", "apex"):
        put(name)
    return put


def install_flash_attn(install: Install, function: Callable[..., Tensor] = standins.flash_attn_varlen_func) -> None:
    install("flash_attn", __version__="2.7.4", flash_attn_varlen_func=function)


def check_flash(kind: str, name: str, reason: str, tolerance: float = 1e-5) -> None:
    """The choice made for a bfloat16 job, and its numbers in float32."""
    torch.manual_seed(0)
    flash, job = small_job(kind, "bfloat16", flash=True), small_job(kind)
    choices = choose(flash, CPU)
    assert choices.attention.name == name
    assert reason in choices.attention.reason
    kernel = kernels(flash)["atten_flash"]
    ready = build(kernel, job, CPU, choices)
    exact = as_double(ready.tensors, ("query", "key", "value"))
    out = REFERENCES["flash_attention"](exact, kernel.shape)
    assert_close(ready.forward(), out, tolerance, "output")
    assert ready.input_grad is not None
    expected = torch.autograd.grad(out, [exact[n] for n in ("query", "key", "value")], exact["grad_out"])
    for mine, reference in zip(ready.input_grad(), expected, strict=True):  # type: ignore[call-overload]
        assert_close(mine, reference, tolerance, "gradient")


@pytest.mark.parametrize("kind", ["gpt", "llama_gqa", "gqa_qk_norm_sp"])
def test_flash_attn_is_used_where_it_is_installed(install: Install, kind: str) -> None:
    """Called as its varlen function wants it, with grouped K and V as they are."""
    install_flash_attn(install)
    check_flash(kind, "flash-attn 2.7.4", "the first choice, and it works here")


def test_without_flash_attn_sdpa_flash_runs_and_the_reason_is_recorded(install: Install) -> None:
    del install
    check_flash("llama_gqa", "torch SDPA flash", "flash-attn is not installed")


def test_a_broken_flash_attn_is_recorded_and_not_used(install: Install) -> None:
    """A build for another PyTorch, or a GPU that it has no kernel for, shows only when it is called."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")

    install_flash_attn(install, refuse)
    reason = "flash-attn 2.7.4 refused: FlashAttention only supports Ampere GPUs or newer."
    check_flash("gpt", "torch SDPA flash", reason)


def test_flash_attention_4_alone_is_refused_not_a_crash(install: Install) -> None:
    """Its wheel leaves `flash_attn` as a namespace: no version, no function."""
    install("flash_attn", __path__=["somewhere"])
    check_flash("gpt", "torch SDPA flash", "FlashAttention-2 is not installed")
    install("flash_attn", __version__="2.9", flash_attn_func=standins.flash_attn_varlen_func)
    check_flash("gpt", "torch SDPA flash", "FlashAttention-2 is not installed")


def test_an_implementation_that_gives_nan_is_not_used(install: Install) -> None:
    def nan(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        return (q + k + v) * float("nan")

    install_flash_attn(install, nan)
    check_flash("gpt", "torch SDPA flash", "flash-attn 2.7.4 refused: its results are not finite")


def test_latent_attention_pads_v_and_says_so(install: Install) -> None:
    """Q and K are 24 wide, V 16: SDPA's flash backend refuses, flash-attn takes V padded."""
    check_flash("mla", "torch SDPA flash, V padded from 16 to 24", "flash-attn is not installed")
    install_flash_attn(install)
    check_flash("mla", "flash-attn 2.7.4, V padded from 16 to 24", "torch SDPA flash refused: ")


def test_sdpa_that_refuses_grouped_heads_gets_k_and_v_repeated(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch before 2.5, whose SDPA has no enable_gqa."""
    del install
    real = functional.scaled_dot_product_attention

    def old(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        return real(query, key, value, is_causal=is_causal)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", old)
    check_flash("llama_gqa", "torch SDPA flash, K and V repeated", "unexpected keyword argument 'enable_gqa'")


def test_sdpa_never_falls_to_the_math_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its flash backend switched off, attention is recorded as unfused, not timed as if it were flash."""
    monkeypatch.setattr(implementations, "EXTENSION_DEVICES", ())
    real = functional.scaled_dot_product_attention

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        assert not torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_flash_sdp(False)
        return real(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", refuse)
    check_flash("gpt", "unfused", "torch SDPA flash refused: ")
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("installed", [False, True])
def test_heads_wider_than_flash_kernels_fall_to_unfused(install: Install, installed: bool) -> None:
    """Head dim 320: the section keeps its name, the profile says what ran."""
    if installed:
        install_flash_attn(install)
    job = small_job("gpt", "bfloat16", flash=True, model={"kv_channels": 320})
    choices = choose(job, CPU)
    assert choices.attention.name == "unfused"
    assert choices.attention.reason.endswith("head dim 320 > 256")
    kernel = kernels(job)["atten_flash"]
    ready = build(kernel, job, CPU, choices)
    exact = as_double(ready.tensors, ())
    assert_close(ready.forward(), REFERENCES["flash_attention"](exact, kernel.shape), 2e-2, "output")


def test_heads_not_a_multiple_of_8_are_not_given_to_flash_attn(install: Install) -> None:
    install_flash_attn(install)
    choice = choose(small_job("gpt", "bfloat16", flash=True, model={"kv_channels": 20}), CPU).attention
    assert choice.name == "torch SDPA flash"
    assert "head dim 20" in choice.reason
    assert "not a multiple of 8" in choice.reason


def test_flash_attention_switched_off_is_unfused() -> None:
    choice = choose(small_job("gpt", "bfloat16", flash=False), CPU).attention
    assert (choice.name, choice.reason) == ("unfused", "--use_flash_attn is off")
    choice = choose(small_job("gpt", "float32", flash=False), CPU).attention
    assert (choice.name, choice.reason) == ("unfused", "flash attention has no float32 kernels")


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
    monkeypatch.setattr(implementations, "EXTENSION_DEVICES", ("cpu",))
    install_apex(install)
    assert choose(small_job("gpt"), CPU).optimizer.name == "apex FusedAdam"


def test_grouped_gemms_are_chosen_by_the_flag_and_by_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(small_job("gpt"), CPU).grouped_gemm.name == "none"
    choice = choose(small_job("moe_loop_shared_sp"), CPU).grouped_gemm
    assert (choice.name, choice.reason) == ("loop over experts", "--moe_grouped_gemm is off")
    monkeypatch.setattr(functional, "grouped_mm", None, raising=False)
    monkeypatch.setattr(torch, "_grouped_mm", None, raising=False)
    choice = choose(small_job("moe_bias"), CPU).grouped_gemm
    assert choice.name == "loop over experts"
    assert "has no grouped matmul" in choice.reason


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="a PyTorch without grouped matmuls")
def test_grouped_gemms_run_in_one_kernel_where_torch_has_it() -> None:
    """Expert widths that are no multiple of 16 bytes are refused by the kernel, and that is recorded."""
    assert choose(small_job("moe_bias"), CPU).grouped_gemm.name == "torch grouped_mm"
    choice = choose(small_job("moe_bias", model={"moe_ffn_hidden_size": 46}), CPU).grouped_gemm
    assert choice.name == "loop over experts"
    assert "torch grouped_mm refused: " in choice.reason


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
        assert (choice.name, choice.reason) == ("loop over experts", said)


def test_extensions_are_not_tried_where_they_have_no_kernels() -> None:
    """On a machine with a GPU, `--device cpu` must not record apex or flash-attn as what ran."""
    job = small_job("gpt", "bfloat16", flash=True)
    choices = choose(job, CPU)
    assert choices.attention.reason == "flash-attn does not run on cpu"
    assert "apex does not run on cpu" in choices.norm.reason
