"""What one rank SENDS: the collectives of every row, derived once, whatever the source of times.

Ground truth: the recordings of Megatron-Core 0.13.1 in tests/megatron. Sizes follow the nccl-tests convention:
all-reduce, the tensor on one rank; all-gather, the full output; reduce-scatter, the full input; all-to-all, one rank's
whole send buffer. A collective over one rank is none. A = element_bytes b s h (Job.activation_bytes).
"""

from __future__ import annotations

from typing import NamedTuple

from aicb.config.job import Job


class Collective(NamedTuple):
    """One collective of this rank."""

    kind: str
    """ALLREDUCE, ALLGATHER, REDUCESCATTER or ALLTOALL."""
    group: str
    """TP, EP, DP or DP_EP (the replicas of one expert shard)."""
    bytes: int


class Step(NamedTuple):
    """A row's name and its collectives; `row` alone is written, `part` tells rows of one name apart."""

    row: str
    fwd: Collective | None = None
    ig: Collective | None = None
    wg: Collective | None = None
    part: str = ""
    recomputed: Collective | None = None
    """The collective of the forward that full recompute repeats; `fwd` where it is the same."""

    @property
    def key(self) -> str:
        """What kernels refer to: the row, or row:part."""
        return f"{self.row}:{self.part}" if self.part else self.row


class Groups(NamedTuple):
    """The sizes of this job's groups, to build collectives that vanish over one rank."""

    tp: int
    ep: int
    dp: int
    dp_ep: int

    def make(self, kind: str, group: str, size: int) -> Collective | None:
        """Return the collective, or None over a group of one rank or of zero bytes."""
        ranks: int = getattr(self, group.lower())
        return Collective(kind, group, size) if ranks > 1 and size > 0 else None


def groups(job: Job) -> Groups:
    """Return the group sizes of `job`."""
    return Groups(job.tp, job.ep, job.dp, job.parallel.expert_data_parallel_size)


def embedding(job: Job) -> tuple[Step, ...]:
    """The vocabulary-parallel embedding (first stage)."""
    g, size = groups(job), job.activation_bytes
    if not job.sp:
        return (Step("embedding_layer", fwd=g.make("ALLREDUCE", "TP", size)),)
    # Learned positions are added to the whole sequence, so it is scattered only afterwards, without communication.
    kind = "ALLREDUCE" if job.model.position_embedding_type == "learned_absolute" else "REDUCESCATTER"
    return (Step("embedding_layer", fwd=g.make(kind, "TP", size), ig=g.make("ALLGATHER", "TP", size)),)


def column(job: Job, row: str, size: int) -> tuple[Step, ...]:
    """A column-parallel linear under SP whose gathered input has `size` bytes; wgrad gathers the input again."""
    g = groups(job)
    gather = g.make("ALLGATHER", "TP", size)
    first = Step(row, fwd=gather, ig=g.make("REDUCESCATTER", "TP", size))
    return (first, Step(f"{row}_regather", ig=gather)) if gather else (first,)


def row_parallel(job: Job, row: str) -> tuple[Step, ...]:
    """A row-parallel linear under SP: its output of A bytes is reduced and scattered."""
    g, size = groups(job), job.activation_bytes
    return (Step(row, fwd=g.make("REDUCESCATTER", "TP", size), ig=g.make("ALLGATHER", "TP", size)),)


def block(job: Job, name: str) -> tuple[Step, ...]:
    """Attention or a dense MLP: a column-parallel and a row-parallel linear."""
    if job.sp:
        return column(job, f"{name}_column", job.activation_bytes) + row_parallel(job, f"{name}_row")
    reduce = groups(job).make("ALLREDUCE", "TP", job.activation_bytes)
    return (Step(f"{name}_layer", fwd=reduce, ig=reduce),)


def attention(job: Job) -> tuple[Step, ...]:
    """Self-attention of one layer."""
    model = job.model
    if not model.multi_latent_attention:
        return block(job, "attention")
    g, per_width = groups(job), job.element_bytes * job.tokens
    if model.q_lora_rank:
        query: tuple[Step, ...] = (Step("attention_linear_q_lora"),)
        query += column(job, "attention_q_column", per_width * model.q_lora_rank)
    else:
        query = column(job, "attention_q_column", job.activation_bytes)
    rope_key = per_width * model.qk_rope_dim  # one rotary key, shared by all heads
    down = Step(
        "attention_linear_kv_lora",
        fwd=g.make("ALLGATHER", "TP", rope_key),
        ig=g.make("REDUCESCATTER", "TP", rope_key),
    )
    up = column(job, "attention_kv_column", per_width * model.kv_lora_rank)
    return (*query, down, *up, *row_parallel(job, "attention_o_row"))


def routed_tokens(job: Job) -> int:
    """Token copies that the (busiest) rank gets from its EP group in one layer: b s k / t, times the imbalance."""
    even = job.tokens * job.model.moe_router_topk // job.tp
    return round(even * job.training.moe_load_imbalance)


def experts(job: Job) -> tuple[Step, ...]:
    """The experts of one layer: alltoall dispatcher, experts sharded over EP and TP."""
    g, model, tokens = groups(job), job.model, routed_tokens(job)
    row = "mlp_moelayer"
    per_copy = model.router_bytes(job.element_bytes)  # of one probability
    state = job.element_bytes * model.hidden_size  # of one token's hidden state
    statistics = None
    if model.moe_router_load_balancing_type != "none":
        statistics = g.make("ALLREDUCE", "TP", 8 * model.num_experts)
    full = job.training.recompute_granularity == "full"
    counts = 8 * model.num_experts * job.tp * job.ep  # int64; runs over TP x EP, which the format cannot say
    dispatch, odds = (g.make("ALLTOALL", "EP", tokens * each) for each in (state, per_copy))
    gather, gather_odds = (g.make("ALLGATHER", "TP", tokens * job.tp * each) for each in (state, per_copy))
    # The experts' output is summed over TP in the probabilities' precision (0.13.1, token_dispatcher.py; recorded).
    summed = tokens * job.tp * per_copy * model.hidden_size
    together, apart = g.make("REDUCESCATTER", "TP", summed), g.make("ALLGATHER", "TP", summed)
    scatter, scatter_odds = (g.make("REDUCESCATTER", "TP", tokens * job.tp * each) for each in (state, per_copy))
    return (
        Step(row, None if full else statistics, part="router", recomputed=statistics),
        Step(row, g.make("ALLGATHER", "EP" if job.ep > 1 else "TP", counts), part="counts"),
        Step(row, dispatch, dispatch, part="dispatch"),
        Step(row, odds, odds, part="dispatch_probabilities"),
        Step(row, gather, scatter, part="gather"),
        Step(row, gather_odds, scatter_odds, part="gather_probabilities"),
        Step(row, together, apart, part="experts"),
        Step(row, dispatch, dispatch, part="combine"),
    )


def mlp(job: Job, layer: int) -> tuple[Step, ...]:
    """The MLP of layer `layer`: dense, or experts (and shared experts)."""
    if not job.model.has_experts(layer):
        return block(job, "mlp")
    shared = block(job, "mlp_shared") if job.model.moe_shared_expert_intermediate_size else ()
    return experts(job) + shared


def head(job: Job) -> tuple[Step, ...]:
    """Final norm, LM head and vocabulary-parallel cross-entropy (last stage)."""
    g = groups(job)
    if job.sp:
        final = column(job, "final_column", job.activation_bytes)
    else:
        final = (Step("final_layer", ig=g.make("ALLREDUCE", "TP", job.activation_bytes)),)
    loss = g.make("ALLREDUCE", "TP", 4 * job.tokens)  # fp32: maximum, predicted logit, sum of exponentials
    return final + tuple(Step(f"cross_entropy{i}", fwd=loss) for i in (1, 2, 3) if loss)


def start_of_iteration(job: Job) -> tuple[Step, ...]:
    """Parameter gather, gradient reduction and optimizer; gradients are reduced in fp32."""
    g, held = groups(job), job.parameters()
    expert, d = held.expert_bucket, job.element_bytes
    if job.training.use_distributed_optimizer:
        reduced = [Step("grad_gather", wg=g.make("ALLGATHER", "DP", d * dense)) for dense in held.dense_buckets]
        reduced += [
            Step("grad_param_comm", wg=g.make("REDUCESCATTER", "DP", 4 * dense)) for dense in held.dense_buckets
        ]
        of_experts = [
            Step("moe_grad_norm1", wg=g.make("ALLGATHER", "DP_EP", d * expert)),
            Step("moe_grad_norm2", wg=g.make("REDUCESCATTER", "DP_EP", 4 * expert)),
        ]
    else:
        reduced = [Step("grad_param_comm", wg=g.make("ALLREDUCE", "DP", 4 * held.dense))]
        of_experts = [Step("moe_grad_norm1", wg=g.make("ALLREDUCE", "DP_EP", 4 * expert))]
    norms = Step("layernorm", ig=g.make("ALLREDUCE", "TP", 4 * held.tp_summed))
    sent = [step for step in (*reduced, norms, *of_experts) if step.ig or step.wg]
    position = sum(step.row.startswith("grad_") for step in sent)
    return (*sent[:position], Step("grad_param_compute"), *sent[position:])


def end_of_iteration(job: Job) -> tuple[Step, ...]:
    """The optimizer's scalars: the gradient norm, and two for logging (over TP x PP, written as TP)."""
    scalar = groups(job).make("ALLREDUCE", "TP", 4)
    return tuple(Step(f"optimizer{i}", fwd=scalar) for i in (1, 2, 3) if scalar)


class Stage(NamedTuple):
    """The steps of one pipeline stage. An iteration is `start`, ga micro-batches, `end`."""

    start: tuple[Step, ...]
    embedding: tuple[Step, ...]
    """Empty but on the first stage."""
    layers: dict[bool, tuple[Step, ...]]
    """By whether the layer has experts; only the kinds that the stage holds."""
    head: tuple[Step, ...]
    """Empty but on the last stage."""
    end: tuple[Step, ...]

    def keys(self) -> set[str]:
        """Keys of every step that runs on this stage."""
        parts = (self.start, self.embedding, *self.layers.values(), self.head, self.end)
        return {step.key for part in parts for step in part}


def stage(job: Job) -> Stage:
    """Return the steps of the stage of `job`."""
    kinds = {job.model.has_experts(layer): layer for layer in job.layers}
    return Stage(
        start_of_iteration(job),
        embedding(job) if job.is_first else (),
        {kind: attention(job) + mlp(job, layer) for kind, layer in kinds.items()},
        head(job) if job.is_last else (),
        end_of_iteration(job),
    )
