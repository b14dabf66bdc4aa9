"""Choosing among implementations: the first that imports, whose rule allows the shape and that works here is taken.

What spoke against those before it is the recorded reason.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from aicb.config.training import ATTENTION_BACKENDS
from aicb.errors import UserError, require

EXTENSION_DEVICES = ("cuda",)
"""Where the kernels of flash-attn and apex run."""
FIRST = "the first choice, and it works here"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs and why, for the profile's comments."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which kernels run where there are several, as the command line says it."""

    attention_backend: str = "auto"
    """One of ATTENTION_BACKENDS."""
    fusion: bool = True
    """Element-wise kernels fused where they can be."""
    gradient_accumulation_fusion: bool | None = None
    """GEMMs that add their weight gradient to the fp32 main gradient themselves; None: for 16-bit types."""

    def __post_init__(self) -> None:
        require(
            self.attention_backend in ATTENTION_BACKENDS,
            f"--attention_backend {self.attention_backend} must be one of {', '.join(ATTENTION_BACKENDS)}",
        )

    def marks(self) -> list[str]:
        """Return what is not the default, as file names carry it."""
        marks = [f"attention_{self.attention_backend}"] * (self.attention_backend != "auto")
        marks += ["no_fusion"] * (not self.fusion)
        if self.gradient_accumulation_fusion is not None:
            marks.append(f"{'' if self.gradient_accumulation_fusion else 'no_'}gradient_accumulation_fusion")
        return marks


class RefusedError(Exception):
    """Why a candidate cannot be used; the whole text is the recorded reason."""


def first_working(
    candidates: Iterable[Callable[[], tuple[str, T]]],
    probe: Callable[[T], Iterable[Tensor]],
    why: str = "",
    otherwise: str = "nothing works on this device",
) -> tuple[Choice, T]:
    """The first candidate, a function returning name and callable, that works; the reasons against those before it.

    `why` comes before them. Raises UserError, beginning with `otherwise`, when none works.
    """
    reasons: dict[str, None] = {why: None} if why else {}  # in order, each once
    for make in candidates:
        try:
            name, made = make()
            _try(name, made, probe)
        except RefusedError as refusal:  # noqa: PERF203 (a handful of candidates)
            reasons[str(refusal)] = None
        else:
            return Choice(name, "; ".join(reasons) or FIRST), made
    raise UserError(f"{otherwise}: {'; '.join(reason for reason in reasons if reason != why)}; try --device cpu")


def _try(name: str, made: T, probe: Callable[[T], Iterable[Tensor]]) -> None:
    with warnings.catch_warnings(record=True) as said:  # PyTorch warns of what its error leaves out
        warnings.simplefilter("always")
        try:
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in probe(made))
        except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, ImportError, OSError) as error:
            texts = [str(error), *(str(warning.message).split(" (Triggered")[0] for warning in said)]
            reason = " ".join(" ".join(text.splitlines()[0] for text in texts if text).split())
            raise RefusedError(f"{name} refused: {reason or type(error).__name__}") from error
    if not finite:
        raise RefusedError(f"{name} refused: its results are not finite")


def extension(module: str, package: str, device: torch.device) -> Any:
    """Import an optional package's module. Raises RefusedError."""
    if device.type not in EXTENSION_DEVICES:
        raise RefusedError(f"{package} does not run on {device.type}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RefusedError(f"{package} is not installed (no module {error.name or module})") from error
    except (ImportError, OSError, SyntaxError, AttributeError, RuntimeError) as error:
        raise RefusedError(
            f"{package} does not import: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a card; (0, 0) of what is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
