"""What one rank COMPUTES: the one table of kernels that the generator sums and the profiler measures.

Each entry names its profile section, the rows it runs in, its shapes, its work and its gradients. FLOPs count a
multiply-add as two; causal attention counts the half that is needed; bytes are the least traffic of one forward call
(each input read once, each output written once).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aicb.config.job import Job

GEMM, INPUT, WEIGHT, NONE = "gemm", "input", "weight", "none"
EMBEDDING, HEAD = "Emb", ("layernorm_post", "logit_time")
OPTIMIZER = "param_time"
STEP_END = {
    "grad_zero": "gradient_elements",
    "grad_scale": "gradient_elements",
    "grad_clip": "optimizer_elements",
    OPTIMIZER: "optimizer_elements",
}
"""What runs once a step, and what a profile calls the elements it goes over: they depend on stage and DP too."""
FLASH, UNFUSED = ("atten_flash",), ("atten_core_qk", "atten_core_softmax", "atten_core_contex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of one micro-batch on one rank."""

    name: str
    """Section of the compute profile."""
    op: str
    """What it is; the profiler has one builder for each op."""
    rows: tuple[str, ...]
    """Keys of the steps (see collectives.Step) whose compute it is part of, once each."""
    shape: Mapping[str, int]
    """Sizes in elements and counts, by the name that the op's builder takes."""
    flops: int = 0
    """Of one forward call; 0 where memory traffic alone bounds it."""
    bytes: int = 0
    gradients: str = INPUT
    """gemm: input and weight gradient, each the forward's work. input: the whole backward is input gradient.
    weight: the whole backward is weight gradient. none: no backward."""
    required: bool = True
    """Absent from a profile, it is an error; first-generation profiles lack the others, unmeasured then."""
    routed: bool = False
    """Its work grows with the tokens that the router sends to this rank: the experts' GEMMs and activation alone.

    (The permutations' sort of arrived rows grows too; it is measured with the rest of them and not scaled.)
    """

    @property
    def core_attention(self) -> bool:
        """What selective recompute repeats."""
        return self.name in FLASH + UNFUSED

    def gradient_flops(self) -> int:
        """FLOPs of one input-gradient (GEMM: also of one weight-gradient) call.

        Flash attention's backward is five causal matmuls (FlashAttention-2 paper): scores, dQ and dK over the width of
        query and key, dP and dV over that of value. An unfused batched matmul has two.
        """
        if self.op == "flash_attention":
            shape = self.shape
            square = shape["batch"] * shape["heads"] * shape["seq"] ** 2
            return square * (3 * shape["qk_width"] + 2 * shape["v_width"])
        return self.flops if self.gradients == GEMM else 2 * self.flops


def kernel_table(job: Job) -> tuple[Kernel, ...]:
    """Return every kernel that a rank of `job` runs on any stage; the optimizer is that of job.pp_rank."""
    model = job.model
    table = [*_embedding(job), *_norm(job, "layernorm", _attention_rows(job)[:1], model.hidden_size)]
    table += _latent_projections(job) if model.multi_latent_attention else _projections(job)
    table += _core_attention(job)
    table += _attention_output(job)
    table += _mlp_kernels(job)
    table += _head(job)
    table += _optimizer(job)
    return tuple(table)


def _rows(job: Job, name: str) -> tuple[str, str]:
    """The rows of a block's first and second linear: two under SP, else one."""
    return (f"{name}_column", f"{name}_row") if job.sp else (f"{name}_layer", f"{name}_layer")


def _attention_rows(job: Job) -> tuple[str, str]:
    """The first and the last row of attention."""
    if not job.model.multi_latent_attention:
        return _rows(job, "attention")
    return ("attention_linear_q_lora" if job.model.q_lora_rank else "attention_q_column", "attention_o_row")


def _embedding(job: Job) -> Iterator[Kernel]:
    d, hidden = job.element_bytes, job.model.hidden_size
    learned = job.model.position_embedding_type == "learned_absolute"
    shape = {
        "tokens": job.tokens,
        "seq": job.training.seq_length,
        "vocab": job.padded_vocab_size // job.tp,
        "hidden": hidden,
        "learned_positions": int(learned),
        "tp": job.tp,
    }
    traffic = 8 * job.tokens + 2 * d * job.tokens * hidden  # int64 ids, one row read and one written a token
    traffic += d * job.training.seq_length * hidden if learned else 0
    yield Kernel(
        name=EMBEDDING, op="embedding", rows=("embedding_layer",), shape=shape, bytes=traffic, gradients=WEIGHT
    )


def _norm(
    job: Job, name: str, rows: tuple[str, ...], width: int, tokens: int | None = None, required: bool = True
) -> Iterator[Kernel]:
    """A norm over `width` elements of each token; by default on this rank's part of the sequence."""
    tokens = job.local_tokens if tokens is None else tokens
    bias = job.model.normalization == "LayerNorm"
    traffic = job.element_bytes * (2 * tokens * width + (2 if bias else 1) * width)
    shape = {"tokens": tokens, "width": width, "bias": int(bias)}
    yield Kernel(name=name, op="norm", rows=rows, shape=shape, bytes=traffic, required=required)


def _gemm(
    job: Job, name: str, rows: tuple[str, ...], sizes: tuple[int, int, int], bias: bool = False, experts: int = 0
) -> Iterator[Kernel]:
    """(m, k) x (k, n): m tokens. With `experts`, m is spread evenly over as many (k, n) weights (a grouped GEMM)."""
    m, k, n = sizes
    traffic = job.element_bytes * (m * k + max(experts, 1) * (k * n + (n if bias else 0)) + m * n)
    shape = {"m": m, "k": k, "n": n, "bias": int(bias)}
    yield Kernel(
        name=name,
        op="grouped_gemm" if experts else "gemm",
        rows=rows,
        shape={**shape, "experts": experts} if experts else shape,
        flops=2 * m * k * n,
        bytes=traffic,
        gradients=GEMM,
        routed=experts > 0,
    )


def _projections(job: Job) -> Iterator[Kernel]:
    """QKV, norms on query and key, rotary positions."""
    model, tokens, width = job.model, job.tokens, job.model.kv_channels
    column, core = _rows(job, "attention")
    heads, groups = model.num_attention_heads // job.tp, model.num_query_groups // job.tp
    qkv = (heads + 2 * groups) * width
    bias = model.add_bias_linear or model.add_qkv_bias
    yield from _gemm(job, "atten_qkv", (column,), (tokens, model.hidden_size, qkv), bias)
    if model.qk_layernorm:
        yield from _norm(job, "atten_q_layernorm", (core,), width, tokens * heads, required=False)
        yield from _norm(job, "atten_k_layernorm", (core,), width, tokens * groups, required=False)
    if model.position_embedding_type == "rope":
        yield _rope(job, core, heads + groups, width)


def _rope(job: Job, row: str, heads: int, width: int) -> Kernel:
    """What does not turn is copied beside what does: Megatron-Core puts the head together again."""
    turned = job.model.rotary_width
    shape = {
        "batch": job.training.micro_batch,
        "seq": job.training.seq_length,
        "heads": heads,
        "width": width,
        **({"turned": turned} if turned < width else {}),
    }
    traffic = job.element_bytes * (2 * job.tokens * heads * width + 2 * job.training.seq_length * turned)
    return Kernel(name="atten_rope", op="rope", rows=(row,), shape=shape, bytes=traffic, required=False)


def _latent_projections(job: Job) -> Iterator[Kernel]:
    """Multi-latent attention: down-projections on this rank's tokens, up-projections on all of them."""
    model, local, tokens = job.model, job.local_tokens, job.tokens
    heads = model.num_attention_heads // job.tp
    query = heads * (model.qk_nope_dim + model.qk_rope_dim)
    up, down = ("attention_q_column",), ("attention_linear_q_lora",)
    if model.q_lora_rank:
        yield from _gemm(job, "attention_linear_q_lora", down, (local, model.hidden_size, model.q_lora_rank))
        if model.qk_layernorm:
            yield from _norm(job, "atten_q_layernorm", up, model.q_lora_rank, required=False)
    yield from _gemm(job, "attention_q_column", up, (tokens, model.q_lora_rank or model.hidden_size, query))
    kv_width, kv_out = model.kv_lora_rank + model.qk_rope_dim, heads * (model.qk_nope_dim + model.v_head_dim)
    kv_down, kv_up = ("attention_linear_kv_lora",), ("attention_kv_column",)
    yield from _gemm(job, "attention_linear_kv_lora", kv_down, (local, model.hidden_size, kv_width))
    if model.qk_layernorm:
        yield from _norm(job, "atten_kv_layernorm", kv_up, model.kv_lora_rank, required=False)
    yield from _gemm(job, "attention_kv_column", kv_up, (tokens, model.kv_lora_rank, kv_out))
    yield _latent_rope(job, heads)


def _latent_rope(job: Job, heads: int) -> Kernel:
    """Rotary positions of a part of each query and of the one key that all heads share, and the heads put together."""
    nope, width, seq = job.model.qk_nope_dim, job.model.qk_rope_dim, job.training.seq_length
    shape = {"batch": job.training.micro_batch, "seq": seq, "heads": heads, "nope": nope, "width": width}
    query = key = heads * (nope + width)
    read = query + heads * nope + width  # of a token; a key's own part is a view of the up-projection's output
    traffic = job.element_bytes * (job.tokens * (read + query + key) + 2 * seq * width)
    return Kernel(
        name="atten_rope", op="latent_rope", rows=("attention_o_row",), shape=shape, bytes=traffic, required=False
    )


def attention_widths(job: Job) -> tuple[int, int]:
    """Head widths of query/key and of value."""
    model = job.model
    if model.multi_latent_attention:
        return model.qk_nope_dim + model.qk_rope_dim, model.v_head_dim
    return model.kv_channels, model.kv_channels


def _core_attention(job: Job) -> Iterator[Kernel]:
    """Causal attention: one flash kernel, or scores, softmax and context apart (which compute the full square)."""
    b, s, d = job.training.micro_batch, job.training.seq_length, job.element_bytes
    heads, groups = job.model.num_attention_heads // job.tp, job.model.num_query_groups // job.tp
    qk, v = attention_widths(job)
    rows = _attention_rows(job)[1:]
    shape = {"batch": b, "seq": s, "heads": heads, "groups": groups, "qk_width": qk, "v_width": v}
    dropped = {**shape, "dropout": 1} if job.model.attention_dropout else shape
    queries, keys, values, out = heads * qk, groups * qk, groups * v, heads * v
    square = b * heads * s * s
    if job.training.use_flash_attn:
        traffic = d * b * s * (queries + keys + values + out)
        yield Kernel(
            name=FLASH[0], op="flash_attention", rows=rows, shape=dropped, flops=square * (qk + v), bytes=traffic
        )
        return
    score_bytes = d * b * s * (queries + keys) + d * square
    context_bytes = d * b * s * (values + out) + d * square
    qk_name, softmax_name, context_name = UNFUSED
    yield Kernel(name=qk_name, op="scores", rows=rows, shape=shape, flops=2 * square * qk, bytes=score_bytes)
    yield Kernel(name=softmax_name, op="softmax", rows=rows, shape=dropped, bytes=2 * d * square)
    yield Kernel(name=context_name, op="context", rows=rows, shape=shape, flops=2 * square * v, bytes=context_bytes)


def _attention_output(job: Job) -> Iterator[Kernel]:
    model, row = job.model, _attention_rows(job)[1]
    name = "attention_o_row" if model.multi_latent_attention else "atten_linear"
    into = model.num_attention_heads // job.tp * attention_widths(job)[1]
    yield from _gemm(job, name, (row,), (job.tokens, into, model.hidden_size))
    yield _residual(job, "atten_residual", (row,))


def _residual(job: Job, name: str, rows: tuple[str, ...]) -> Kernel:
    """x + dropout(f (+ bias of the row-parallel linear)) on this rank's tokens; backward adds the gradients of x."""
    tokens, hidden, bias = job.local_tokens, job.model.hidden_size, job.model.add_bias_linear
    traffic = job.element_bytes * (3 * tokens * hidden + (hidden if bias else 0))
    shape = {"tokens": tokens, "width": hidden, "bias": int(bias)}
    shape |= {"dropout": 1} if job.model.hidden_dropout else {}
    return Kernel(name=name, op="residual", rows=rows, shape=shape, bytes=traffic, required=False)


def _mlp_kernels(job: Job) -> Iterator[Kernel]:
    model, dense = job.model, _rows(job, "mlp")
    has_dense, has_experts = model.dense_layers > 0, model.num_experts > 0
    starts = (dense[:1] if has_dense else ()) + (("mlp_moelayer:router",) if has_experts else ())
    ends = (dense[1:] if has_dense else ()) + (("mlp_moelayer:combine",) if has_experts else ())
    yield from _norm(job, "layernorm2", starts, model.hidden_size)
    if has_dense:
        # Beside experts, whose GEMMs own the `mlp_` names, the dense layers' MLP has names of its own.
        yield from _mlp(job, "dense" if has_experts else "mlp", dense, model.ffn_hidden_size)
    if has_experts:
        yield from _experts(job)
        if model.moe_shared_expert_intermediate_size:
            shared = _rows(job, "mlp_shared")
            yield from _mlp(job, "mlp_shared", shared, model.moe_shared_expert_intermediate_size)
            yield _residual(job, "mlp_shared_residual", shared[1:])  # routed + shared output
    yield _residual(job, "mlp_residual", ends)


def _mlp(job: Job, prefix: str, rows: tuple[str, str], width: int) -> Iterator[Kernel]:
    model, local = job.model, width // job.tp
    gates = 2 if model.swiglu else 1
    first = (job.tokens, model.hidden_size, gates * local)
    yield from _gemm(job, f"{prefix}_linear_1", rows[:1], first)
    yield _activation(job, f"{prefix}_gelu", rows[1], job.tokens, local, bias=model.add_bias_linear)
    yield from _gemm(job, f"{prefix}_linear_2", rows[1:], (job.tokens, local, model.hidden_size))


def _activation(
    job: Job, name: str, row: str, tokens: int, width: int, *, bias: bool = False, routed: bool = False
) -> Kernel:
    """The first linear's bias, added, and the activation: Megatron-Core's one kernel (experts add theirs before)."""
    gates = 2 if job.model.swiglu else 1
    shape = {"tokens": tokens, "width": width, "gates": gates, "squared_relu": int(job.model.squared_relu)}
    traffic = job.element_bytes * (tokens * width * (gates + 1) + (gates * width if bias else 0))
    return Kernel(
        name=name,
        op="activation",
        rows=(row,),
        shape={**shape, "bias": 1} if bias else shape,
        bytes=traffic,
        routed=routed,
    )


def _experts(job: Job) -> Iterator[Kernel]:
    """Router, permutations and expert GEMMs under uniform routing (the generator scales routed work).

    Rows arrive in the order of their source ranks and are sorted by expert, where there are several of both: Megatron's
    alltoall dispatcher, before the experts and back after them.
    """
    model, d, k = job.model, job.element_bytes, job.model.moe_router_topk
    hidden, local = model.hidden_size, model.num_experts // job.ep
    rows, copies = ("mlp_moelayer:experts",), job.tokens * k
    yield Kernel(
        name="moe_router",
        op="router",
        rows=("mlp_moelayer:router",),
        shape={"tokens": job.local_tokens, "hidden": hidden, "experts": model.num_experts, "topk": k},
        flops=2 * job.local_tokens * hidden * model.num_experts,
        bytes=d * (job.local_tokens * hidden + model.num_experts * hidden) + 8 * job.local_tokens * model.num_experts,
    )
    arrived = copies if local > 1 and job.tp * job.ep > 1 else 0
    permutation = {"tokens": job.local_tokens, "hidden": hidden, "experts": model.num_experts, "topk": k}
    permutation["sorted"] = arrived
    traffic = d * hidden * (job.local_tokens * (1 + k) + 2 * arrived)
    for name, part in (("moe_permute", "dispatch"), ("moe_unpermute", "combine")):
        row = (f"mlp_moelayer:{part}",)
        yield Kernel(name=name, op=name[4:], rows=row, shape=permutation, bytes=traffic)
    width = model.moe_ffn_hidden_size // job.tp
    gates, bias = 2 if model.swiglu else 1, model.add_bias_linear
    yield from _gemm(job, "mlp_linear_1", rows, (copies, hidden, gates * width), bias, local)
    yield _activation(job, "mlp_gelu", rows[0], copies, width, routed=True)
    yield from _gemm(job, "mlp_linear_2", rows, (copies, width, hidden), bias, local)


def _head(job: Job) -> Iterator[Kernel]:
    model, vocab = job.model, job.padded_vocab_size // job.tp
    row = "final_column" if job.sp else "final_layer"
    norm, logits = HEAD
    yield from _norm(job, norm, (row,), model.hidden_size)
    yield from _gemm(job, logits, (row,), (job.tokens, model.hidden_size, vocab))
    # With one TP rank there is no cross_entropy row to carry it.
    loss = "cross_entropy1" if job.tp > 1 else row
    traffic = (job.element_bytes + 4) * job.tokens * vocab + 8 * job.tokens  # logits read, fp32 softmax written
    shape = {"tokens": job.tokens, "vocab": vocab, "tp": job.tp}
    yield Kernel(name="cross_entropy", op="cross_entropy", rows=(loss,), shape=shape, bytes=traffic, required=False)


def optimizer_elements(job: Job) -> int:
    """Parameters that this rank's optimizer updates: its shard of the buffers, or all it holds."""
    held = job.parameters()
    if not job.training.use_distributed_optimizer:
        return held.dense + held.expert
    return sum(held.dense_buckets) // job.dp + held.expert_bucket // job.parallel.expert_data_parallel_size


def step_end_elements(job: Job) -> dict[str, int]:
    """Elements that this rank's optimizer updates, and those of its gradient buffers, as a profile states them."""
    held = job.parameters()
    return {"optimizer_elements": optimizer_elements(job), "gradient_elements": held.dense + held.expert}


def _optimizer(job: Job) -> Iterator[Kernel]:
    """Passes over the fp32 gradients, then Adam in fp32 and the copy to the model's own precision.

    Gradients are zeroed before an iteration (4 B an element), scaled by 1/DP before they are reduced (8 B), clipped on
    the optimizer's shard (read for their norm, then scaled: 12 B). Adam reads p, g, m, v and writes p, m, v.
    """
    copy = 4 + job.element_bytes if job.element_bytes < 4 else 0
    row, sizes = ("grad_param_compute",), step_end_elements(job)
    bytes_each = {"grad_zero": 4, "grad_scale": 8, "grad_clip": 12, OPTIMIZER: 28 + copy}
    for name, stated in STEP_END.items():
        adam = name == OPTIMIZER
        yield Kernel(
            name=name,
            op="optimizer" if adam else name,
            rows=() if name == "grad_scale" and job.dp == 1 else row,
            shape={"elements": sizes[stated]} | ({"copy": int(copy > 0)} if adam else {}),
            bytes=bytes_each[name] * sizes[stated],
            gradients=NONE,
            required=adam,
        )


def slice_of(job: Job) -> dict[str, str]:
    """What the kernels' shapes depend on, as a profile states it and as the generator compares it."""
    model, training = job.model, job.training
    names = ["hidden_size", "num_attention_heads", "ffn_hidden_size", "normalization", "position_embedding_type"]
    names += ["rotary_percent"] * (model.position_embedding_type == "rope" and not model.multi_latent_attention)
    names += ["swiglu", "squared_relu", "add_bias_linear", "add_qkv_bias", "qk_layernorm"]
    names += ["hidden_dropout", "attention_dropout"]
    names += ["num_query_groups", "kv_channels", "multi_latent_attention", "num_experts"]
    if model.multi_latent_attention:
        names += ["q_lora_rank", "kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim"]
    if model.num_experts:
        names += ["moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
        names += ["moe_grouped_gemm"]
        if not model.dense_layers:
            names.remove("ffn_hidden_size")
    stated = {name: getattr(model, name) for name in names}
    stated["padded_vocab_size"] = job.padded_vocab_size
    stated["tensor_model_parallel_size"] = job.tp
    stated["expert_model_parallel_size"] = job.ep
    stated["enable_sequence_parallel"] = job.sp
    for name in ("micro_batch", "seq_length", "dtype"):
        stated[name] = getattr(training, name)
    return {name: str(value) for name, value in stated.items()}
