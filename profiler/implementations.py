"""Chooses what runs: flash-attn, torch SDPA or unfused attention; apex or torch norms and Adam; grouped GEMM or loop.

The only place that knows optional packages. A candidate is chosen when it imports, its rule allows the shape, and a
tiny forward and backward on the device succeeds; the recorded reason is what spoke against those before it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from aicb.config.job import Job
from aicb.errors import UserError
from aicb.step.kernels import attention_widths, kernel_table
from profiler.attention import Attend, FlashAttn, SdpaFlash, attend_unfused
from profiler.grouped import Grouped, GroupedGemm, Loop

FLASH_MOST_WIDTH = 256
"""Widest head of FlashAttention-2, and of its copy in PyTorch."""
APEX_FAST_WIDTHS = frozenset(
    {1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288}
    | {12800, 15360, 16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536}
)  # Megatron-Core 0.13.1, fusions/fused_layer_norm.py
GROUPED_MM_CAPABILITIES = ((9, 0), (10, 0))
EXTENSION_DEVICES = ("cuda",)
"""Where the kernels of flash-attn and apex run."""
EPSILON = 1e-5
ADAM: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs and why, for the profile's comments."""

    name: str
    reason: str


class Optimizer(Protocol):
    """What is timed of an optimizer."""

    def step(self) -> object:
        """Update the parameters from their gradients."""


MakeNorm = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass(slots=True, kw_only=True)
class Choices:
    """The chosen implementations: what to write into the profile, and what to call."""

    attention: Choice
    norm: Choice
    grouped_gemm: Choice
    optimizer: Choice
    attend: Attend
    norms: dict[int, MakeNorm]
    """By width: makes the norm's module, with `weight` and, for LayerNorm, `bias`."""
    experts: GroupedGemm
    make_optimizer: MakeOptimizer


def choose(job: Job, device: torch.device) -> Choices:
    """Choose for every kernel of `job` on `device`, trying candidates there. Raises UserError when none works."""
    attention, attend = _choose_attention(job, device)
    norm, norms = _choose_norms(job, device)
    grouped_gemm, experts = _choose_grouped_gemm(job, device)
    optimizer, make_optimizer = _choose_optimizer(device)
    return Choices(
        attention=attention,
        norm=norm,
        grouped_gemm=grouped_gemm,
        optimizer=optimizer,
        attend=attend,
        norms=norms,
        experts=experts,
        make_optimizer=make_optimizer,
    )


class _RefusedError(Exception):
    """Why a candidate cannot be used; the whole text is the recorded reason."""


def _first(
    candidates: Iterable[Callable[[], tuple[str, T]]], probe: Callable[[T], Iterable[Tensor]]
) -> tuple[Choice, T]:
    """The first candidate, a function returning name and callable, that works; the reasons against those before it."""
    reasons: dict[str, None] = {}  # in order, each once
    for make in candidates:
        try:
            name, made = make()
            _try(name, made, probe)
        except _RefusedError as refusal:  # noqa: PERF203 (a handful of candidates)
            reasons[str(refusal)] = None
        else:
            return Choice(name, "; ".join(reasons) or "the first choice, and it works here"), made
    raise UserError(f"nothing works on this device: {'; '.join(reasons)}; try --device cpu")


def _try(name: str, made: T, probe: Callable[[T], Iterable[Tensor]]) -> None:
    with warnings.catch_warnings(record=True) as said:  # PyTorch warns of what its error leaves out
        warnings.simplefilter("always")
        try:
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in probe(made))
        except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, ImportError, OSError) as error:
            texts = [str(error), *(str(warning.message).split(" (Triggered")[0] for warning in said)]
            reason = " ".join(" ".join(text.splitlines()[0] for text in texts if text).split())
            raise _RefusedError(f"{name} refused: {reason or type(error).__name__}") from error
    if not finite:
        raise _RefusedError(f"{name} refused: its results are not finite")


def _extension(module: str, package: str, device: torch.device) -> Any:
    """Import an optional package's module."""
    if device.type not in EXTENSION_DEVICES:
        raise _RefusedError(f"{package} does not run on {device.type}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _RefusedError(f"{package} is not installed (no module {error.name or module})") from error
    except (ImportError, OSError, SyntaxError, AttributeError, RuntimeError) as error:
        raise _RefusedError(
            f"{package} does not import: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error


# Attention


def flash_refusal(qk_width: int, v_width: int) -> str:
    """Say why no flash kernel takes heads this wide, or return an empty string."""
    widest = max(qk_width, v_width)
    return f"head dim {widest} > {FLASH_MOST_WIDTH}" if widest > FLASH_MOST_WIDTH else ""


def _choose_attention(job: Job, device: torch.device) -> tuple[Choice, Attend]:
    if not job.training.use_flash_attn:
        why = "flash attention has no float32 kernels" if job.training.dtype == "float32" else "--use_flash_attn is off"
        return Choice("unfused", why), attend_unfused
    qk, v = attention_widths(job)
    heads, groups = job.model.num_attention_heads // job.tp, job.model.num_query_groups // job.tp
    dtype = getattr(torch, job.training.dtype)

    def probe(attend: Attend) -> Iterable[Tensor]:
        sizes = ((heads, qk), (groups, qk), (groups, v))
        qkv = [torch.randn(1, 16, *size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
        out = attend(*qkv)
        return torch.autograd.grad(out, qkv, torch.randn_like(out))

    def unfused() -> tuple[str, Attend]:
        return "unfused", attend_unfused

    flash = partial(_flash_attn, qk, v, device)
    repeats = (False,) if heads == groups else (False, True)
    plain = [partial(_sdpa, qk, v, repeat, False) for repeat in repeats]
    if qk == v:
        return _first([flash, *plain, unfused], probe)
    padded = [partial(_sdpa, qk, v, repeat, True) for repeat in repeats]
    return _first([*plain, flash, *padded, unfused], probe)


def _padding(qk: int, v: int) -> str:
    return f", V padded from {v} to {qk}" if v != qk else ""


def _flash_attn(qk: int, v: int, device: torch.device) -> tuple[str, Attend]:
    package = _extension("flash_attn", "flash-attn", device)
    version, function = (getattr(package, name, None) for name in ("__version__", "flash_attn_varlen_func"))
    if version is None or function is None:  # FlashAttention-4 alone leaves a namespace of this name
        raise _RefusedError("flash-attn has no flash_attn_varlen_func: FlashAttention-2 is not installed")
    if refusal := flash_refusal(qk, v):
        raise _RefusedError(refusal)
    if qk % 8 or v > qk:
        raise _RefusedError(f"flash-attn: head dim {qk} (V {v}) is not a multiple of 8, or narrower than V")
    return f"flash-attn {version}{_padding(qk, v)}", FlashAttn(function)


def _sdpa(qk: int, v: int, repeat: bool, pad: bool) -> tuple[str, Attend]:
    if refusal := flash_refusal(qk, v):
        raise _RefusedError(refusal)
    if pad and v > qk:
        raise _RefusedError(f"torch SDPA flash: V's head dim {v} > {qk}")
    name = f"torch SDPA flash{', K and V repeated' if repeat else ''}{_padding(qk, v) if pad else ''}"
    return name, SdpaFlash(repeat, pad)


# Norms


def _choose_norms(job: Job, device: torch.device) -> tuple[Choice, dict[int, MakeNorm]]:
    widths = dict.fromkeys(kernel.shape["width"] for kernel in kernel_table(job) if kernel.op == "norm")
    chosen = {width: _choose_norm(job, width, device) for width in widths}
    names: dict[str, list[int]] = {}
    for width, (choice, _) in chosen.items():
        names.setdefault(choice.name, []).append(width)
    said = [name if len(names) == 1 else f"{name} ({', '.join(map(str, of))})" for name, of in names.items()]
    reasons = dict.fromkeys(choice.reason for choice, _ in chosen.values())
    return Choice(", ".join(said), "; ".join(reasons)), {width: make for width, (_, make) in chosen.items()}


def _choose_norm(job: Job, width: int, device: torch.device) -> tuple[Choice, MakeNorm]:
    dtype, layer_norm = getattr(torch, job.training.dtype), job.model.normalization == "LayerNorm"

    def probe(make: MakeNorm) -> Iterable[Tensor]:
        module = make().to(device=device, dtype=dtype)
        x = torch.randn(2, width, device=device, dtype=dtype, requires_grad=True)
        out = module(x)
        return torch.autograd.grad(out, [x, *module.parameters()], torch.randn_like(out))

    def apex(submodule: str, name: str) -> tuple[str, MakeNorm]:
        if name == "FastLayerNorm" and width not in APEX_FAST_WIDTHS:
            raise _RefusedError(f"apex FastLayerNorm has no kernel for width {width}")
        found = getattr(_extension(submodule, "apex", device), name, None)
        if found is None:
            raise _RefusedError(f"apex has no {name}")
        return f"apex {name}", partial(found, width, eps=EPSILON)

    def plain() -> tuple[str, MakeNorm]:
        return f"torch {job.model.normalization}", partial(getattr(nn, job.model.normalization), width, eps=EPSILON)

    if layer_norm:
        fast = partial(apex, "apex.contrib.layer_norm", "FastLayerNorm")
        return _first([fast, partial(apex, "apex.normalization", "FusedLayerNorm"), plain], probe)
    return _first([partial(apex, "apex.normalization", "FusedRMSNorm"), plain], probe)


# Experts


def grouped_mm_refusal(dtype: torch.dtype, device: torch.device) -> str:
    """Say why PyTorch's grouped_mm has no kernel of its own here, or return an empty string.

    Elsewhere it copies the offsets to the host and runs one GEMM an expert, in silence (torch 2.13, GroupedBlas.cpp).
    """
    if device.type != "cuda":
        return ""  # a CPU has only the loop inside it, and nothing to wait for
    capability = torch.cuda.get_device_capability(device)
    if dtype == torch.bfloat16 and capability in GROUPED_MM_CAPABILITIES:
        return ""
    where = f"{str(dtype).removeprefix('torch.')} on compute capability {capability[0]}.{capability[1]}"
    known = ", ".join(f"{major}.{minor}" for major, minor in GROUPED_MM_CAPABILITIES)
    return f"torch grouped_mm has no kernel for {where}, only for bfloat16 on {known}: it would loop in silence"


def _choose_grouped_gemm(job: Job, device: torch.device) -> tuple[Choice, GroupedGemm]:
    if not job.model.num_experts:
        return Choice("none", "the model has no experts"), Loop()
    if not job.model.moe_grouped_gemm:
        return Choice("loop over experts", "--moe_grouped_gemm is off"), Loop()
    dtype, shapes = getattr(torch, job.training.dtype), [k.shape for k in kernel_table(job) if k.op == "grouped_gemm"]

    def probe(experts: GroupedGemm) -> Iterable[Tensor]:
        counts, ends = [16, 16], torch.tensor([16, 32], device=device, dtype=torch.int32)
        for shape in shapes:
            k, n = (64 + shape[name] % 16 for name in ("k", "n"))  # aligned as the kernel's own
            x, grad = (torch.randn(32, size, device=device, dtype=dtype) for size in (k, n))
            weight = torch.randn(2, n, k, device=device, dtype=dtype)
            yield experts.forward(x, weight, counts, ends)
            yield experts.input_grad(grad, weight, counts, ends)
            yield experts.weight_grad(grad, x, counts, ends)

    def grouped() -> tuple[str, GroupedGemm]:
        if refusal := grouped_mm_refusal(dtype, device):
            raise _RefusedError(refusal)
        # functional.grouped_mm; torch._grouped_mm when it was new (2.8)
        found = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if found is None:
            raise _RefusedError(f"torch {torch.__version__} has no grouped matmul")
        return "torch grouped_mm", Grouped(found)

    def loop() -> tuple[str, GroupedGemm]:
        return "loop over experts", Loop()

    return _first([grouped, loop], probe)


# Optimizer


def _choose_optimizer(device: torch.device) -> tuple[Choice, MakeOptimizer]:
    def probe(make: MakeOptimizer) -> Iterable[Tensor]:
        parameter = torch.randn(8, device=device)
        parameter.grad = torch.randn_like(parameter)
        make([parameter]).step()
        return [parameter]

    def apex() -> tuple[str, MakeOptimizer]:
        fused = getattr(_extension("apex.optimizers", "apex", device), "FusedAdam", None)
        if fused is None:
            raise _RefusedError("apex has no FusedAdam")
        return "apex FusedAdam", partial(fused, **ADAM)

    def torch_adam(way: str) -> tuple[str, MakeOptimizer]:
        options = {**ADAM, way: True}
        return f"torch AdamW {way}", partial(torch.optim.AdamW, **options)

    return _first([apex, partial(torch_adam, "fused"), partial(torch_adam, "foreach")], probe)
