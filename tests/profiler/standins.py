"""Stand-ins for flash-attn and apex with their signatures and rules, computed by the float64 references."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tests.profiler.numerics import attention, norm


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """flash-attn 2.7.4's signature and rules (flash_attn_interface.py, flash_api.cpp), computed in float64."""
    assert dropout_p == 0.0
    assert softmax_scale is None
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.size(-1) == k.size(-1) == v.size(-1) <= 256
    assert q.size(-1) % 8 == 0
    assert q.size(1) % k.size(1) == 0
    ends = cu_seqlens_q.tolist()
    assert ends == cu_seqlens_k.tolist()
    assert ends[-1] == len(q) == len(k) == len(v)
    parts = list(pairwise(ends))
    assert max(b - a for a, b in parts) == max_seqlen_q == max_seqlen_k
    return torch.cat([attention(q[a:b].double(), k[a:b].double(), v[a:b].double()) for a, b in parts]).to(q.dtype)


def flash_attn_3_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3's (hopper/flash_attn_interface.py): no dropout, V of its own width; log-sum-exp beside."""
    assert seqused_q is None
    assert seqused_k is None
    assert softmax_scale is None
    assert causal
    assert q.size(-1) == k.size(-1)
    assert max_seqlen_q == max_seqlen_k
    ends = cu_seqlens_q.tolist()
    assert ends == cu_seqlens_k.tolist()
    parts = [attention(q[a:b].double(), k[a:b].double(), v[a:b].double()) for a, b in pairwise(ends)]
    return torch.cat(parts).to(q.dtype), q.new_zeros(q.size(1), len(q))


class _FakeNorm(nn.Module):
    """Computes in float64, as a stand-in for a kernel that accumulates in fp32."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        assert eps == 1e-5
        self.weight = nn.Parameter(torch.ones(width))
        if bias:
            self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.double() if hasattr(self, "bias") else None
        return norm(x.double(), self.weight.double(), bias).to(x.dtype)


class FastLayerNorm(_FakeNorm):
    """apex.contrib.layer_norm's signature."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:  # noqa: ARG002
        super().__init__(hidden_size, eps, bias=True)


class FusedLayerNorm(_FakeNorm):
    """apex.normalization's signature."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        assert elementwise_affine
        super().__init__(normalized_shape, eps, bias=True)


class FusedRMSNorm(_FakeNorm):
    """apex.normalization's signature."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        assert elementwise_affine
        super().__init__(normalized_shape, eps, bias=False)


class FusedAdam:
    """apex.optimizers' signature, around torch's AdamW."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        assert bias_correction
        assert adam_w_mode
        assert betas == (0.9, 0.999)
        self._inner = torch.optim.AdamW(params, lr=lr, eps=eps, weight_decay=weight_decay, foreach=True)

    def step(self) -> None:
        self._inner.step()
