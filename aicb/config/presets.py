"""The presets: named architectures as data, with where each is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aicb.config.model import ESSENTIAL
from aicb.errors import UserError, nearest, require


@dataclass(frozen=True, slots=True)
class Preset:
    """A named architecture and the tensor parallelism that its users' script runs it with."""

    fields: Mapping[str, Any]
    """ModelConfig fields; what is left out is derived (see make_model)."""
    tensor_model_parallel_size: int
    source: str
    """Where the architecture is published."""


_GPT_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def _gpt(name: str, layers: int, hidden: int, heads: int, tp: int) -> Preset:
    config = {"name": name, "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return Preset({**config, **_GPT_DROPOUT}, tp, "GPT-3 style, Megatron-LM defaults, GPT-2 vocabulary")


_LLAMA_STYLE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, tp: int = 8, **more: Any
) -> Preset:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_query_groups": kv}
    config = {"name": name, **sizes, "ffn_hidden_size": ffn, "vocab_size": vocab, **_LLAMA_STYLE, **more}
    return Preset(config, tp, f"config.json published with {name}")


def _deepseek(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: tuple[int, int],
    vocab: int,
    experts: tuple[int, int],
    shared: int,
    dense: int,
    q_lora: int,
) -> Preset:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn[0]}
    moe = {"num_experts": experts[0], "moe_router_topk": experts[1], "moe_ffn_hidden_size": ffn[1]}
    more = {"moe_shared_expert_intermediate_size": shared * ffn[1], "n_dense_layers": dense, "qk_layernorm": True}
    dims = {"q_lora_rank": q_lora, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_head_dim": 128}
    config = {"name": name, **sizes, "vocab_size": vocab, **moe, **more, "multi_latent_attention": True, **dims}
    return Preset({**config, **_LLAMA_STYLE}, 1, f"config.json published with {name} (no MTP, no router bias)")


PRESETS: dict[str, Preset] = {
    "7": _gpt("gpt_7B", 36, 4096, 32, tp=4),
    "13": _gpt("gpt_13B", 40, 5120, 40, tp=8),
    "22": _gpt("gpt_22B", 48, 6144, 64, tp=8),
    "175": _gpt("gpt_175B", 96, 12288, 96, tp=8),
    "405": _llama("llama_405B", 126, 16384, 128, 8, 53248, 128256),
    "llama2-7b": _llama("llama2_7B", 32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama("llama2_13B", 40, 5120, 40, 40, 13824, 32000),
    "llama-65b": _llama("llama_65B", 80, 8192, 64, 64, 22016, 32000),
    "llama3-8b": _llama("llama3_8B", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama("llama3_70B", 80, 8192, 64, 8, 28672, 128256),
    "moe": _llama("Mixtral_8*7B", 32, 4096, 32, 8, 14336, 32000, tp=4, num_experts=8, moe_router_topk=2),
    "deepseek16": _deepseek("DeepSeek_16B", 27, 2048, 16, (10944, 1408), 102400, (64, 6), 2, 1, 0),
    "deepseek236": _deepseek("DeepSeek_236B", 60, 5120, 128, (12288, 1536), 102400, (160, 6), 2, 1, 1536),
    "deepseek671": _deepseek("DeepSeek_671B", 61, 7168, 128, (18432, 2048), 129280, (256, 8), 1, 3, 1536),
    "qwen3-235b-a22b": _llama(
        "qwen3_235B_A22B", 94, 4096, 64, 4, 12288, 151936,
        tp=4, kv_channels=128, qk_layernorm=True, num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=1536,
    ),
}  # fmt: skip
DEFAULT_PRESET = "13"


def preset(name: str) -> Preset:
    """Return the preset `name`. Raises UserError with the nearest names, or those that it may stand for."""
    if name not in PRESETS:
        begun = [known for known in PRESETS if known.startswith(name.lower())]
        require(not (name and begun), f"-m {name}: which one? {', '.join(begun)} (see: aicb models)")
        flags = " ".join(f"--{field}" for field in ESSENTIAL)
        raise UserError(
            f"-m {name}: no such preset{nearest(name, PRESETS) or ': known are ' + ', '.join(PRESETS)}; "
            f"a config.json or .toml path works too, or give the architecture by {flags} ..."
        )
    return PRESETS[name]
