"""How the model is split: ParallelConfig and the layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from aicb.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The simulated cluster and its process groups (numbers of GPUs)."""

    world_size: int = 32
    tensor_model_parallel_size: int = 8
    pipeline_model_parallel: int = 1
    expert_model_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_sequence_parallel: bool = False
    """As asked for; it has no effect with one TP rank (Megatron-LM switches it off)."""
    num_layers_per_virtual_pipeline_stage: int = 1
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "world_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel",
            "expert_model_parallel_size",
            "context_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
        ):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        require(
            self.context_parallel_size == 1,
            f"--context_parallel_size {self.context_parallel_size}: only 1 for now, the workload format has no "
            "word for context-parallel communication",
        )
        t, p = self.tensor_model_parallel_size, self.pipeline_model_parallel
        require(
            self.world_size % (t * p) == 0,
            f"--world_size {self.world_size} must be a multiple of --tensor_model_parallel_size {t} x "
            f"--pipeline_model_parallel {p} = {t * p}",
        )
        dp, ep = self.data_parallel_size, self.expert_model_parallel_size
        require(
            dp % ep == 0,
            f"--expert_model_parallel_size {ep} must divide the {dp} data-parallel ranks "
            f"(--world_size {self.world_size} / --tensor_model_parallel_size {t} / --pipeline_model_parallel {p})",
        )

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the dense parameters: world / (tp pp cp)."""
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel * self.context_parallel_size
        )

    @property
    def expert_data_parallel_size(self) -> int:
        """Replicas of one expert shard: DP / EP."""
        return self.data_parallel_size // self.expert_model_parallel_size

    @property
    def sequence_parallel(self) -> bool:
        """Sequence parallelism in effect: asked for, and more than one TP rank."""
        return self.enable_sequence_parallel and self.tensor_model_parallel_size > 1

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """Return each stage's layers (0-based ranges). Raises UserError when they do not divide."""
        return _stages(self, num_layers)


@lru_cache(maxsize=8)  # every stage asks
def _stages(parallel: ParallelConfig, num_layers: int) -> tuple[range, ...]:
    p, chunk = parallel.pipeline_model_parallel, parallel.num_layers_per_virtual_pipeline_stage
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        require(
            num_layers % p == 0,
            f"--num_layers {num_layers} must be a multiple of --pipeline_model_parallel {p}, unless the first or "
            "last stage gets its own number (--decoder_first_pipeline_num_layers, "
            "--decoder_last_pipeline_num_layers)",
        )
        counts = [num_layers // p] * p
    else:
        counts = _uneven(num_layers, p, first, last)
    ends = list(accumulate(counts))
    stages = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    for rank, layers in enumerate(stages):
        require(
            len(layers) % chunk == 0,
            f"--num_layers_per_virtual_pipeline_stage {chunk} must divide the {len(layers)} layers of stage {rank}",
        )
    return stages


def _uneven(num_layers: int, p: int, first: int | None, last: int | None) -> list[int]:
    given = {"--decoder_first_pipeline_num_layers": first, "--decoder_last_pipeline_num_layers": last}
    typed = {flag: value for flag, value in given.items() if value is not None}
    said = ", ".join(f"{flag} {value}" for flag, value in typed.items())
    require(p > 1, f"{said}: needs --pipeline_model_parallel of at least 2, not {p}")
    for flag, value in typed.items():
        require(value >= 1, f"{flag} {value} must be at least 1")
    middle, rest = p - len(typed), num_layers - sum(typed.values())
    require(
        rest == 0 if middle == 0 else rest > 0 and rest % middle == 0,
        f"{said}: the other {rest} of --num_layers {num_layers} must divide evenly over the other {middle} of "
        f"--pipeline_model_parallel {p} stages",
    )
    counts = [rest // middle if middle else 0] * p
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts
