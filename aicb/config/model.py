"""What the network is: ModelConfig, and the presets as data.

A preset is a dict of ModelConfig's fields; whatever the user types wins over it. Field names are Megatron-LM's flag
names, so that a message can name the flag to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from aicb.errors import UserError, require

POSITION_EMBEDDINGS = ("rope", "learned_absolute", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
LOAD_BALANCING = ("aux_loss", "none")
BALANCING_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
ROUTER_BYTES = {"": 0, "fp32": 4, "fp64": 8}
# What `--multi_latent_attention` and the experts need, and what has no meaning without them.
ZERO_IS_NONE = (
    "moe_aux_loss_coeff",
    "q_lora_rank",
    "moe_shared_expert_intermediate_size",
    "n_dense_layers",
    "n_shared_expert",
)
MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim")
LAYERS_MAX = 100_000  # rows are listed layer by layer
SIZE_MAX = 10**12
ESSENTIAL = ("num_layers", "hidden_size", "num_attention_heads")
MOE_FIELDS = (
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_load_balancing_type",
    "moe_router_dtype",
    "moe_router_enable_expert_bias",
    "moe_grouped_gemm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer as Megatron-Core builds it. Sizes in elements; every field is resolved (no None)."""

    name: str
    """Goes into file names and summaries."""
    num_layers: int
    """Transformer layers over all pipeline stages."""
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Width of one attention head."""
    ffn_hidden_size: int
    """Width of the dense MLP (of the dense layers, in a mixture of experts)."""
    vocab_size: int
    """Unpadded."""
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int = 4096
    """Rows of the learned position table; of no effect with rope."""
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    """Part of each head that rotary positions turn; the rest passes as it is (GLM-4, GPT-NeoX)."""
    normalization: str = "LayerNorm"
    swiglu: bool = False
    squared_relu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    """A bias on the QKV projection alone (Qwen2), where add_bias_linear is off."""
    qk_layernorm: bool = False
    """Norms on query and key (per head), or on the low-rank queries and keys of latent attention."""
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.0
    """Of what attention and MLP add to the residual stream."""
    attention_dropout: float = 0.0
    """Of the attention probabilities."""
    num_experts: int = 0
    """0: no mixture of experts."""
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0
    """Width of one expert."""
    moe_shared_expert_intermediate_size: int = 0
    """Width of all shared experts together; 0: none."""
    moe_layer_freq: tuple[int, ...] = ()
    """One 0 (dense) or 1 (experts) per layer; empty without experts."""
    moe_router_load_balancing_type: str = "aux_loss"
    moe_router_dtype: str = ""
    """Of the router's probabilities, fp32 or fp64; empty: the model's own."""
    moe_router_enable_expert_bias: bool = False
    """A bias of a token's choice of experts (DeepSeek-V3): no parameter; its token counts are summed once a step."""
    moe_grouped_gemm: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    """0: queries are projected from the hidden state directly."""
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"):
            _positive(self, name)
        for name in ("ffn_hidden_size", "vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings"):
            _positive(self, name)
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"--{name} {value} must be at least 0 and less than 1")
        _one_of(self, "position_embedding_type", POSITION_EMBEDDINGS)
        _one_of(self, "normalization", NORMALIZATIONS)
        require(not (self.swiglu and self.squared_relu), "--swiglu and --squared_relu exclude each other: choose one")
        require(
            self.num_attention_heads % self.num_query_groups == 0,
            f"--num_attention_heads {self.num_attention_heads} must be a multiple of "
            f"--num_query_groups {self.num_query_groups}",
        )
        if self.position_embedding_type == "rope":
            flag = "qk_rope_dim" if self.multi_latent_attention else "kv_channels"
            width = getattr(self, flag)
            require(width % 2 == 0, f"--{flag} {width} must be even: rotary positions turn pairs")
            self._check_rotary()
        else:
            require(self.rotary_percent == 1, f"--rotary_percent {self.rotary_percent:g} needs rotary positions")
        if self.num_experts:
            self._check_experts()
        if self.multi_latent_attention:
            self._check_latent_attention()

    def _check_rotary(self) -> None:
        part = self.rotary_percent
        require(0 < part <= 1, f"--rotary_percent {part:g} must be above 0 and at most 1 (1: the whole head)")
        require(
            part == 1 or not self.multi_latent_attention,
            f"--rotary_percent {part:g} has no meaning with latent attention (--qk_rope_dim)",
        )
        turned = self.rotary_width
        require(
            turned > 0 and turned % 2 == 0,
            f"--rotary_percent {part:g} of --kv_channels {self.kv_channels} is {turned}, and must be even: rotary "
            "positions turn pairs",
        )

    @property
    def rotary_width(self) -> int:
        """Elements of a head that rotary positions turn, rounded down as Megatron-Core does."""
        return self.qk_rope_dim if self.multi_latent_attention else int(self.kv_channels * self.rotary_percent)

    def _check_experts(self) -> None:
        for name in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size"):
            _positive(self, name)
        require(
            self.moe_router_topk <= self.num_experts,
            f"--moe_router_topk {self.moe_router_topk} must not exceed --num_experts {self.num_experts}",
        )
        shared = self.moe_shared_expert_intermediate_size
        require(shared >= 0, f"--moe_shared_expert_intermediate_size {shared} must not be negative")
        _one_of(self, "moe_router_load_balancing_type", LOAD_BALANCING)
        require(
            self.moe_router_dtype in ROUTER_BYTES,
            f"--moe_router_dtype {self.moe_router_dtype} must be fp32 or fp64, or left out",
        )
        pattern = self.moe_layer_freq
        require(
            len(pattern) == self.num_layers and set(pattern) <= {0, 1},
            f"--moe_layer_freq needs one 0 or 1 for each of --num_layers {self.num_layers}, not {len(pattern)} entries",
        )
        require(1 in pattern, "--moe_layer_freq / --n_dense_layers leave no layer with experts")

    def _check_latent_attention(self) -> None:
        for name in MLA_FIELDS[1:]:
            _positive(self, name)
        require(self.q_lora_rank >= 0, f"--q_lora_rank {self.q_lora_rank} must not be negative (0: none)")
        require(
            self.position_embedding_type == "rope",
            f"--multi_latent_attention needs --position_embedding_type rope, not {self.position_embedding_type}",
        )

    def router_bytes(self, element_bytes: int) -> int:
        """Bytes of one of the router's probabilities, in a model of `element_bytes`."""
        return ROUTER_BYTES[self.moe_router_dtype] or element_bytes

    @property
    def dense_layers(self) -> int:
        """Layers whose MLP is dense."""
        return self.num_layers - sum(self.moe_layer_freq)

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (0-based over the whole model) is a mixture of experts."""
        return bool(self.moe_layer_freq) and self.moe_layer_freq[layer] == 1


def _positive(model: ModelConfig, name: str) -> None:
    value, most = getattr(model, name), LAYERS_MAX if name == "num_layers" else SIZE_MAX
    require(value >= 1, f"--{name} {value} must be at least 1")
    require(value <= most, f"--{name} {value} must be at most {most}")


def _one_of(model: ModelConfig, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(model, name)
    require(value in allowed, f"--{name} {value} must be one of {', '.join(allowed)}")


def make_model(base: Mapping[str, Any], typed: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from `base` (a preset, a file) and what the user typed, which wins.

    Besides ModelConfig's fields, `n_dense_layers`, `n_shared_expert`, `group_query_attention` and `moe_aux_loss_coeff`
    are understood. What neither gives is derived
    as Megatron-LM does: num_query_groups = heads, kv_channels = hidden / heads, ffn = 4 hidden, or
    int(8 hidden / 3 / 64) 64 with SwiGLU. Raises UserError naming flags, values and the rule.
    """
    config = {"vocab_size": 50257, **base, **typed}
    config.setdefault("name", "custom")
    for name in ESSENTIAL:
        require(name in config, f"--{name} is missing: an architecture needs {', '.join('--' + n for n in ESSENTIAL)}")
        require(config[name] >= 1, f"--{name} {config[name]} must be at least 1")
    require(config["num_layers"] <= LAYERS_MAX, f"--num_layers {config['num_layers']} must be at most {LAYERS_MAX}")
    if typed.get("squared_relu") and "swiglu" not in typed:
        config["swiglu"] = False
    if typed.get("swiglu") and "squared_relu" not in typed:
        config["squared_relu"] = False
    _resolve_attention(config, typed)
    biased = config.get("add_bias_linear", True) or config.get("multi_latent_attention")
    require(
        not typed.get("add_qkv_bias") or not biased,
        "--add_qkv_bias has no effect beside --add_bias_linear, nor with latent attention",
    )
    if config.get("ffn_hidden_size") is None:
        config["ffn_hidden_size"] = default_ffn(config["hidden_size"], config.get("swiglu", False))
    _resolve_experts(config, typed)
    unknown = set(config) - {field.name for field in fields(ModelConfig)}
    require(not unknown, f"unknown model field: {', '.join(sorted(unknown))}")
    return ModelConfig(**config)


def default_ffn(hidden_size: int, swiglu: bool) -> int:
    """MLP width when none is given: 4 h, or two thirds of it rounded down to 64 with SwiGLU (Megatron-LM's rule)."""
    return int(4 * hidden_size * 2 / 3 / 64) * 64 if swiglu else 4 * hidden_size


def _resolve_attention(config: dict[str, Any], typed: Mapping[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    latent = config.get("multi_latent_attention", False)
    _refuse(typed, MLA_FIELDS, bool(latent), "--multi_latent_attention")
    if latent:
        for name in ("num_query_groups", "kv_channels"):
            require(name not in typed, f"--{name} has no meaning with latent attention (--qk_nope_dim, --v_head_dim)")
        config["num_query_groups"] = heads
        config["kv_channels"] = config.get("qk_nope_dim", 0) + config.get("qk_rope_dim", 0)
        if "position_embedding_type" not in config:
            config["position_embedding_type"] = "rope"
        require(config["kv_channels"] > 0, "--multi_latent_attention needs --qk_nope_dim and --qk_rope_dim")
    grouped = config.pop("group_query_attention", None)
    require(
        grouped is not False or config.get("num_query_groups") in (None, heads),
        f"--no-group_query_attention and {config.get('num_query_groups')} key/value heads contradict each other",
    )
    if config.get("num_query_groups") is None:
        config["num_query_groups"] = 1 if grouped else heads  # Megatron-LM's --num-query-groups is 1 by default
    if config.get("kv_channels") is None:
        require(
            hidden % heads == 0,
            f"--hidden_size {hidden} must be a multiple of --num_attention_heads {heads} unless --kv_channels is given",
        )
        config["kv_channels"] = hidden // heads


def _resolve_experts(config: dict[str, Any], typed: Mapping[str, Any]) -> None:
    experts = config.get("num_experts") or 0
    wanted = config.pop("moe_enable", None)
    require(not wanted or experts > 0, "--moe_enable needs --num_experts")
    require(
        wanted is not False or not experts,
        f"--no-moe_enable and {experts} experts contradict each other: --num_experts 0 makes the model dense",
    )
    names = (*MOE_FIELDS, "n_dense_layers", "n_shared_expert", "moe_aux_loss_coeff")
    _refuse(typed, names, experts > 0, "--num_experts")
    coefficient = config.pop("moe_aux_loss_coeff", None)
    if coefficient == 0 and config.get("moe_router_load_balancing_type", "aux_loss") in BALANCING_LOSSES:
        # Megatron-Core 0.13.1, moe/router.py: without a weight the loss is not computed, nor anything summed for it
        config["moe_router_load_balancing_type"] = "none"
    dense, shared = config.pop("n_dense_layers", None), config.pop("n_shared_expert", None)
    if not experts:
        config.pop("moe_layer_freq", None)
        return
    require(
        not typed.get("add_bias_linear"),
        "--add_bias_linear and --num_experts exclude each other: Megatron-Core has no biases beside experts",
    )
    config["add_bias_linear"] = False
    width = config.get("moe_ffn_hidden_size") or config["ffn_hidden_size"]
    config["moe_ffn_hidden_size"] = width
    if "n_shared_expert" in typed:
        require(
            "moe_shared_expert_intermediate_size" not in typed,
            "--n_shared_expert and --moe_shared_expert_intermediate_size exclude each other: choose one",
        )
        require(shared is not None and shared >= 0, f"--n_shared_expert {shared} must not be negative")
        config["moe_shared_expert_intermediate_size"] = shared * width
    config["moe_layer_freq"] = _layer_pattern(config, typed, dense)


def _layer_pattern(config: Mapping[str, Any], typed: Mapping[str, Any], dense: int | None) -> tuple[int, ...]:
    layers: int = config["num_layers"]
    freq = config.get("moe_layer_freq", 1)
    if "n_dense_layers" in typed and "moe_layer_freq" in typed:
        raise UserError("--n_dense_layers and --moe_layer_freq exclude each other: choose one")
    if dense is not None and "moe_layer_freq" not in typed:
        require(0 <= dense < layers, f"--n_dense_layers {dense} must be from 0 to --num_layers {layers} less 1")
        return (0,) * dense + (1,) * (layers - dense)
    if isinstance(freq, int):
        require(freq >= 1, f"--moe_layer_freq {freq} must be at least 1")
        return tuple(int(layer % freq == 0) for layer in range(layers))
    return tuple(int(layer) for layer in freq)


def _refuse(typed: Mapping[str, Any], names: tuple[str, ...], usable: bool, needs: str) -> None:
    """A flag that the model cannot use is an error, never ignored."""
    for name in names:
        nothing = typed.get(name) in (None, False) or (typed[name] == 0 and name in ZERO_IS_NONE)
        if not nothing and not usable:
            raise UserError(f"--{name} {typed[name]} has no meaning without {needs}")
