"""One whole transformer layer on one rank, of the same shapes and implementations as the parts, to check their sum.

There is no communication. Where a collective changes the number of rows (sequence parallelism's gather and
reduce-scatter, the experts' all-to-all), the rows that would arrive are random ones made beforehand: `_StandIn` hands
them on in forward, and in backward hands on as many gradients, both without work. Every part therefore runs at the size
at which it is measured, but a split layer's values mean nothing; a dense layer that is not split is exact. Experts get
even shares of the rows, whatever the router chose, as their GEMMs are measured. All-reduces are left out.

The router's probabilities, picked for the copies, are in the whole alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from aicb.config.job import Job
from aicb.step.kernels import FLASH, Kernel, kernel_table
from profiler import functions
from profiler.accumulation import grouped_linear, linear
from profiler.builders import Built, Request
from profiler.builders.built import differentiated
from profiler.builders.dense import randomised
from profiler.builders.experts import arrival_orders
from profiler.grouped import spread_evenly
from profiler.implementations import Choices


class _StandIn(torch.autograd.Function):
    """In place of a collective: rows and gradients that exist already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, grad: Tensor) -> Tensor:  # noqa: ARG004 (x: where the graph goes on)
        ctx.grad = grad
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:  # noqa: ARG004
        return ctx.grad, None, None


class _Layer:
    """The weights of layer `index`, and its forward pass on (local tokens, h)."""

    def __init__(self, job: Job, device: torch.device, choices: Choices, index: int) -> None:
        self.job, self.device, self.choices = job, device, choices
        self.kernels = {kernel.name: kernel for kernel in kernel_table(job)}
        self.has_experts = job.model.has_experts(index)
        self.arrival = arrival_orders(self.request("moe_permute")) if self.has_experts else None
        self.tensors: dict[str, Tensor] = {}
        self.main_grads: dict[str, Tensor] = {}
        self.fused = choices.fused
        self._modules: dict[str, nn.Module] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._counts: dict[tuple[int, int], tuple[list[int], Tensor, Tensor]] = {}
        self.flash = FLASH[0] in self.kernels
        batch, seq = job.training.micro_batch, job.training.seq_length
        self.order = (batch, seq) if self.flash else (seq, batch)  # of the tokens, as attention wants them
        self.mask = None if self.flash else functions.causal_mask(seq, device)  # s x s
        model = job.model
        if model.position_embedding_type == "rope":
            tables = functions.rope_tables(seq, model.rotary_width, device, self.request("layernorm").dtype)
            self.cos, self.sin = (table[:, None] if self.flash else table[:, None, None] for table in tables)

    def request(self, name: str) -> Request:
        return Request(kernel=self.kernels[name], job=self.job, device=self.device, choices=self.choices)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.latent_attention(x) if self.job.model.multi_latent_attention else self.attention(x)
        x = self.residual("atten_residual", x, attended)
        normed = self.norm("layernorm2", x)
        if not self.has_experts:
            prefix = "dense" if self.job.model.num_experts else "mlp"
            return self.residual("mlp_residual", x, self.mlp(prefix, normed))
        out = self.experts(normed)
        if "mlp_shared_linear_1" in self.kernels:
            out = self.residual("mlp_shared_residual", out, self.mlp("mlp_shared", normed))
        return self.residual("mlp_residual", x, out)

    # Parts: each makes its weights when it first runs

    def weight(self, name: str, *size: int) -> Tensor:
        if name not in self.tensors:
            self.tensors[name] = self.request("layernorm").weight_leaf(*size)
        return self.tensors[name]

    def accumulated(self, name: str, *size: int) -> tuple[Tensor, Tensor]:
        """A GEMM's weight, no part of the graph, and the main gradient that its own is added to."""
        if name not in self.main_grads:
            request = self.request(name)
            self.tensors[f"{name}.weight"], self.main_grads[name] = request.weight(*size), request.main_grad(*size)
        return self.tensors[f"{name}.weight"], self.main_grads[name]

    def bias(self, name: str, *size: int) -> Tensor | None:
        return self.weight(f"{name}.bias", *size) if self.kernels[name].shape.get("bias") else None

    def norm(self, name: str, x: Tensor) -> Tensor:
        if name not in self._modules:
            request = self.request(name)
            self._modules[name] = randomised(self.choices.norms[request.kernel.shape["width"]](), request)
            named = self._modules[name].named_parameters()
            self.tensors |= {f"{name}.{parameter}": tensor for parameter, tensor in named}
        return cast("Tensor", self._modules[name](x))

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A GEMM on as many rows as the kernel has."""
        m, k, n = self.request(name).sizes("m", "k", "n")
        weight, main = self.accumulated(name, n, k)
        return linear(self.rows(x, m), weight, self.bias(name, n), main, self.choices.accumulate)

    def residual(self, name: str, x: Tensor, branch: Tensor) -> Tensor:
        bias = self.bias(name, x.size(1))
        return self.fused.add_residual(x, self.rows(branch, x.size(0)), bias, self.job.model.hidden_dropout)

    def rows(self, x: Tensor, count: int) -> Tensor:
        """(rows, width) -> (count, width): the same tensor, or in place of a collective another."""
        if x.size(0) == count:
            return x
        out, grad = self.random_rows(count, x.size(1)), self.random_rows(x.size(0), x.size(1))
        return cast("Tensor", _StandIn.apply(x, out, grad))  # type: ignore[no-untyped-call]

    def random_rows(self, count: int, width: int) -> Tensor:
        if (count, width) not in self._rows:
            self._rows[count, width] = self.request("layernorm").normal(count, width)
        return self._rows[count, width]

    # Attention

    def attention(self, x: Tensor) -> Tensor:
        model, tp, width = self.job.model, self.job.tp, self.job.model.kv_channels
        heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
        qkv = self.linear("atten_qkv", self.norm("layernorm", x)).view(*self.order, heads + 2 * groups, width)
        query, key, value = qkv.split_with_sizes([heads, groups, groups], dim=2)
        if model.qk_layernorm:
            query, key = self.norm("atten_q_layernorm", query), self.norm("atten_k_layernorm", key)
        if model.position_embedding_type == "rope":
            turn = self.fused.rotate if model.rotary_percent == 1 else self.fused.rotate_part
            query, key = (turn(x, self.cos, self.sin) for x in (query, key))
        return self.linear("atten_linear", self.core(query, key, value))

    def latent_attention(self, x: Tensor) -> Tensor:
        model, normed = self.job.model, self.norm("layernorm", x)
        nope, rope, v = model.qk_nope_dim, model.qk_rope_dim, model.v_head_dim
        query, tokens = normed, self.job.tokens
        if model.q_lora_rank:
            query = self.linear("attention_linear_q_lora", normed)
            query = self.norm("atten_q_layernorm", query) if model.qk_layernorm else query
        query = self.linear("attention_q_column", query).view(*self.order, -1, nope + rope)
        heads = query.size(2)
        down = self.linear("attention_linear_kv_lora", normed)
        latent, shared = down.split_with_sizes([model.kv_lora_rank, rope], dim=-1)
        latent = self.norm("atten_kv_layernorm", latent) if model.qk_layernorm else latent
        up = self.linear("attention_kv_column", latent).view(*self.order, heads, nope + v)
        key, value = up.split_with_sizes([nope, v], dim=-1)
        shared = self.rows(shared, tokens).reshape(*self.order, 1, rope)
        query, key = self.fused.latent_heads(query, key, shared, self.cos, self.sin)
        return self.linear("attention_o_row", self.core(query, key, value))

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Core attention on tensors in the token order -> (tokens, heads v)."""
        if self.flash:
            return self.choices.attend(query, key, value).reshape(self.job.tokens, -1)
        assert self.mask is not None
        probabilities = self.fused.causal_softmax(functions.scores(query, key), self.mask)
        probabilities = functions.drop(probabilities, self.job.model.attention_dropout)
        return functions.context(probabilities, value).view(self.job.tokens, -1)

    # MLP

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        hidden = self.activate(f"{prefix}_gelu", self.linear(f"{prefix}_linear_1", x))
        return self.linear(f"{prefix}_linear_2", hidden)

    def activate(self, name: str, x: Tensor) -> Tensor:
        shape = self.kernels[name].shape
        return self.fused.activate(x, shape["gates"], bool(shape["squared_relu"]), self.bias(name, x.size(1)))

    def experts(self, x: Tensor) -> Tensor:
        shape = self.kernels["moe_router"].shape
        gate = self.weight("moe_router.weight", shape["experts"], shape["hidden"])
        probabilities, ids = functions.route(x, gate, shape["topk"])
        copies, order = functions.permute(x, ids)
        out = self.rows(self.routed(self.rows(copies, self.kernels["mlp_linear_1"].shape["m"])), copies.size(0))
        chosen = probabilities.gather(1, ids).to(x.dtype)
        return functions.unpermute(out, chosen, order)

    def routed(self, x: Tensor) -> Tensor:
        """This rank's experts on the rows that arrived, sorted by expert where they come from several ranks."""
        if self.arrival is not None:
            x = functions.reorder(x, *self.arrival)
        x = self.grouped("mlp_linear_2", self.activate("mlp_gelu", self.grouped("mlp_linear_1", x)))
        return x if self.arrival is None else functions.reorder(x, *reversed(self.arrival))

    def grouped(self, name: str, x: Tensor) -> Tensor:
        """The experts' GEMM, rows spread evenly over this rank's experts."""
        m, k, n, experts = self.request(name).sizes("m", "k", "n", "experts")
        (weight, main), bias = self.accumulated(name, experts, n, k), self.bias(name, experts, n)
        counts, repeats, ends = self.counts(m, experts)
        out = grouped_linear(x, weight, main, self.choices.experts, counts, ends)
        return functions.add_expert_bias(out, bias, repeats)

    def counts(self, rows: int, experts: int) -> tuple[list[int], Tensor, Tensor]:
        """Rows of each expert, here and on the device, and where they end; copied to the device once."""
        if (rows, experts) not in self._counts:
            counts = spread_evenly(rows, experts)
            repeats = torch.tensor(counts, device=self.device)
            self._counts[rows, experts] = counts, repeats, repeats.cumsum(0).to(torch.int32)
        return self._counts[rows, experts]


def build_layer(job: Job, device: torch.device, choices: Choices, layer_index: int) -> Built:
    """Layer `layer_index` (0-based over the whole model): its forward, and its whole backward as input_grad.

    The backward returns the gradients of what is differentiated, in the order of the tensors, then the main gradients.
    Tensors: input, grad_out, each weight as `<kernel>.weight` or `.bias`, each main gradient as `<kernel>.main_grad`.
    Raises UserError when it has no graph.
    """
    layer = _Layer(job, device, choices, layer_index)
    x = layer.request("layernorm").leaf(job.local_tokens, job.model.hidden_size)
    layer.forward(x)  # makes the weights
    kernel = Kernel(name=f"layer {layer_index}", op="layer", rows=(), shape={})
    mains = {f"{name}.main_grad": main for name, main in layer.main_grads.items()}
    tensors = {"input": x, **layer.tensors}
    wanted = [name for name in tensors if name.removesuffix(".weight") not in layer.main_grads]
    built = differentiated(kernel, lambda: layer.forward(x), tensors, *wanted)
    backward = built.input_grad
    assert backward is not None
    return replace(
        built,
        input_grad=lambda: (*cast("tuple[Tensor, ...]", backward()), *mains.values()),
        tensors={**built.tensors, **mains},
    )
