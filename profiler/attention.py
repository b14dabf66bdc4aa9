"""Ways to run causal attention; profiler.attention_choice chooses among them.

Dropout is a probability: 0 is none. Kernels draw their own masks.
"""

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


class Unfused:
    """Scores, softmax and context apart."""

    def __init__(
        self, dropout: float = 0.0, softmax: Callable[[Tensor, Tensor], Tensor] = functions.causal_softmax
    ) -> None:
        self._dropout, self._softmax = dropout, softmax

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
        """Return the context."""
        batch, seq, heads = query.shape[:3]
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        probabilities = self._softmax(functions.scores(query, key), functions.causal_mask(seq, query.device))
        probabilities = functions.drop(probabilities, self._dropout)
        return functions.context(probabilities, value).view(seq, batch, heads, -1).transpose(0, 1)


class FlashAttn:
    """flash-attn's `flash_attn_varlen_func`, of version 2 or 3: GQA natively; V padded to Q's head width if `pad`.

    Version 3 (the folder hopper of its repository) has no dropout, and early ones return the log-sum-exp too.
    """

    def __init__(self, varlen: Callable[..., Any], pad: bool, dropout: float = 0.0) -> None:
        self._varlen, self._pad = varlen, pad
        self._options: dict[str, Any] = {"causal": True} | ({"dropout_p": dropout} if dropout else {})

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
        """Return the context."""
        (batch, seq, _, qk), v = query.shape, value.size(-1)
        value = functional.pad(value, (0, qk - v)) if self._pad else value
        packed = [x.reshape(batch * seq, *x.shape[2:]) for x in (query, key, value)]
        ends = _sequence_ends(batch, seq, query.device)
        result = self._varlen(*packed, ends, ends, seq, seq, **self._options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.view(batch, seq, *out.shape[1:])[..., :v]


@lru_cache(maxsize=4)
def _sequence_ends(batch: int, seq: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * seq, seq, device=device, dtype=torch.int32)


class Sdpa:
    """PyTorch's attention with one backend and no other: where that refuses, an error, never the math path."""

    def __init__(self, backend: SDPBackend, repeat: bool, pad: bool, dropout: float = 0.0) -> None:
        self._backend, self._repeat, self._pad, self._dropout = backend, repeat, pad, dropout

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
        """Return the context."""
        (*_, heads, qk), (*_, groups, v) = query.shape, value.shape
        options: dict[str, Any] = {"dropout_p": self._dropout, "is_causal": True}
        if self._repeat:
            key, value = functions.repeat_groups(key, heads), functions.repeat_groups(value, heads)
        elif heads != groups:
            options["enable_gqa"] = True  # an argument since PyTorch 2.5
        if self._pad:
            value = functional.pad(value, (0, qk - v))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel([self._backend]):
            out = functional.scaled_dot_product_attention(query, key, value, **options)
        return out.transpose(1, 2)[..., :v]
