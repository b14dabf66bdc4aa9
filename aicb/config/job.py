"""A job: one model, one split, one way of training, seen from one pipeline stage; and the sizes that follow.

Every rule that spans the three configurations is checked here. Letters in comments: b micro batch, s sequence,
h hidden, t TP, k router top-k, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor

from aicb.config.model import ModelConfig
from aicb.config.parallel import ParallelConfig
from aicb.config.parameters import RankParameters, Shard, rank_parameters, tensors
from aicb.config.training import TrainingConfig
from aicb.errors import require


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank of pipeline stage `pp_rank`. Raises UserError when a rule across the configurations is broken."""

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    pp_rank: int = 0

    def __post_init__(self) -> None:
        p = self.parallel.pipeline_model_parallel
        require(
            0 <= self.pp_rank < p,
            f"--pp_rank {self.pp_rank} must be from 0 to --pipeline_model_parallel {p} less 1, or all, or slowest",
        )
        self.parallel.stages(self.model.num_layers)
        self._check_batches()
        self._check_widths()
        self._check_experts()
        self._check_positions()

    def _check_batches(self) -> None:
        training, dp = self.training, self.dp
        step = training.micro_batch * dp
        require(
            training.global_batch % step == 0,
            f"--global_batch {training.global_batch} must be a multiple of --micro_batch {training.micro_batch} x "
            f"{dp} data-parallel ranks = {step} (--world_size {self.parallel.world_size} / (tp {self.tp} x "
            f"pp {self.parallel.pipeline_model_parallel}))",
        )
        require(
            not self.sp or training.seq_length % self.tp == 0,
            f"--seq_length {training.seq_length} must be a multiple of --tensor_model_parallel_size {self.tp} with "
            "--enable_sequence_parallel",
        )

    def _check_widths(self) -> None:
        model, tp = self.model, self.tp
        widths = {"num_attention_heads": model.num_attention_heads, "num_query_groups": model.num_query_groups}
        if model.dense_layers:
            widths["ffn_hidden_size"] = model.ffn_hidden_size
        if model.num_experts:
            widths["moe_ffn_hidden_size"] = model.moe_ffn_hidden_size
            widths["moe_shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
        for name, value in widths.items():
            require(
                value % tp == 0,
                f"--{name} {value} must be a multiple of --tensor_model_parallel_size {tp}"
                + (", and not fewer" if 0 < value < tp else ""),
            )
        if model.multi_latent_attention:
            self._needs_sequence_parallel("--multi_latent_attention")

    def _needs_sequence_parallel(self, what: str) -> None:
        require(
            self.tp == 1 or self.sp,
            f"{what} with --tensor_model_parallel_size {self.tp} needs --enable_sequence_parallel (--sp), "
            "or --tensor_model_parallel_size 1",
        )

    def _check_experts(self) -> None:
        model, ep, skew = self.model, self.ep, self.training.moe_load_imbalance
        if not model.num_experts:
            require(ep == 1, f"--expert_model_parallel_size {ep} has no meaning without --num_experts")
            require(skew == 1, f"--moe_load_imbalance {skew:g} has no meaning without --num_experts")
            return
        self._needs_sequence_parallel("--num_experts")
        require(
            model.num_experts % ep == 0,
            f"--num_experts {model.num_experts} must be a multiple of --expert_model_parallel_size {ep}",
        )
        # Each token picks k different experts, so one rank gets at most min(k, E/ep) of its k copies.
        most = ep * min(model.moe_router_topk, model.num_experts // ep) / model.moe_router_topk
        shown = floor(most * 1000) / 1000
        require(
            skew <= most,
            f"--moe_load_imbalance {skew:g} must be at most {shown:g}: with --expert_model_parallel_size {ep}, "
            f"--num_experts {model.num_experts} and --moe_router_topk {model.moe_router_topk} no rank can get more",
        )

    def _check_positions(self) -> None:
        model, seq = self.model, self.training.seq_length
        require(
            model.position_embedding_type != "learned_absolute" or model.max_position_embeddings >= seq,
            f"--max_position_embeddings {model.max_position_embeddings} must not be less than --seq_length {seq} with "
            "learned positions",
        )

    def at(self, pp_rank: int) -> Job:
        """Return the same job seen from stage `pp_rank`."""
        return replace(self, pp_rank=pp_rank)

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.parallel.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.parallel.pipeline_model_parallel

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return self.parallel.expert_model_parallel_size

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.parallel.data_parallel_size

    @property
    def sp(self) -> bool:
        """Sequence parallelism in effect."""
        return self.parallel.sequence_parallel

    @property
    def ga(self) -> int:
        """Micro-batches of one rank in one iteration."""
        return self.training.global_batch // (self.training.micro_batch * self.dp)

    @property
    def layers(self) -> range:
        """Layers of this stage, 0-based over the whole model."""
        return self.parallel.stages(self.model.num_layers)[self.pp_rank]

    @property
    def vpp(self) -> int:
        """Model chunks of this stage (virtual pipeline)."""
        return len(self.layers) // self.parallel.num_layers_per_virtual_pipeline_stage

    @property
    def is_first(self) -> bool:
        """Whether this stage holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage holds the final norm, the head and the loss."""
        return self.pp_rank == self.pp - 1

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch: b s."""
        return self.training.micro_batch * self.training.seq_length

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch outside the tensor-parallel linears: b s / t with sequence parallelism."""
        return self.tokens // self.tp if self.sp else self.tokens

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return self.training.element_bytes

    @property
    def activation_bytes(self) -> int:
        """A, bytes of one micro-batch's hidden state: element b s h."""
        return self.element_bytes * self.tokens * self.model.hidden_size

    @property
    def pp_comm(self) -> int:
        """Bytes of one stage-to-stage send; 0 with one stage."""
        if self.pp == 1:
            return 0
        return self.activation_bytes // self.tp if self.sp else self.activation_bytes

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up to a multiple of --make_vocab_size_divisible_by x t, as Megatron-LM pads it."""
        unit = self.model.make_vocab_size_divisible_by * self.tp
        return -(-self.model.vocab_size // unit) * unit

    def shard(self) -> Shard:
        """Return the part of the model that this rank holds."""
        return Shard(
            tp=self.tp,
            ep=self.ep,
            sequence_parallel=self.sp,
            layers=self.layers,
            first=self.is_first,
            last=self.is_last,
            vocab=self.padded_vocab_size,
        )

    def parameters(self) -> RankParameters:
        """Count the parameters that this rank holds."""
        held = tensors(self.model, self.shard())
        return rank_parameters(
            held, self.dp, self.parallel.expert_data_parallel_size, self.training.use_distributed_optimizer
        )
