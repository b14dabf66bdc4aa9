"""How the model is trained: batch sizes, sequence, precision, recompute, optimizer, iterations."""

from __future__ import annotations

from dataclasses import dataclass

from aicb.errors import require

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTION_BACKENDS = ("auto", "cudnn", "fa3", "fa2", "sdpa", "unfused", "flash", "fused", "local")
"""The last three are Megatron-LM's words: flash-attn, cuDNN, unfused."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One training job, apart from the model and its split."""

    global_batch: int = 1024
    """Sequences in one iteration over all data-parallel ranks."""
    micro_batch: int = 1
    """Sequences in one micro-batch of one rank."""
    seq_length: int = 4096
    """Tokens in a sequence."""
    epoch_num: int = 1
    """Iterations written to the workload."""
    dtype: str = "bfloat16"
    """Of parameters and activations; gradients are reduced in fp32."""
    recompute_granularity: str = "none"
    """selective: core attention again in backward; full: every layer again."""
    use_distributed_optimizer: bool = True
    use_flash_attn: bool = True
    moe_load_imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean; 1: uniform routing."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "seq_length", "epoch_num"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        require(self.dtype in ELEMENT_BYTES, f"--dtype {self.dtype} must be one of {', '.join(ELEMENT_BYTES)}")
        require(
            self.recompute_granularity in RECOMPUTE,
            f"--recompute_granularity {self.recompute_granularity} must be one of {', '.join(RECOMPUTE)}",
        )
        require(
            self.dtype != "float32" or not self.use_flash_attn,
            "--use_flash_attn needs --dtype bfloat16 or float16: flash attention has no float32 kernels",
        )
        require(
            1.0 <= self.moe_load_imbalance < float("inf"),
            f"--moe_load_imbalance {self.moe_load_imbalance} must be at least 1 (1: uniform routing)",
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation or parameter element."""
        return ELEMENT_BYTES[self.dtype]
