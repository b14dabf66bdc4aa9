"""Protects `-m config.json`: published models are read to the last parameter, and nothing is dropped in silence.

tests/data/huggingface holds configurations with the values that their vendors published.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aicb.config.model import ModelConfig, make_model
from aicb.config.parameters import whole_model_parameters
from aicb.config.presets import preset
from aicb.errors import UserError
from aicb.models.load import load

CONFIGS = Path(__file__).resolve().parent / "data" / "huggingface"
LLAMA_STYLE = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
ABSENT = object()

# Parameters of the published checkpoints, as their safetensors headers sum up. DeepSeek-V3 without MTP and router bias;
# Qwen1.5-MoE is 14315784192 with the gates of its shared experts, 2048 in each of 24 layers.
PUBLISHED = {
    "llama-2-7b": 6738415616,
    "llama-3-8b": 8030261248,
    "llama-3.1-70b": 70553706496,
    "mistral-7b-v0.1": 7241732096,
    "mixtral-8x7b-v0.1": 46702792704,
    "qwen2-7b": 7615616512,
    "qwen2.5-0.5b": 494032768,
    "qwen1.5-moe-a2.7b": 14315784192 - 24 * 2048,
    "qwen3-8b": 8190735360,
    "qwen3-235b-a22b": 235093634560,
    "deepseek-v2-lite": 15706484224,
    "deepseek-v2": 235741434880,
    "deepseek-v3": 671026404352,
    "gpt2": 124439808,
    "pythia-6.9b": 6857302016,
    "gpt-neox-20b": 20554567680,
    "gemma-2b": 2506172416,
    "gemma-7b": 8537680896,
}
SLIDING = "sliding_window 4096: generated with full causal attention, which is more work"
ROTARY = "rotary_pct 0.25: generated with rotary positions on the whole head"
PARALLEL = "use_parallel_residual true: generated as attention, then MLP, as Megatron-LM runs it"
WARNINGS = {
    "mistral-7b-v0.1": [SLIDING],
    "qwen1.5-moe-a2.7b": ["shared_expert_intermediate_size 5632: the gate of the shared expert is left out"],
    "deepseek-v2": ["topk_group 3: generated without limiting a token's experts to 3 of 8 groups"],
    "deepseek-v3": [
        "topk_group 4: generated without limiting a token's experts to 4 of 8 groups",
        'topk_method "noaux_tc": the router\'s bias (256 numbers a layer) is not counted',
        "quantization_config (an object): the workload computes in --dtype",
        "num_nextn_predict_layers 1: multi-token prediction is left out",
    ],
    "pythia-6.9b": [ROTARY, PARALLEL],
    "gpt-neox-20b": [ROTARY, PARALLEL],
    "gemma-2b": ['hidden_act "gelu": timed as gated SiLU'],
    "gemma-7b": ['hidden_act "gelu_pytorch_tanh": timed as gated SiLU'],
}


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A published configuration with some keys changed; ABSENT takes a key out."""
    values = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value is not ABSENT}


def read(values: dict[str, Any], folder: Path) -> tuple[ModelConfig, list[str]]:
    """The model, and the warnings without the file's name."""
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    base, warnings = load(str(path))
    assert all(warning.isprintable() and warning.startswith(f"{path}: ") for warning in warnings)
    return make_model(base, {}), [warning.removeprefix(f"{path}: ") for warning in warnings]


def refusal(values: dict[str, Any], folder: Path) -> str:
    with pytest.raises(UserError) as error:
        read(values, folder)
    message = str(error.value)
    assert message.isprintable()
    assert message.startswith(f"{folder / 'config.json'}: ")
    return message


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_parameters(name: str, tmp_path: Path) -> None:
    model, warnings = read(config(name), tmp_path)
    assert whole_model_parameters(model) == PUBLISHED[name]
    expected = WARNINGS.get(name, [])
    assert len(warnings) == len(expected)
    for warning, start in zip(warnings, expected, strict=True):
        assert warning.startswith(start)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("llama-2-7b", "llama2-7b"),
        ("llama-3-8b", "llama3-8b"),
        ("llama-3.1-70b", "llama3-70b"),
        ("mixtral-8x7b-v0.1", "moe"),
        ("qwen3-235b-a22b", "qwen3-235b-a22b"),
        ("deepseek-v2-lite", "deepseek16"),
        ("deepseek-v2", "deepseek236"),
        ("deepseek-v3", "deepseek671"),
    ],
)
def test_a_published_config_gives_the_model_of_the_preset(name: str, same: str, tmp_path: Path) -> None:
    base, _ = load(str(CONFIGS / f"{name}.json"))
    other = {"name": "x", "max_position_embeddings": 1}  # of no effect with rotary positions
    assert make_model(base, other) == make_model(preset(same).fields, other)
    assert read(config(name), tmp_path)[0].max_position_embeddings == config(name)["max_position_embeddings"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "mistral-7b-v0.1",
            {**LLAMA_STYLE, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
             "kv_channels": 128, "ffn_hidden_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
             "untie_embeddings_and_output_weights": True},
        ),
        (
            "qwen2.5-0.5b",
            {**LLAMA_STYLE, "num_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_query_groups": 2,
             "kv_channels": 64, "ffn_hidden_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
             "add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
        ),
        (
            "qwen3-8b",
            {**LLAMA_STYLE, "num_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
             "kv_channels": 128, "ffn_hidden_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
             "qk_layernorm": True, "untie_embeddings_and_output_weights": True},
        ),
        (
            "qwen1.5-moe-a2.7b",
            {**LLAMA_STYLE, "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 16,
             "kv_channels": 128, "ffn_hidden_size": 5632, "vocab_size": 151936, "max_position_embeddings": 8192,
             "add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "num_experts": 60,
             "moe_router_topk": 4, "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 5632,
             "moe_layer_freq": (1,) * 24},
        ),
        (
            "gemma-7b",
            {**LLAMA_STYLE, "num_layers": 28, "hidden_size": 3072, "num_attention_heads": 16, "num_query_groups": 16,
             "kv_channels": 256, "ffn_hidden_size": 24576, "vocab_size": 256000, "max_position_embeddings": 8192,
             "untie_embeddings_and_output_weights": False},
        ),
        (
            "gpt2",
            {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "num_query_groups": 12,
             "kv_channels": 64, "ffn_hidden_size": 3072, "vocab_size": 50257, "max_position_embeddings": 1024,
             "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False,
             "add_bias_linear": True, "untie_embeddings_and_output_weights": False},
        ),
        (
            "pythia-6.9b",
            {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 32,
             "kv_channels": 128, "ffn_hidden_size": 16384, "vocab_size": 50432, "max_position_embeddings": 2048,
             "position_embedding_type": "rope", "normalization": "LayerNorm", "swiglu": False,
             "add_bias_linear": True, "untie_embeddings_and_output_weights": True},
        ),
    ],
)  # fmt: skip
def test_every_field_of_families_without_a_preset(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert read(config(name), tmp_path)[0] == ModelConfig(name=tmp_path.name, **expected)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # What transformers takes for an absent key, and for null.
        ("llama-3-8b", {"num_key_value_heads": ABSENT}, {"num_query_groups": 32}),
        ("llama-3-8b", {"num_key_value_heads": None, "head_dim": None}, {"num_query_groups": 32, "kv_channels": 128}),
        ("llama-3-8b", {"tie_word_embeddings": ABSENT}, {"untie_embeddings_and_output_weights": True}),
        ("llama-3-8b", {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
        ("llama-3-8b", {"head_dim": 64}, {"kv_channels": 64}),
        ("llama-3-8b", {"hidden_act": ABSENT}, {"swiglu": True}),
        ("llama-3-8b", {"hidden_act": "swish"}, {"swiglu": True}),
        (
            "llama-3-8b",
            {"attention_bias": True, "mlp_bias": True},
            {"add_bias_linear": True, "normalization": "RMSNorm"},
        ),
        ("llama-3-8b", {"architectures": ABSENT}, {"num_layers": 32}),
        ("llama-2-7b", {"architectures": ["LLaMAForCausalLM"]}, {"num_layers": 32}),
        ("llama-3-8b", {"max_position_embeddings": ABSENT}, {"num_layers": 32}),
        ("mistral-7b-v0.1", {"sliding_window": None, "num_key_value_heads": ABSENT}, {"num_query_groups": 8}),
        ("mistral-7b-v0.1", {"sliding_window": 32768}, {"num_layers": 32}),
        ("mixtral-8x7b-v0.1", {"sliding_window": ABSENT}, {"num_experts": 8, "moe_ffn_hidden_size": 14336}),
        ("qwen2-7b", {"layer_types": ["full_attention"] * 28}, {"num_layers": 28}),
        ("qwen3-8b", {"head_dim": ABSENT}, {"kv_channels": 128}),
        ("qwen3-8b", {"_attn_implementation": "eager"}, {"qk_layernorm": True}),
        (
            "qwen3-235b-a22b",
            {"decoder_sparse_step": 3, "num_hidden_layers": 7},
            {"moe_layer_freq": (0, 0, 1, 0, 0, 1, 0)},
        ),
        ("qwen3-235b-a22b", {"mlp_only_layers": [0, 2], "num_hidden_layers": 4}, {"moe_layer_freq": (0, 1, 0, 1)}),
        ("qwen3-235b-a22b", {"num_experts": 0}, {"num_experts": 0, "ffn_hidden_size": 12288, "moe_layer_freq": ()}),
        ("qwen1.5-moe-a2.7b", {"num_experts": 0}, {"num_experts": 0, "moe_shared_expert_intermediate_size": 0}),
        ("qwen1.5-moe-a2.7b", {"qkv_bias": False, "shared_expert_intermediate_size": 0}, {"add_qkv_bias": False}),
        ("deepseek-v2-lite", {"q_lora_rank": ABSENT}, {"q_lora_rank": 1536}),
        ("deepseek-v2-lite", {"n_shared_experts": None}, {"moe_shared_expert_intermediate_size": 0}),
        ("deepseek-v2-lite", {"n_routed_experts": None}, {"num_experts": 0, "ffn_hidden_size": 10944}),
        (
            "deepseek-v2-lite",
            {"moe_layer_freq": 2, "first_k_dense_replace": 3, "num_hidden_layers": 7},
            {"moe_layer_freq": (0, 0, 0, 0, 1, 0, 1)},
        ),
        ("gpt2", {"n_inner": 1000}, {"ffn_hidden_size": 1000}),
        ("gpt2", {"n_inner": None, "n_embd": 1200}, {"ffn_hidden_size": 4800}),
        ("gpt2", {"tie_word_embeddings": False}, {"untie_embeddings_and_output_weights": True}),
        ("gpt2", {"activation_function": "relu2"}, {"squared_relu": True, "swiglu": False}),
        ("gpt2", {"activation_function": ABSENT}, {"squared_relu": False, "swiglu": False}),
    ],
)
def test_a_variant_is_read_without_a_warning(
    name: str, changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    model, warnings = read(config(name, **changes), tmp_path)
    assert {field: getattr(model, field) for field in expected} == expected
    assert [warning for warning in warnings if not any(map(warning.startswith, WARNINGS.get(name, [])))] == []


@pytest.mark.parametrize(
    ("name", "changes", "start"),
    [
        ("mistral-7b-v0.1", {"sliding_window": ABSENT}, SLIDING),
        ("mixtral-8x7b-v0.1", {"sliding_window": 4096}, SLIDING),
        ("qwen2-7b", {"use_sliding_window": True}, "use_sliding_window true: generated with full causal attention"),
        ("qwen3-8b", {"use_sliding_window": True}, "use_sliding_window true: generated with full causal attention"),
        (
            "qwen2-7b",
            {"layer_types": ["full_attention", "sliding_attention"]},
            'layer_types (a list of 2): with "sliding_attention": generated with full causal attention',
        ),
        ("llama-3-8b", {"hidden_act": "relu2"}, 'hidden_act "relu2": timed as gated SiLU'),
        ("gpt2", {"activation_function": "relu"}, 'activation_function "relu": timed as GELU'),
        ("gpt2", {"activation_function": "silu"}, 'activation_function "silu": timed as GELU'),
        ("llama-3-8b", {"quantization_config": {"bits": 4}}, "quantization_config (an object): the workload computes"),
        ("llama-3-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: generated with rotary positions"),
        ("llama-3-8b", {"logit_scale": 0.1, "alibi": True}, "not understood, ignored: logit_scale, alibi"),
        ("llama-3-8b", {"a\nb": 1}, r"not understood, ignored: a\nb"),
        (
            "llama-3-8b",
            {"architectures": ["LlamaForSequenceClassification"]},
            'architectures (a list of 1): with "LlamaForSequenceClassification": generated as LlamaForCausalLM',
        ),
        ("llama-3-8b", {"model_type": "mine"}, 'model_type "mine": read as llama, going by architectures'),
        ("llama-3-8b", {"model_type": ABSENT}, "model_type null: read as llama, going by architectures"),
        ("deepseek-v2-lite", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1: multi-token prediction"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, 'topk_method "noaux_tc": the router\'s bias (64 numbers'),
    ],
)
def test_what_changes_the_work_and_is_not_generated_is_warned_of(
    name: str, changes: dict[str, Any], start: str, tmp_path: Path
) -> None:
    _, warnings = read(config(name, **changes), tmp_path)
    (warning,) = warnings
    assert warning.startswith(start)


def test_a_long_list_of_unknown_keys_is_cut(tmp_path: Path) -> None:
    _, warnings = read(config("gpt2", **{f"x{i}": i for i in range(25)}), tmp_path)
    assert warnings[0].endswith("x18, x19 and 5 more")


BY_FLAGS = "give the architecture by flags"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama-3-8b", {"attention_bias": True}, ["attention_bias true with mlp_bias false", BY_FLAGS]),
        ("llama-3-8b", {"mlp_bias": True}, ["attention_bias false with mlp_bias true", BY_FLAGS]),
        ("qwen3-8b", {"attention_bias": True}, ["attention_bias true: biases on the attention projections", BY_FLAGS]),
        ("qwen3-235b-a22b", {"attention_bias": True}, ["attention_bias true: biases on the attention", BY_FLAGS]),
        ("deepseek-v3", {"attention_bias": True}, ["attention_bias true: biases on the attention", BY_FLAGS]),
        ("deepseek-v2", {"mlp_bias": True}, ["mlp_bias true: biases on the MLP alone", BY_FLAGS]),
        ("gemma-7b", {"attention_bias": True}, ["attention_bias true: biases on the attention", BY_FLAGS]),
        ("pythia-6.9b", {"attention_bias": False}, ["attention_bias false: biases on the MLP alone", BY_FLAGS]),
        ("gemma-2-9b", {}, ['model_type "gemma2": four norms a layer', BY_FLAGS]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention true: only decoders", BY_FLAGS]),
        ("llama-3-8b", {"is_encoder_decoder": True}, ["is_encoder_decoder true: only decoders", BY_FLAGS]),
        ("llama-3-8b", {"pruned_heads": {"0": [1]}}, ["pruned_heads (an object): pruned heads", BY_FLAGS]),
        (
            "llama-3-8b",
            {"model_type": "lama", "architectures": ABSENT},
            [
                'model_type "lama" with architectures null: not known here (nearest: llama',
                "known are llama, ",
                BY_FLAGS,
            ],
        ),
        (
            "gpt2",
            {"model_type": ABSENT, "architectures": ["BertModel", 7]},
            ['model_type null with architectures "BertModel", 7: not known here', "gpt_neox", BY_FLAGS],
        ),
        ("gpt2", {"model_type": 3}, ["model_type 3 must be a text"]),
        ("gpt2", {"architectures": "GPT2LMHeadModel"}, ['architectures "GPT2LMHeadModel" must be a list of texts']),
        ("gpt2", {"_name_or_path": 3}, ["_name_or_path 3 must be a text"]),
        ("llama-3-8b", {"hidden_size": ABSENT}, ["hidden_size is missing", "add it"]),
        ("llama-3-8b", {"vocab_size": ABSENT}, ["vocab_size is missing"]),
        ("gpt2", {"n_positions": ABSENT}, ["n_positions is missing"]),
        ("mixtral-8x7b-v0.1", {"num_local_experts": ABSENT}, ["num_local_experts is missing"]),
        ("qwen3-235b-a22b", {"moe_intermediate_size": ABSENT}, ["moe_intermediate_size is missing"]),
        ("qwen1.5-moe-a2.7b", {"shared_expert_intermediate_size": ABSENT}, ["shared_expert_intermediate_size is miss"]),
        ("deepseek-v3", {"kv_lora_rank": ABSENT}, ["kv_lora_rank is missing"]),
        ("deepseek-v3", {"num_experts_per_tok": ABSENT}, ["num_experts_per_tok is missing"]),
        ("llama-3-8b", {"hidden_size": "4096"}, ['hidden_size "4096" must be a whole number from 1 to 2147483647']),
        ("llama-3-8b", {"hidden_size": 4096.0}, ["hidden_size 4096.0 must be a whole number"]),
        ("llama-3-8b", {"hidden_size": True}, ["hidden_size true must be a whole number"]),
        ("llama-3-8b", {"hidden_size": None}, ["hidden_size null must be a whole number"]),
        ("llama-3-8b", {"hidden_size": [4096]}, ["hidden_size (a list of 1) must be a whole number"]),
        ("llama-3-8b", {"hidden_size": -1}, ["hidden_size -1 must be a whole number from 1"]),
        ("llama-3-8b", {"hidden_size": 10**30}, ["hidden_size (a huge number) must be"]),
        ("llama-3-8b", {"num_hidden_layers": 10**6}, ["num_hidden_layers 1000000 must be a whole number from 1 to 10"]),
        ("llama-3-8b", {"num_key_value_heads": 0}, ["num_key_value_heads 0 must be a whole number from 1"]),
        ("llama-3-8b", {"tie_word_embeddings": 1}, ["tie_word_embeddings 1 must be true or false"]),
        ("llama-3-8b", {"mlp_bias": "no"}, ['mlp_bias "no" must be true or false']),
        ("llama-3-8b", {"hidden_act": 1}, ["hidden_act 1 must be a text"]),
        ("llama-3-8b", {"hidden_act": None}, ["hidden_act is missing: add it, such as silu"]),
        ("llama-3-8b", {"hidden_act": "snake"}, ['hidden_act "snake": no activation known here', BY_FLAGS]),
        ("gpt2", {"activation_function": "x" * 999}, ["xxx ...: no activation known here", BY_FLAGS]),
        ("llama-3-8b", {"layer_types": "full"}, ['layer_types "full" must be a list']),
        ("mistral-7b-v0.1", {"sliding_window": "4k"}, ['sliding_window "4k" must be a whole number']),
        ("qwen3-235b-a22b", {"mlp_only_layers": ["0"]}, ["mlp_only_layers (a list of 1) must hold layer numbers"]),
        ("qwen3-235b-a22b", {"mlp_only_layers": 3}, ["mlp_only_layers 3 must be a list of layer numbers"]),
        ("llama-3-8b", {"num_key_value_heads": 5}, ["--num_attention_heads 32 must be a multiple of", "correct it"]),
        ("llama-3-8b", {"hidden_size": 4097}, ["--hidden_size 4097 must be a multiple of"]),
        ("mixtral-8x7b-v0.1", {"num_experts_per_tok": 9}, ["--moe_router_topk 9 must not exceed --num_experts 8"]),
        ("deepseek-v3", {"first_k_dense_replace": -1}, ["first_k_dense_replace -1 must be a whole number from 0"]),
    ],
)
def test_what_cannot_be_described_is_refused(
    name: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refusal(config(name, **changes), tmp_path)
    for word in words:
        assert word in message


# The model's name


@pytest.mark.parametrize(
    ("given", "file", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "x/config.json", "Llama-2-7b-hf"),
        ("/data/ckpt/my model/", "x/config.json", "my_model"),
        ("C:\\ckpt\\best", "x/config.json", "best"),
        ("", "Llama-3/config.json", "Llama-3"),
        (None, "Llama-3/config.json", "Llama-3"),
        ("..", "Llama-3/config.json", "Llama-3"),
        ("", "x/llama3.json", "llama3"),
        ("", "models--Qwen--Qwen2-7B/snapshots/0123abcd/config.json", "Qwen2-7B"),
        ("", "..../config.json", "gpt2"),
        ("a:b*c\n\u00e9", "x/config.json", "a_b_c__"),
        ("n" * 300, "x/config.json", "n" * 64),
    ],
)
def test_the_name_is_safe_in_a_file_name(given: str | None, file: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config("gpt2", _name_or_path=given)))
    assert load(str(path))[0]["name"] == name


# Whatever the file holds

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([0, 1, 2, 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A published config with a few keys gone or holding anything."""
    values = config(draw(st.sampled_from(sorted(path.stem for path in CONFIGS.glob("*.json")))))
    for key in draw(st.lists(st.sampled_from(sorted(values)), max_size=4)):
        values.pop(key, None)
        if draw(st.booleans()):
            values[key] = draw(VALUES)
    return values | draw(st.dictionaries(st.text(max_size=5), VALUES, max_size=2))


@given(mutated() | st.dictionaries(st.sampled_from(["model_type", "architectures", "n_embd"]) | st.text(), VALUES))
def test_any_object_loads_or_is_refused(values: dict[str, Any]) -> None:
    """Nothing but UserError comes out, what loads is a model, and every message is one printable line."""
    with tempfile.TemporaryDirectory() as folder:
        message = ""
        try:
            read(values, Path(folder))
        except UserError as error:
            message = str(error)
        assert message.isprintable()
