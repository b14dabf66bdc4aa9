"""Chooses what runs core attention: cuDNN, FlashAttention-3 or -2, PyTorch's flash kernel, or unfused kernels.

`auto` takes what Transformer Engine would (2.x, attention/dot_product_attention/utils.py, get_attention_backend):
cuDNN from compute capability 9.0 on where it takes the shape, else FlashAttention-3 (9.x) or -2; FlashAttention-2 first
on older cards. PyTorch's flash kernel, FlashAttention-2's copy, stands in where neither package is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from aicb.config.job import Job
from aicb.step.kernels import attention_widths
from profiler.attention import Attend, FlashAttn, Sdpa, Unfused
from profiler.candidates import Choice, RefusedError, Wanted, capability, extension, first_working
from profiler.fusion import Elementwise

FLASH_MOST_WIDTH = 256
"""Widest head of FlashAttention-2 and -3, of its copy in PyTorch, and of cuDNN's backward."""
CUDNN_DEVICES = ("cuda",)
CUDNN, FA3, FA2, SDPA, UNFUSED = "cudnn", "fa3", "fa2", "sdpa", "unfused"
_MEANT = {"flash": (FA3, FA2, SDPA), "fused": (CUDNN,), "local": (UNFUSED,)}
"""Megatron's words."""
Candidate = Callable[[], tuple[str, Attend]]


def flash_refusal(qk_width: int, v_width: int) -> str:
    """Say why no fused kernel takes heads this wide, or return an empty string."""
    widest = max(qk_width, v_width)
    return f"head dim {widest} > {FLASH_MOST_WIDTH}" if widest > FLASH_MOST_WIDTH else ""


def choose_attention(job: Job, device: torch.device, wanted: Wanted, elementwise: Elementwise) -> tuple[Choice, Attend]:
    """Choose for `job` on `device`. Raises UserError where what was asked for does not run here."""
    unfused = Unfused(job.model.attention_dropout, elementwise.causal_softmax)
    if not job.training.use_flash_attn:
        why = "flash attention has no float32 kernels" if job.training.dtype == "float32" else "flash attention is off"
        return Choice(UNFUSED, why), unfused
    backend = wanted.attention_backend
    if backend == "auto":
        order, why = _order(device)
        otherwise = "nothing works on this device"
    else:
        order, why = _MEANT.get(backend, (backend,)), f"--attention_backend {backend}"
        otherwise = f"--attention_backend {backend} does not work here"
    shape = _Shape(job, device)
    return first_working(_candidates(order, shape, unfused), shape.probe, why, otherwise)


def _order(device: torch.device) -> tuple[Sequence[str], str]:
    """Transformer Engine's order on this device, and that it is."""
    major, minor = capability(device)
    if device.type not in CUDNN_DEVICES:
        return (FA2, SDPA, UNFUSED), ""
    if major < 9:
        order: tuple[str, ...] = (FA2, CUDNN, SDPA, UNFUSED)
    else:
        order = (CUDNN, *([FA3] if major == 9 else []), FA2, SDPA, UNFUSED)
    return order, f"Transformer Engine's order on compute capability {major}.{minor}: {', '.join(order[:-2])}"


class _Shape:
    """The heads of a job, and what tries a candidate on a few tokens of them."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.device, self.dropout = device, job.model.attention_dropout
        self.qk, self.v = attention_widths(job)
        self.heads, self.groups = job.model.num_attention_heads // job.tp, job.model.num_query_groups // job.tp
        self.dtype = getattr(torch, job.training.dtype)

    def probe(self, attend: Attend) -> Iterable[Tensor]:
        sizes = ((self.heads, self.qk), (self.groups, self.qk), (self.groups, self.v))
        qkv = [torch.randn(1, 16, *size, device=self.device, dtype=self.dtype, requires_grad=True) for size in sizes]
        out = attend(*qkv)
        return torch.autograd.grad(out, qkv, torch.randn_like(out))


def _candidates(order: Sequence[str], shape: _Shape, unfused: Unfused) -> list[Candidate]:
    """All of each kind in order: those that take V as wide as it is, those that pad it, unfused kernels last."""
    found: list[Candidate] = []
    for pad in (False, True) if shape.qk != shape.v else (False,):
        for kind in order:
            if kind in (FA2, FA3):
                found.append(partial(_flash_attn, _FLASH_ATTN[kind], shape, pad))
            elif kind != UNFUSED:
                repeats = (False,) if shape.heads == shape.groups else (False, True)
                found += [partial(_sdpa, kind, shape, repeat, pad) for repeat in repeats]
    return found + [lambda: (UNFUSED, unfused)] * (UNFUSED in order)


def _padding(shape: _Shape, pad: bool) -> str:
    return f", V padded from {shape.v} to {shape.qk}" if pad else ""


def _refuse_heads(shape: _Shape, pad: bool, what: str) -> None:
    if refusal := flash_refusal(shape.qk, shape.v):
        raise RefusedError(refusal)
    if pad and shape.v > shape.qk:
        raise RefusedError(f"{what}: V's head dim {shape.v} > {shape.qk}")


@dataclass(frozen=True, slots=True)
class _Package:
    module: str
    name: str
    function: str = "flash_attn_varlen_func"


_FLASH_ATTN = {FA2: _Package("flash_attn", "flash-attn"), FA3: _Package("flash_attn_interface", "FlashAttention-3")}


def _flash_attn(package: _Package, shape: _Shape, pad: bool) -> tuple[str, Attend]:
    found, three = extension(package.module, package.name, shape.device), package is _FLASH_ATTN[FA3]
    version, function = getattr(found, "__version__", None), getattr(found, package.function, None)
    if function is None or (version is None and not three):  # FlashAttention-4 alone leaves a namespace of this name
        raise RefusedError(
            f"{package.name} has no {package.function}: FlashAttention-{3 if three else 2} is not installed"
        )
    _refuse_heads(shape, pad, package.name)
    if shape.qk % 8:
        raise RefusedError(f"{package.name}: head dim {shape.qk} is not a multiple of 8")
    if three and shape.dropout:
        raise RefusedError(f"FlashAttention-3 has no dropout, and --attention_dropout is {shape.dropout:g}")
    if three and capability(shape.device)[0] != 9:
        raise RefusedError("FlashAttention-3 needs a card of compute capability 9.x")
    if shape.qk != shape.v and not pad and not three:
        raise RefusedError(f"flash-attn takes no V of head dim {shape.v} beside {shape.qk} without padding")
    name = package.name if version is None else f"{package.name} {version}"
    return f"{name}{_padding(shape, pad)}", FlashAttn(function, pad, shape.dropout)


_SDPA = {
    CUDNN: ("torch SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
    SDPA: ("torch SDPA flash", SDPBackend.FLASH_ATTENTION),
}


def _sdpa(kind: str, shape: _Shape, repeat: bool, pad: bool) -> tuple[str, Attend]:
    name, backend = _SDPA[kind]
    if kind == CUDNN and shape.device.type not in CUDNN_DEVICES:
        raise RefusedError(f"cuDNN does not run on {shape.device.type}")
    _refuse_heads(shape, pad, name)
    if kind == CUDNN:
        name += f" {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    name += f"{', K and V repeated' if repeat else ''}{_padding(shape, pad)}"
    return name, Sdpa(backend, repeat, pad, shape.dropout)
