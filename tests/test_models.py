"""Presets: exact sizes, as published; and what the user types wins over them."""

from __future__ import annotations

from typing import Any

import pytest

from aicb.config.configure import configure
from aicb.config.model import ModelConfig, make_model
from aicb.config.parameters import whole_model_parameters
from aicb.config.presets import PRESETS
from aicb.errors import UserError

# Published parameter counts (unpadded vocabulary; DeepSeek-V3 without multi-token prediction and router bias).
PARAMETERS = {
    "7": 7472312320,
    "13": 12863872000,
    "22": 22081062912,
    "175": 174629425152,
    "405": 405853388800,
    "llama2-7b": 6738415616,
    "llama2-13b": 13015864320,
    "llama-65b": 65285660672,
    "llama3-8b": 8030261248,
    "llama3-70b": 70553706496,
    "moe": 46702792704,
    "deepseek16": 15706484224,
    "deepseek236": 235741434880,
    "deepseek671": 671026404352,
    "qwen3-235b-a22b": 235093634560,
}


def model(**typed: Any) -> ModelConfig:
    return configure({"world_size": 8, "tensor_model_parallel_size": 1, **typed}).job.model


def test_every_preset_has_a_count() -> None:
    assert set(PARAMETERS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_to_the_last_digit(name: str) -> None:
    assert whole_model_parameters(make_model(PRESETS[name].fields, {})) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "tp"),
    [("7", 4), ("13", 8), ("22", 8), ("175", 8), ("405", 8), ("llama3-8b", 8), ("moe", 4), ("deepseek671", 1)],
)
def test_default_tensor_parallelism(name: str, tp: int) -> None:
    job = configure({"model_size": name, "enable_sequence_parallel": True}).job
    assert job.tp == tp
    assert job.parallel.world_size == 32
    assert (job.training.global_batch, job.training.micro_batch, job.training.seq_length) == (1024, 1, 4096)


def test_without_m_it_is_the_13b_preset() -> None:
    assert configure({}).job.model.name == "gpt_13B"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_layers", 12),
        ("hidden_size", 2048),
        ("ffn_hidden_size", 1111),
        ("num_attention_heads", 16),
        ("num_query_groups", 2),
        ("kv_channels", 256),
        ("vocab_size", 32000),
        ("make_vocab_size_divisible_by", 64),
        ("max_position_embeddings", 9999),
        ("position_embedding_type", "none"),
        ("normalization", "LayerNorm"),
        ("swiglu", False),
        ("squared_relu", True),
        ("add_bias_linear", True),
        ("add_qkv_bias", True),
        ("qk_layernorm", True),
        ("untie_embeddings_and_output_weights", False),
    ],
)
def test_what_is_typed_wins_over_the_preset(option: str, value: object) -> None:
    assert getattr(model(model_size="llama3-8b", **{option: value}), option) == value


def test_typed_expert_and_latent_sizes_win() -> None:
    typed = {"num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 512, "n_dense_layers": 2}
    found = model(model_size="deepseek16", **typed, n_shared_expert=3, kv_lora_rank=256, v_head_dim=64)
    assert (found.num_experts, found.moe_router_topk, found.moe_ffn_hidden_size) == (32, 4, 512)
    assert found.moe_shared_expert_intermediate_size == 3 * 512
    assert found.moe_layer_freq == (0, 0) + (1,) * 25
    assert (found.kv_lora_rank, found.v_head_dim) == (256, 64)


def test_swiglu_on_a_gpt_preset_takes_two_thirds_of_the_width() -> None:
    assert model(model_size="7", swiglu=True).ffn_hidden_size == 10880  # int(4 x 4096 x 2/3 / 64) x 64
    assert model(model_size="7", swiglu=True, ffn_hidden_size=16384).ffn_hidden_size == 16384
    assert model(model_size="7").ffn_hidden_size == 16384


def test_squared_relu_replaces_a_presets_swiglu() -> None:
    assert not model(model_size="llama3-8b", squared_relu=True).swiglu


def test_architecture_flags_alone_suffice() -> None:
    found = model(num_layers=2, hidden_size=64, num_attention_heads=4)
    assert (found.name, found.num_query_groups, found.kv_channels, found.ffn_hidden_size) == ("custom", 4, 16, 256)


def test_learned_positions_grow_with_the_sequence_and_say_so() -> None:
    configured = configure({"model_size": "7", "seq_length": 8192})
    assert configured.job.model.max_position_embeddings == 8192
    assert any("8192" in note for note in configured.notes)
    assert configure({"model_size": "7", "seq_length": 2048}).job.model.max_position_embeddings == 4096


def test_a_changed_preset_is_not_taken_for_the_original() -> None:
    notes = configure({"model_size": "7", "num_layers": 4}).notes
    assert notes == ("gpt_7B with num_layers 4",)


@pytest.mark.parametrize(
    ("freq", "layers", "pattern"),
    [
        ("1", 4, (1, 1, 1, 1)),
        ("2", 5, (1, 0, 1, 0, 1)),  # Megatron-LM: every layer whose index is a multiple of N
        ("[0,1,1,0]", 4, (0, 1, 1, 0)),
        ("0,1,1,0", 4, (0, 1, 1, 0)),
        ("([0]*1+[1]*3)", 4, (0, 1, 1, 1)),
    ],
)
def test_moe_layer_freq(freq: str, layers: int, pattern: tuple[int, ...]) -> None:
    assert model(model_size="moe", num_layers=layers, moe_layer_freq=freq).moe_layer_freq == pattern


@pytest.mark.parametrize("freq", ["", "x", "[0,2]", "[]", "0", "[0,1]*", "[1]*999999", "[0]*4", "[1,1]", "-1"])
def test_bad_moe_layer_freq(freq: str) -> None:
    with pytest.raises(UserError, match="moe_layer_freq"):
        model(model_size="moe", num_layers=4, moe_layer_freq=freq)
