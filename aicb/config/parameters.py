"""The parameter tensors that one rank holds, named and shaped as in Megatron-Core, and their counts.

Ground truth: `parameters` and `parameter_tensors` of the recordings in tests/megatron (Megatron-Core 0.13.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm, prod

from aicb.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter tensor, or `count` equal ones."""

    name: str
    shape: tuple[int, ...]
    count: int = 1
    expert: bool = False
    """Sharded over the expert-parallel group: its gradient goes through DP/EP."""
    sequence_parallel: bool = False
    """Marked so under sequence parallelism: each TP rank has a part of its gradient, which is summed over TP."""
    every_head: bool = False
    """A norm on query or key: replicated over TP beside split heads, so summed over TP even without SP."""
    own_bucket: bool = False
    """A tied embedding that another stage holds too: the distributed optimizer reduces it apart from the rest."""

    @property
    def elements(self) -> int:
        """Elements of all `count` tensors."""
        return prod(self.shape) * self.count

    @property
    def aligned(self) -> int:
        """The same with each tensor rounded up to 64 elements, as the distributed optimizer's buffer holds them."""
        return -(-prod(self.shape) // 64) * 64 * self.count


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameter counts of one rank, in elements."""

    dense: int
    expert: int
    sequence_parallel: int
    """Marked sequence-parallel."""
    tp_summed: int
    """Those whose gradients are summed over the TP group."""
    dense_buckets: tuple[int, ...]
    """`dense` as it is reduced: padded under the distributed optimizer, a shared embedding apart."""
    expert_bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of the model a rank holds."""

    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    layers: range
    first: bool = True
    """Holds the embedding."""
    last: bool = True
    """Holds the final norm and the head."""
    vocab: int
    """Rows of the whole (padded) vocabulary."""


def whole_model_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, unpadded, to the last digit."""
    shard = Shard(layers=range(model.num_layers), vocab=model.vocab_size)
    return sum(tensor.elements for tensor in tensors(model, shard))


def rank_parameters(all_tensors: Iterable[Tensor], dp: int, expert_dp: int, distributed: bool) -> RankParameters:
    """Sum one rank's tensors, and pad the distributed optimizer's buckets.

    Each tensor starts at a multiple of 64 elements and a bucket ends at a multiple of lcm(group size, 128)
    (Megatron-Core's param_and_grad_buffer.py).
    """
    held = list(all_tensors)
    expert = [tensor for tensor in held if tensor.expert]
    shared = [tensor for tensor in held if tensor.own_bucket]
    rest = [tensor for tensor in held if not tensor.expert and not tensor.own_bucket]
    dense = _count(rest) + _count(shared)
    return RankParameters(
        dense=dense,
        expert=_count(expert),
        sequence_parallel=_count(tensor for tensor in held if tensor.sequence_parallel),
        tp_summed=_count(tensor for tensor in held if tensor.sequence_parallel or tensor.every_head),
        dense_buckets=tuple(_padded(part, dp) for part in (rest, shared) if part) if distributed else (dense,),
        expert_bucket=_padded(expert, expert_dp) if distributed else _count(expert),
    )


def _count(some: Iterable[Tensor]) -> int:
    return sum(tensor.elements for tensor in some)


def _padded(bucket: Iterable[Tensor], group: int) -> int:
    unit = lcm(group, 128)
    return -(-sum(tensor.aligned for tensor in bucket) // unit) * unit


def tensors(model: ModelConfig, shard: Shard) -> Iterator[Tensor]:
    """Yield the parameter tensors of a rank that holds `shard`."""
    vocab, hidden = shard.vocab // shard.tp, model.hidden_size
    elsewhere_too = not model.untie_embeddings_and_output_weights and shard.first != shard.last
    if shard.first:
        yield Tensor("embedding.word_embeddings.weight", (vocab, hidden), own_bucket=elsewhere_too)
        if model.position_embedding_type == "learned_absolute":
            yield Tensor("embedding.position_embeddings.weight", (model.max_position_embeddings, hidden))
    experts = sum(model.has_experts(layer) for layer in shard.layers)
    dense = len(shard.layers) - experts
    if dense + experts:
        yield from _norm("input_layernorm", model, shard, hidden, dense + experts)
        yield from _attention(model, shard, dense + experts)
        yield from _norm("pre_mlp_layernorm", model, shard, hidden, dense + experts)
    if dense:
        yield from _mlp("mlp", model, shard, model.ffn_hidden_size, dense)
    if experts:
        yield from _experts(model, shard, experts)
    if shard.last:
        yield from _norm("final_layernorm", model, shard, hidden, 1)
        if model.untie_embeddings_and_output_weights or not shard.first:
            yield Tensor("output_layer.weight", (vocab, hidden), own_bucket=elsewhere_too)


def _norm(
    name: str, model: ModelConfig, shard: Shard, width: int, count: int, *, every_head: bool = False
) -> Iterator[Tensor]:
    for part in ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",):
        yield Tensor(
            f"{name}.{part}", (width,), count, sequence_parallel=shard.sequence_parallel, every_head=every_head
        )


def _linear(name: str, out: int, into: int, bias: bool, count: int, row_parallel_sp: bool = False) -> Iterator[Tensor]:
    """A weight (out, in) and its bias; only a row-parallel linear's bias is marked sequence-parallel."""
    yield Tensor(f"{name}.weight", (out, into), count)
    if bias:
        yield Tensor(f"{name}.bias", (out,), count, sequence_parallel=row_parallel_sp)


def _attention(model: ModelConfig, shard: Shard, count: int) -> Iterator[Tensor]:
    if model.multi_latent_attention:
        yield from _latent_attention(model, shard, count)
        return
    tp, width, bias = shard.tp, model.kv_channels, model.add_bias_linear
    heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
    qkv = (heads + 2 * groups) * width
    yield from _linear("linear_qkv", qkv, model.hidden_size, bias or model.add_qkv_bias, count)
    yield from _linear("linear_proj", model.hidden_size, heads * width, bias, count, shard.sequence_parallel)
    if model.qk_layernorm:
        yield from _norm("q_layernorm", model, shard, width, count, every_head=True)
        yield from _norm("k_layernorm", model, shard, width, count, every_head=True)


def _latent_attention(model: ModelConfig, shard: Shard, count: int) -> Iterator[Tensor]:
    hidden, heads, sp = model.hidden_size, model.num_attention_heads // shard.tp, shard.sequence_parallel
    query = heads * (model.qk_nope_dim + model.qk_rope_dim)
    if model.q_lora_rank:
        yield Tensor("linear_q_down_proj.weight", (model.q_lora_rank, hidden), count, sequence_parallel=sp)
        yield Tensor("linear_q_up_proj.weight", (query, model.q_lora_rank), count)
    else:
        yield Tensor("linear_q_proj.weight", (query, hidden), count)
    down = model.kv_lora_rank + model.qk_rope_dim
    up = heads * (model.qk_nope_dim + model.v_head_dim)
    yield Tensor("linear_kv_down_proj.weight", (down, hidden), count, sequence_parallel=sp)
    yield Tensor("linear_kv_up_proj.weight", (up, model.kv_lora_rank), count)
    yield from _linear("linear_proj", hidden, heads * model.v_head_dim, model.add_bias_linear, count, sp)
    if model.qk_layernorm:
        if model.q_lora_rank:
            yield from _norm("q_layernorm", model, shard, model.q_lora_rank, count)
        yield from _norm("kv_layernorm", model, shard, model.kv_lora_rank, count)


def _mlp(name: str, model: ModelConfig, shard: Shard, width: int, count: int) -> Iterator[Tensor]:
    local, gates, bias = width // shard.tp, 2 if model.swiglu else 1, model.add_bias_linear
    yield from _linear(f"{name}.linear_fc1", gates * local, model.hidden_size, bias, count)
    yield from _linear(f"{name}.linear_fc2", model.hidden_size, local, bias, count, shard.sequence_parallel)


def _experts(model: ModelConfig, shard: Shard, count: int) -> Iterator[Tensor]:
    hidden, sp = model.hidden_size, shard.sequence_parallel
    yield Tensor("mlp.router.weight", (model.num_experts, hidden), count, sequence_parallel=sp)
    for tensor in _mlp("mlp.experts", model, shard, model.moe_ffn_hidden_size, count):
        # Routed tokens are whole on every TP rank, so an expert's bias is never sequence-parallel.
        local = count * model.num_experts // shard.ep
        yield Tensor(tensor.name, tensor.shape, local, expert=shard.ep > 1)
    if model.moe_shared_expert_intermediate_size:
        yield from _mlp("mlp.shared_experts", model, shard, model.moe_shared_expert_intermediate_size, count)
