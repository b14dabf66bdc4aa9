"""The whole layer, against which the sum of the parts is checked, is a right layer and does the parts' work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from aicb.config.job import Job
from aicb.errors import UserError
from profiler import functions
from profiler.builders import Built, build
from profiler.layer import build_layer
from tests.profiler.numerics import (
    CPU,
    JOBS,
    TOLERANCES,
    as_double,
    assert_close,
    chosen,
    gradients,
    kernels,
    rotate_part,
    small_job,
)
from tests.profiler.numerics import activation as reference_activation
from tests.profiler.numerics import attention as reference_attention
from tests.profiler.numerics import norm as reference_norm
from tests.profiler.numerics import rotate as reference_rotate


class ReferenceLayer:
    """One dense pre-norm layer on one rank, in float64, sequence by sequence, from the built layer's weights."""

    def __init__(self, job: Job, tensors: dict[str, Tensor]) -> None:
        self.job, self.t = job, tensors

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.t[f"{name}.weight"].T
        return out + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else out

    def norm(self, name: str, x: Tensor) -> Tensor:
        return reference_norm(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def __call__(self, x: Tensor, prefix: str = "mlp") -> Tensor:
        """One sequence: (s, h) -> (s, h)."""
        latent, model = self.job.model.multi_latent_attention, self.job.model
        normed = self.norm("layernorm", x)
        query, key, value = self.latent(normed) if latent else self.heads(normed)
        context = reference_attention(query, key, value).flatten(start_dim=1)
        x = x + self.linear("attention_o_row" if latent else "atten_linear", context)
        x = x + self.t.get("atten_residual.bias", torch.zeros(1))
        hidden = self.linear(f"{prefix}_linear_1", self.norm("layernorm2", x))
        hidden = hidden + self.t.get(f"{prefix}_gelu.bias", torch.zeros(1))
        hidden = reference_activation(hidden, 2 if model.swiglu else 1, model.squared_relu)
        return x + self.linear(f"{prefix}_linear_2", hidden) + self.t.get("mlp_residual.bias", torch.zeros(1))

    def heads(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model = self.job.model
        width = model.kv_channels
        q, kv = model.num_attention_heads * width, model.num_query_groups * width
        qkv = self.linear("atten_qkv", normed)
        query, key, value = qkv[:, :q], qkv[:, q : q + kv], qkv[:, q + kv :]
        query, key, value = (part.reshape(len(part), -1, width) for part in (query, key, value))
        if model.position_embedding_type == "rope":
            turned = round(width * model.rotary_percent)
            query, key = (rotate_part(part, 0, turned) for part in (query, key))
        return query, key, value

    def latent(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepSeek-V2 (2405.04434), section 2.1: low-rank queries and keys, one rotary key for all heads."""
        model = self.job.model
        seq, nope = len(normed), model.qk_nope_dim
        low = self.norm("atten_q_layernorm", self.linear("attention_linear_q_lora", normed))
        query = self.linear("attention_q_column", low).reshape(seq, model.num_attention_heads, -1)
        down = self.linear("attention_linear_kv_lora", normed)
        rotary = reference_rotate(down[:, model.kv_lora_rank :].unsqueeze(1), 0)
        low = self.norm("atten_kv_layernorm", down[:, : model.kv_lora_rank])
        up = self.linear("attention_kv_column", low).reshape(seq, model.num_attention_heads, -1)
        key = torch.cat([up[:, :, :nope], rotary.repeat(1, model.num_attention_heads, 1)], dim=2)
        return torch.cat([query[:, :, :nope], reference_rotate(query[:, :, nope:], 0)], dim=2), key, up[:, :, nope:]


def differentiated_in(ready: Built) -> list[str]:
    """What the backward returns, by name: gradients, then the main gradients, one of each GEMM."""
    mains = [name for name in ready.tensors if name.endswith(".main_grad")]
    assert len(mains) >= 4
    return [name for name, tensor in ready.tensors.items() if tensor.requires_grad] + mains


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("gpt", "mlp"), ("llama_gqa", "mlp"), ("partial_rotary", "mlp"), ("mla", "mlp"), ("mla_moe", "dense")],
)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_layer_on_one_rank_equals_a_float64_layer(kind: str, prefix: str, dtype: str) -> None:
    """Output and the gradient of every input and weight; in bfloat16 with flash attention, as it is measured."""
    torch.manual_seed(0)
    flash = dtype != "float32"
    job = small_job(kind, dtype, flash=flash)
    ready = build_layer(job, CPU, chosen(job), 0)
    names = [name.replace("main_grad", "weight") for name in differentiated_in(ready)]
    exact = as_double(ready.tensors, names)
    batch, seq = job.training.micro_batch, job.training.seq_length
    sequences = exact["input"].view(batch, seq, -1) if flash else exact["input"].view(seq, batch, -1).transpose(0, 1)
    layer = ReferenceLayer(job, exact)
    out = torch.stack([layer(sequence, prefix) for sequence in sequences])
    out = (out if flash else out.transpose(0, 1)).reshape(batch * seq, -1)
    assert_close(ready.forward(), out, TOLERANCES[dtype], "output")
    expected = torch.autograd.grad(out, [exact[name] for name in names], exact["grad_out"])
    for name, mine, reference in zip(names, gradients(ready), expected, strict=True):
        # bfloat16: a weight deep inside the branches is compared through a dozen roundings
        assert_close(mine, reference, TOLERANCES[dtype] * (1 if dtype == "float32" else 4), f"gradient of {name}")


LAYERS = [(kind, layer) for kind in JOBS for layer in (0, 1) if not JOBS[kind][0].get("moe_grouped_gemm")]
LAYERS += [("mla_moe", 0)]


@pytest.mark.parametrize(("kind", "layer"), LAYERS)
def test_a_layer_does_the_matmuls_of_its_parts(kind: str, layer: int) -> None:
    """Split layers too: gathered rows must be there although nothing is gathered, else sum / whole means nothing."""
    job = small_job(kind)
    experts = job.model.has_experts(layer)
    other = {"mlp_linear_1", "mlp_linear_2"} if job.model.num_experts else set()
    parts = [
        kernel
        for name, kernel in kernels(job).items()
        if name != "logit_time" and (experts or not (name.startswith(("moe", "mlp_shared")) or name in other))
    ]
    ready = build_layer(job, CPU, chosen(job), layer)
    with FlopCounterMode(display=False) as forward:
        ready.forward()
    assert forward.get_total_flops() == sum(kernel.flops for kernel in parts)
    assert ready.input_grad is not None
    with FlopCounterMode(display=False) as backward:
        ready.input_grad()
    assert backward.get_total_flops() == sum(
        kernel.gradient_flops() * (2 if kernel.gradients == "gemm" else 1) for kernel in parts if kernel.flops
    )


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements that gathers and concatenations write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.index_select.default, torch.ops.aten.cat.default):
            self.total += out.numel()
        return out


def written(call: Callable[[], object] | None) -> int:
    assert call is not None
    mode = Written()
    with mode:
        call()
    return mode.total


@pytest.mark.parametrize("kind", ["mla", "mla_no_q_lora_sp", "moe_bias", "moe_loop_shared_sp", "mla_moe"])
def test_a_layer_moves_what_its_parts_move(kind: str) -> None:
    """Putting latent heads together and sorting rows by expert are work of a kernel and of the whole alike."""
    job = small_job(kind)
    layer = build_layer(job, CPU, chosen(job), 1)
    names = {"atten_rope", "moe_permute", "moe_unpermute", "mlp_linear_1", "mlp_linear_2"}
    parts = [build(kernel, job, CPU, chosen(job)) for name, kernel in kernels(job).items() if name in names]
    assert written(layer.forward) == sum(written(part.forward) for part in parts)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", JOBS)
def test_every_gradient_of_a_layer_is_finite_and_not_zero(kind: str, flash: bool) -> None:
    """The stand-ins for collectives must pass the gradients on: a cut graph would skip the backward behind it."""
    job = small_job(kind, "bfloat16", flash=flash)
    for layer in range(2):
        ready = build_layer(job, CPU, chosen(job), layer)
        out = ready.forward()
        assert isinstance(out, Tensor)
        assert out.shape == (job.local_tokens, 64)
        names = differentiated_in(ready)
        for name, gradient in zip(names, gradients(ready), strict=True):
            assert gradient.shape == ready.tensors[name].shape
            assert bool(torch.isfinite(gradient).all()), name
            assert float(gradient.abs().max()) > 0, name


def test_a_layer_without_a_graph_is_refused() -> None:
    job = small_job("gpt")
    choices = chosen(job)
    with torch.no_grad(), pytest.raises(UserError, match="layer 1: requires_grad missing on the output"):
        build_layer(job, CPU, choices, 1)


def test_flash_attention_needs_no_square_of_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of 131072 squared is 16 GiB, made twice over."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(functions, "causal_mask", refuse)
    job = small_job("llama_gqa", "bfloat16", flash=True)
    build_layer(job, CPU, chosen(job), 0)
