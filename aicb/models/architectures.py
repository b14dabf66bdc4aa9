"""Hugging Face's architectures: one entry of ARCHITECTURES (at the end) says how a `model_type` is read.

Checked against transformers 4.57: configuration_*.py for what an absent key means, modeling_*.py for biases, norms and
which layers have experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aicb.errors import UserError, require
from aicb.models.values import MAX_LAYERS, MAX_SIZE, checked_integer, show

BY_FLAGS = "give the architecture by flags (--num_layers --hidden_size --num_attention_heads ...) or as a .toml"
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate", "quick_gelu")
SILU = ("silu", "swish")  # what a gated MLP is expected to have; GELU: a plain one
OTHER_ACTIVATIONS = ("relu", "relu2", "relu6", "leaky_relu", "mish", "tanh", "sigmoid")


class Rule(NamedTuple):
    """A key with values that change nothing; any other is a warning, or an error."""

    key: str
    neutral: tuple[object, ...]
    says: str
    refused: bool = False


class Config:
    """The keys of one config.json; remembers which were read, and what to warn of."""

    def __init__(self, values: Mapping[str, Any], shown: str) -> None:
        self.values, self.shown = values, shown
        self.used: set[str] = set()
        self.warnings: list[str] = []

    def get(self, key: str) -> Any:
        """The value as it is; None where the key is absent."""
        self.used.add(key)
        return self.values.get(key)

    def at(self, key: str) -> str:
        """File, key and value, for the start of a message."""
        return f"{self.shown}: {key} {show(self.values.get(key))}"

    def size(self, key: str, least: int = 1) -> int:
        """A whole number that must be there."""
        require(key in self.values, f"{self.shown}: {key} is missing, and the model is not known without it: add it")
        most = MAX_LAYERS if key in ("num_hidden_layers", "n_layer") else MAX_SIZE
        return checked_integer(f"{self.shown}: {key}", self.get(key), least, most)

    def optional(self, key: str, least: int = 1) -> int | None:
        """The same, or None where it is null or absent."""
        return None if self.get(key) is None else self.size(key, least)

    def of_type(self, key: str, kind: type, what: str) -> Any:
        """A value of `kind`, or None where it is null or absent."""
        value = self.get(key)
        require(value is None or isinstance(value, kind), f"{self.at(key)} must be {what}: correct it in the file")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where it is null or absent."""
        return bool(self.of_type(key, bool, "true or false"))

    def warn(self, key: str, says: str) -> None:
        """Add a warning of one line."""
        self.warnings.append(f"{self.at(key)}: {says}")

    def apply(self, rule: Rule) -> None:
        """Warn or raise where a key has a value that changes the model."""
        if rule.key not in self.values:
            return
        value = self.get(rule.key)
        if any(type(value) is type(same) and value == same for same in rule.neutral):
            return
        if rule.refused:
            raise UserError(f"{self.at(rule.key)}: {rule.says}; {BY_FLAGS}")
        self.warn(rule.key, rule.says)


class Architecture(NamedTuple):
    """How one `model_type` is read."""

    causal: str
    """Its class in `architectures`, with a language model head."""
    sizes: Mapping[str, str]
    """ModelConfig field: key, a whole number that must be there."""
    optional: Mapping[str, str]
    """The same, where null or absent leaves the field to make_model."""
    fixed: Mapping[str, Any]
    """ModelConfig fields that are so whatever the keys say."""
    more: tuple[Callable[[Config, dict[str, Any]], None], ...] = ()
    """What takes more than a name: each adds to the fields read so far."""
    absent: Mapping[str, Any] = {}
    """What transformers takes for a key that is not there, where that is not null or false."""
    rules: tuple[Rule, ...] = ()
    harmless: tuple[str, ...] = ()
    """Keys that change nothing here, besides the HARMLESS of every architecture."""
    activation: str = "hidden_act"

    def read(self, config: Config) -> dict[str, Any]:
        """Return ModelConfig's fields. Raises UserError."""
        model = {**self.fixed, **{field: config.size(key) for field, key in self.sizes.items()}}
        for field, key in self.optional.items():
            if value := config.optional(key):
                model[field] = value
        model["untie_embeddings_and_output_weights"] = not config.flag("tie_word_embeddings")
        _activation(config, model, self.activation)
        for step in self.more:
            step(config, model)
        return model


def _activation(config: Config, model: dict[str, Any], key: str) -> None:
    """The MLP's activation: element-wise ones have the same shapes, so another one is timed as the nearest we have."""
    gated = model["swiglu"]
    value = config.of_type(key, str, "a text")
    require(value is not None, f"{config.shown}: {key} is missing: add it, such as {'silu' if gated else 'gelu'}")
    if value == "relu2" and not gated:
        model["squared_relu"] = True
    elif value not in (SILU if gated else GELU):
        require(
            value in (*SILU, *GELU, *OTHER_ACTIVATIONS),
            f"{config.at(key)}: no activation known here ({', '.join((*SILU, *GELU, *OTHER_ACTIVATIONS))}); {BY_FLAGS}",
        )
        config.warn(key, f"timed as {'gated SiLU' if gated else 'GELU'}, which has the same shapes")


def _gemma_activation(config: Config, model: dict[str, Any]) -> None:
    if config.get("hidden_activation") not in (None, config.get("hidden_act")):
        _activation(config, model, "hidden_activation")


def _llama_biases(config: Config, model: dict[str, Any]) -> None:
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    require(
        attention == mlp,
        f"{config.at('attention_bias')} with mlp_bias {show(mlp)}: biases can be described on all linear layers, on "
        f"none, or on QKV alone; {BY_FLAGS} and --add_bias_linear or --add_qkv_bias",
    )
    model["add_bias_linear"] = attention


def _qkv_bias(config: Config, model: dict[str, Any]) -> None:
    model["add_qkv_bias"] = config.flag("qkv_bias")


def _window(config: Config, model: dict[str, Any]) -> None:
    window = config.optional("sliding_window")
    if window is not None and window < model.get("max_position_embeddings", MAX_SIZE):
        config.warn("sliding_window", "generated with full causal attention, which is more work")


def _qwen_experts(config: Config, model: dict[str, Any]) -> None:
    """Layer i has experts unless mlp_only_layers lists it, where (i + 1) % decoder_sparse_step = 0."""
    dense = config.of_type("mlp_only_layers", list, "a list of layer numbers") or []
    require(all(type(i) is int for i in dense), f"{config.at('mlp_only_layers')} must hold layer numbers: correct it")
    step, left_out = config.size("decoder_sparse_step"), set(dense)
    pattern = tuple(int(i not in left_out and (i + 1) % step == 0) for i in range(model["num_layers"]))
    experts, topk = config.size("num_experts", least=0), config.size("num_experts_per_tok")
    width = config.size("moe_intermediate_size")
    if not experts or 1 not in pattern:
        return
    model |= {"num_experts": experts, "moe_router_topk": topk, "moe_ffn_hidden_size": width}
    model["moe_layer_freq"] = pattern if 0 in pattern else 1


def _gated_shared_expert(config: Config, model: dict[str, Any]) -> None:
    key = "shared_expert_intermediate_size"
    width = config.size(key, least=0)
    if width and "num_experts" in model:
        model["moe_shared_expert_intermediate_size"] = width
        per_layer = f"a GEMM to one column, {model['hidden_size']} parameters a layer"
        config.warn(key, f"the gate of the shared expert is left out ({per_layer})")


def _deepseek_experts(config: Config, model: dict[str, Any]) -> None:
    """Layer i has experts where i >= first_k_dense_replace and i % moe_layer_freq = 0."""
    experts, shared = config.optional("n_routed_experts"), config.optional("n_shared_experts", least=0) or 0
    first, step = config.size("first_k_dense_replace", least=0), config.size("moe_layer_freq")
    pattern = tuple(int(i >= first and i % step == 0) for i in range(model["num_layers"]))
    if experts is None or 1 not in pattern:
        config.used |= {"moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group", "topk_method"}
        return
    groups, chosen = config.optional("n_group"), config.optional("topk_group")
    if groups and chosen and chosen < groups:
        config.warn("topk_group", f"generated without limiting a token's experts to {chosen} of {groups} groups")
    if config.get("topk_method") == "noaux_tc":
        config.warn("topk_method", f"the router's bias ({experts} numbers a layer) is not counted as parameters")
    width = config.size("moe_intermediate_size")
    model |= {"num_experts": experts, "moe_router_topk": config.size("num_experts_per_tok")}
    model |= {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": shared * width}
    model |= {"n_dense_layers": first} if step == 1 else {"moe_layer_freq": pattern}


def _low_rank_queries(config: Config, model: dict[str, Any]) -> None:
    model["q_lora_rank"] = config.optional("q_lora_rank") or 0  # null: queries from the hidden state directly


_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_POSITIONS = {"max_position_embeddings": "max_position_embeddings"}
_HEADS = {**_POSITIONS, "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
_MIXTRAL = {**_SIZES, "num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"}
_LATENT = {"qk_nope_dim": "qk_nope_head_dim", "qk_rope_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim"}
_DEEPSEEK = {**_SIZES, "kv_lora_rank": "kv_lora_rank", **_LATENT}
_GPT2 = {"num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head", "vocab_size": "vocab_size"}

_GPT: dict[str, Any] = {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True}
_GPT_LEARNED = {**_GPT, "position_embedding_type": "learned_absolute"}
_GPT_ROPE = {**_GPT, "position_embedding_type": "rope"}
_LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
_QK_NORM = {**_LLAMA, "qk_layernorm": True}
_LATENT_NORM = {**_QK_NORM, "multi_latent_attention": True}

_NO_BIAS = Rule("attention_bias", (False, None), "biases on the attention projections alone cannot be described", True)
_NO_MLP_BIAS = Rule("mlp_bias", (False, None), "biases on the MLP alone cannot be described", True)
_BIAS = Rule("attention_bias", (True,), "biases on the MLP alone cannot be described", True)
_WINDOW = Rule("use_sliding_window", (False, None), "generated with full causal attention, which is more work")
_MTP = Rule("num_nextn_predict_layers", (0, None), "multi-token prediction is left out, and its parameters")
_ROTARY = Rule("rotary_pct", (1, 1.0, None), "generated with rotary positions on the whole head")
_PARALLEL = Rule(
    "use_parallel_residual",
    (False, None),
    "generated as attention, then MLP, as Megatron-LM runs it: parameters and GEMMs are the same, but under tensor "
    "parallelism it all-reduces twice a layer where the parallel form could do with one",
)
_SILU, _QWEN = {"hidden_act": "silu"}, ("sliding_window", "max_window_layers", "use_mrope")
_V2 = {**_SILU, "q_lora_rank": 1536, "first_k_dense_replace": 0, "moe_layer_freq": 1}
_LATENT_MORE, _LATENT_RULES = (_low_rank_queries, _deepseek_experts), (_NO_BIAS, _NO_MLP_BIAS, _MTP)
_PLAIN_HEADS = ("num_key_value_heads", "head_dim", "qk_head_dim")  # of no effect in latent attention

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _SIZES, _HEADS, _LLAMA, (_llama_biases,), _SILU),
    "mistral": Architecture(
        "MistralForCausalLM", _SIZES, _HEADS, _LLAMA, (_window,),
        {**_SILU, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", _MIXTRAL, _HEADS, _LLAMA, (_window,), {**_SILU, "num_key_value_heads": 8}
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", _SIZES, _HEADS, {**_LLAMA, "add_qkv_bias": True}, (),
        {**_SILU, "num_key_value_heads": 32}, (_WINDOW,), _QWEN,
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM", _SIZES, _HEADS, _LLAMA, (_qkv_bias, _qwen_experts, _gated_shared_expert),
        {**_SILU, "num_key_value_heads": 16, "decoder_sparse_step": 1, "qkv_bias": True}, (_WINDOW,), _QWEN,
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", _SIZES, _HEADS, _QK_NORM, (),
        {**_SILU, "num_key_value_heads": 32, "head_dim": 128}, (_WINDOW, _NO_BIAS), _QWEN,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", _SIZES, _HEADS, _QK_NORM, (_qwen_experts,),
        {**_SILU, "num_key_value_heads": 4, "decoder_sparse_step": 1}, (_WINDOW, _NO_BIAS), _QWEN,
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM", _DEEPSEEK, _POSITIONS, _LATENT_NORM, _LATENT_MORE, _V2, _LATENT_RULES, _PLAIN_HEADS
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM", _DEEPSEEK, _POSITIONS, _LATENT_NORM, _LATENT_MORE, {**_V2, "topk_method": "noaux_tc"},
        _LATENT_RULES, _PLAIN_HEADS,
    ),
    "gemma": Architecture(
        "GemmaForCausalLM", _SIZES, _HEADS, _LLAMA, (_gemma_activation,),
        {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
        (_NO_BIAS,),
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel", {**_GPT2, "max_position_embeddings": "n_positions"}, {"ffn_hidden_size": "n_inner"},
        _GPT_LEARNED, (), {"tie_word_embeddings": True, "activation_function": "gelu_new"}, (),
        (
            "n_ctx", "attn_pdrop", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        ),
        "activation_function",
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM", _SIZES, _POSITIONS, _GPT_ROPE, (),
        {"hidden_act": "gelu", "rotary_pct": 0.25, "use_parallel_residual": True, "attention_bias": True},
        (_ROTARY, _PARALLEL, _BIAS), ("partial_rotary_factor", "rotary_emb_base"),
    ),
}  # fmt: skip
REFUSED = {
    "gemma2": "four norms a layer and sliding windows cannot be described",
    "gemma3_text": "four norms a layer and sliding windows cannot be described",
}
