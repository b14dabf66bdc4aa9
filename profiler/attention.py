"""Ways to run causal attention; profiler.implementations chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiler import functions


class Attend(Protocol):
    """Causal attention: (b, s, heads, qk), (b, s, groups, qk), (b, s, groups, v) -> (b, s, heads, v)."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
        """Return the context; differentiable."""


def attend_unfused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(b, s, heads, qk), (b, s, groups, qk), (b, s, groups, v) -> (b, s, heads, v): scores, softmax and context."""
    batch, seq, heads = query.shape[:3]
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    probabilities = functions.causal_softmax(functions.scores(query, key), functions.causal_mask(seq, query.device))
    return functions.context(probabilities, value).view(seq, batch, heads, -1).transpose(0, 1)


class FlashAttn:
    """flash-attn's `flash_attn_varlen_func` (flash_attn_interface.py): GQA natively; V padded to Q's head width."""

    def __init__(self, varlen: Callable[..., Tensor]) -> None:
        self._varlen = varlen

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
        """Return the context."""
        (batch, seq, _, qk), v = query.shape, value.size(-1)
        value = value if qk == v else functional.pad(value, (0, qk - v))
        packed = [x.reshape(batch * seq, *x.shape[2:]) for x in (query, key, value)]
        ends = _sequence_ends(batch, seq, query.device)
        out = self._varlen(*packed, ends, ends, seq, seq, causal=True)
        return out.view(batch, seq, *out.shape[1:])[..., :v]


@lru_cache(maxsize=4)
def _sequence_ends(batch: int, seq: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * seq, seq, device=device, dtype=torch.int32)


class SdpaFlash:
    """PyTorch's attention with its flash backend and no other: where that refuses, an error, never the math path."""

    def __init__(self, repeat: bool, pad: bool) -> None:
        self._repeat, self._pad = repeat, pad

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
        """Return the context."""
        (*_, heads, qk), (*_, groups, v) = query.shape, value.shape
        options: dict[str, Any] = {}
        if self._repeat:
            key, value = functions.repeat_groups(key, heads), functions.repeat_groups(value, heads)
        elif heads != groups:
            options["enable_gqa"] = True  # an argument since PyTorch 2.5
        if self._pad:
            value = functional.pad(value, (0, qk - v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            out = functional.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, **options
            )
        return out.transpose(1, 2)[..., :v]
