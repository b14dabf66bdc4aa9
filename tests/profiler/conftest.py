"""Optional packages, there or not as a test says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from profiler import candidates

Install = Callable[..., None]
OPTIONAL = ("flash_attn", "flash_attn_interface", "apex", "fused_weight_gradient_mlp_cuda")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a module importable, with these attributes; without any, make sure that it is not."""
    monkeypatch.setattr(candidates, "EXTENSION_DEVICES", ("cpu",))

    def put(name: str, **attributes: Any) -> None:
        module: ModuleType | None = None
        if attributes:
            module = ModuleType(name)
            module.__dict__.update(attributes)
            for end in (i for i, letter in enumerate(name) if letter == "."):
                monkeypatch.setitem(sys.modules, name[:end], sys.modules.get(name[:end]) or ModuleType(name[:end]))
        monkeypatch.setitem(sys.modules, name, module)

    for name in OPTIONAL:
        put(name)
    return put
