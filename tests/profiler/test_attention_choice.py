"""What runs attention and why: with stand-ins for flash-attn, on stand-ins for cards, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from aicb.errors import UserError
from profiler import attention_choice, candidates
from profiler.builders import build
from profiler.candidates import Wanted
from profiler.implementations import choose
from tests.profiler import standins
from tests.profiler.conftest import Install
from tests.profiler.numerics import CPU, REFERENCES, as_double, assert_close, kernels, small_job


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

    def old(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
        return real(query, key, value, dropout_p=dropout_p, is_causal=is_causal)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", old)
    check_flash("llama_gqa", "torch SDPA flash, K and V repeated", "unexpected keyword argument 'enable_gqa'")


def test_sdpa_never_falls_to_the_math_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its flash backend switched off, attention is recorded as unfused, not timed as if it were flash."""
    monkeypatch.setattr(candidates, "EXTENSION_DEVICES", ())
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
    assert (choice.name, choice.reason) == ("unfused", "flash attention is off")
    choice = choose(small_job("gpt", "float32", flash=False), CPU).attention
    assert (choice.name, choice.reason) == ("unfused", "flash attention has no float32 kernels")


# The order, on stand-ins for cards


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A device of some compute capability, with a cuDNN that is PyTorch's flash kernel under another name, or none."""

    def become(capability: tuple[int, int], cudnn: bool = True) -> None:
        monkeypatch.setattr(attention_choice, "capability", lambda _: capability)
        monkeypatch.setattr(attention_choice, "CUDNN_DEVICES", ("cpu",))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
        backend = SDPBackend.FLASH_ATTENTION if cudnn else SDPBackend.CUDNN_ATTENTION
        monkeypatch.setitem(attention_choice._SDPA, "cudnn", ("torch SDPA cuDNN", backend))

    return become


def install_all(install: Install) -> None:
    install_flash_attn(install)
    install("flash_attn_interface", flash_attn_varlen_func=standins.flash_attn_3_varlen_func)


@pytest.mark.parametrize(
    ("capability", "cudnn", "packages", "name"),
    [
        ((9, 0), True, True, "torch SDPA cuDNN 91002"),
        ((9, 0), False, True, "FlashAttention-3"),
        ((9, 0), False, False, "torch SDPA flash"),
        ((10, 0), True, True, "torch SDPA cuDNN 91002"),
        ((10, 0), False, True, "flash-attn 2.7.4"),
        ((8, 0), True, True, "flash-attn 2.7.4"),
        ((8, 9), True, False, "torch SDPA cuDNN 91002"),
        ((8, 0), False, False, "torch SDPA flash"),
    ],
)
def test_auto_takes_what_transformer_engine_would(
    install: Install,
    card: Callable[..., None],
    capability: tuple[int, int],
    cudnn: bool,
    packages: bool,
    name: str,
) -> None:
    """cuDNN first from 9.0 on; FlashAttention-3 on 9.x alone; FlashAttention-2 first on older cards."""
    card(capability, cudnn)
    if packages:
        install_all(install)
    reason = f"Transformer Engine's order on compute capability {capability[0]}.{capability[1]}: "
    check_flash("llama_gqa", name, reason)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("cudnn", "torch SDPA cuDNN 91002"),
        ("fused", "torch SDPA cuDNN 91002"),
        ("fa3", "FlashAttention-3"),
        ("flash", "FlashAttention-3"),
        ("fa2", "flash-attn 2.7.4"),
        ("sdpa", "torch SDPA flash"),
        ("unfused", "unfused"),
    ],
)
def test_a_backend_that_is_asked_for_is_taken_or_refused(
    install: Install, card: Callable[..., None], backend: str, name: str
) -> None:
    card((9, 0))
    install_all(install)
    job, wanted = small_job("gpt", "bfloat16", flash=True), Wanted(attention_backend=backend)
    choice = choose(job, CPU, wanted).attention
    assert choice.name == name
    assert choice.reason == f"--attention_backend {backend}"


@pytest.mark.parametrize("backend", ["cudnn", "fa3", "fa2"])
def test_a_backend_that_does_not_run_here_is_an_error_not_another(install: Install, backend: str) -> None:
    del install
    job = small_job("gpt", "bfloat16", flash=True)
    with pytest.raises(UserError) as caught:
        choose(job, CPU, Wanted(attention_backend=backend))
    said = {
        "cudnn": "cuDNN does not run on cpu",
        "fa3": "FlashAttention-3 is not",
        "fa2": "flash-attn is not installed",
    }
    assert str(caught.value).startswith(f"--attention_backend {backend} does not work here: {said[backend]}")


def test_widths_that_differ_are_padded_only_where_nothing_takes_them(
    install: Install, card: Callable[..., None]
) -> None:
    """Latent attention, 24 and 16: FlashAttention-3 takes both as they are, neither -2 nor SDPA does."""
    card((9, 0))
    install_all(install)
    check_flash("mla", "FlashAttention-3", "torch SDPA cuDNN 91002 refused: ")
    card((8, 0))
    check_flash(
        "mla", "flash-attn 2.7.4, V padded from 16 to 24", "takes no V of head dim 16 beside 24 without padding"
    )


def test_dropout_reaches_the_kernel_and_rules_out_flash_attention_3(
    install: Install, card: Callable[..., None]
) -> None:
    card((9, 0), cudnn=False)
    given = []

    def spy(*args: Any, dropout_p: float = 0.0, **more: Any) -> Tensor:
        given.append(dropout_p)
        return standins.flash_attn_varlen_func(*args, **more)

    install("flash_attn_interface", flash_attn_varlen_func=standins.flash_attn_3_varlen_func)
    install_flash_attn(install, spy)
    choice = choose(small_job("gpt_dropout", "bfloat16", flash=True), CPU).attention
    assert choice.name == "flash-attn 2.7.4"
    assert "FlashAttention-3 has no dropout, and --attention_dropout is 0.25" in choice.reason
    assert given == [0.25]


def test_flash_attention_3_runs_on_hopper_alone(install: Install, card: Callable[..., None]) -> None:
    card((10, 0))
    install_all(install)
    with pytest.raises(UserError, match=r"FlashAttention-3 needs a card of compute capability 9\.x"):
        choose(small_job("gpt", "bfloat16", flash=True), CPU, Wanted(attention_backend="fa3"))


def test_an_unknown_backend_names_those_there_are() -> None:
    with pytest.raises(UserError, match="--attention_backend fast must be one of auto, cudnn, fa3, fa2, sdpa, unfused"):
        Wanted(attention_backend="fast")
