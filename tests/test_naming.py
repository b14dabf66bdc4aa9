"""File names: two different workloads never share the name that the simulator gives its result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aicb.config.configure import MODEL_OPTIONS, configure
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig
from aicb.errors import UserError
from aicb.generate import prepare
from aicb.naming import profile_name
from aicb.options import MEASURING, OPTIONS
from aicb.times.profile import read_profile
from aicb.workload import simai

EXAMPLE = read_profile(Path(__file__).parent.parent / "workload" / "aiob_inputs" / "Example.txt")


class File(NamedTuple):
    name: str
    content: str
    """A digest of it."""


def files(typed: Mapping[str, Any]) -> list[File]:
    """What a command would write."""
    profile = EXAMPLE if "comp_filepath" in typed else None
    found = []
    for one in prepare(configure(typed), typed, profile):
        _, header, iteration, repeat = one.content
        digest = hashlib.sha256()
        for chunk in simai.text(header, iteration, repeat):
            digest.update(chunk)
        found.append(File(one.path.name, digest.hexdigest()))
    return found


def result_name(name: str) -> tuple[str, ...]:
    """What the simulator calls its result: text before world_size, then numbers read anywhere, the last one wins."""
    last = {key: re.findall(rf"{key}(\d+)", name)[-1] for key in ("world_size", "tp", "pp", "ep", "gbs", "mbs")}
    number = {key: int(value) for key, value in last.items()}
    dp = number["world_size"] // (number["tp"] * number["pp"])
    ga = number["gbs"] // (dp * number["mbs"])
    return name[: name.index("world_size")], last["tp"], last["pp"], str(dp), str(ga), last["ep"]


# Values that work with most others: every option that says something about the file, once or twice.
VALUES: dict[str, list[Any]] = {
    "model_size": ["7", "13", "moe", "deepseek16"],
    "model_name": ["gpt_7B", "x-seq2048", "x-sp", "world_size8"],
    "gpu_type": ["H100", "A-x"],
    "world_size": [32, 64],
    "tensor_model_parallel_size": [1, 2],
    "pipeline_model_parallel": [2, 4],
    "expert_model_parallel_size": [2],
    "enable_sequence_parallel": [True],
    "num_layers_per_virtual_pipeline_stage": [2],
    "decoder_first_pipeline_num_layers": [4, 6],
    "decoder_last_pipeline_num_layers": [4, 6],
    "global_batch": [256, 512],
    "micro_batch": [2, 4],
    "seq_length": [1024, 2048],
    "epoch_num": [2, 3],
    "dtype": ["float16", "float32"],
    "use_distributed_optimizer": [False],
    "use_flash_attn": [False],
    "recompute_granularity": ["selective", "full"],
    "recompute_activations": [True],
    "moe_load_imbalance": [1.25, 1.5],
    "num_layers": [12, 24],
    "hidden_size": [2048, 4096],
    "ffn_hidden_size": [8192, 16384],
    "num_attention_heads": [16, 32],
    "num_query_groups": [8, 16],
    "kv_channels": [64, 128],
    "vocab_size": [32000, 50257],
    "make_vocab_size_divisible_by": [64],
    "max_position_embeddings": [4096, 8192],
    "position_embedding_type": ["rope", "none"],
    "rotary_percent": [0.5],
    "normalization": ["RMSNorm"],
    "swiglu": [True],
    "squared_relu": [True],
    "add_bias_linear": [False],
    "add_qkv_bias": [True],
    "qk_layernorm": [True],
    "untie_embeddings_and_output_weights": [True, False],
    "hidden_dropout": [0.0, 0.1],
    "attention_dropout": [0.0, 0.2],
    "attention_backend": ["unfused", "fa2"],
    "moe_enable": [True],
    "num_experts": [8, 16],
    "moe_router_topk": [1, 4],
    "moe_aux_loss_coeff": [0.0, 0.01],
    "moe_router_dtype": ["fp32", "fp64"],
    "moe_router_enable_expert_bias": [True],
    "group_query_attention": [True],
    "moe_grouped_gemm": [True],
    "moe_ffn_hidden_size": [1024],
    "moe_shared_expert_intermediate_size": [2048],
    "n_shared_expert": [1],
    "moe_layer_freq": ["2"],
    "n_dense_layers": [1, 2],
    "moe_router_load_balancing_type": ["none"],
    "multi_latent_attention": [True],
    "q_lora_rank": [0, 512],
    "kv_lora_rank": [256],
    "qk_nope_dim": [64],
    "qk_rope_dim": [32],
    "v_head_dim": [64],
    "comp_filepath": ["Example.txt"],
    "fixed_compute_ns": [1, 7],
    "pp_rank": ["1", "all", "slowest"],
    "min_comm_bytes": [100_000, 1_000_000],
    "micro_batches_written": [1, 3],
    "short": [True],
}
# What changes no file, or is the same to it as another option.
SILENT = {"frame", "context_parallel_size", "aiob_enable", "allow_profile_mismatch", "result_dir"}
SILENT |= {"args_file", "expert_tensor_parallel_size"}
SILENT |= {"force", "json", "quiet", "fusion", "gradient_accumulation_fusion"}

ESSENTIAL = {"num_layers": 12, "hidden_size": 2048, "num_attention_heads": 16}
commands = st.one_of(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}),
    *(
        st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(0, 3), max_size=6).map(
            lambda drawn, base=base: {  # type: ignore[misc]
                **base,
                **{name: VALUES[name][index % len(VALUES[name])] for name, index in drawn.items()},
            }
        )
        for base in ({}, {"model_size": "moe", "enable_sequence_parallel": True}, ESSENTIAL)
    ),
)


def test_every_option_is_tried_or_known_to_be_silent() -> None:
    """An option that is added must say here whether it sets files apart."""
    measuring = {option.name for option in OPTIONS if option.group == MEASURING}
    assert {option.name for option in OPTIONS} == VALUES.keys() | SILENT | measuring
    assert VALUES.keys() >= MODEL_OPTIONS
    assert set(TrainingConfig.__slots__) | set(ParallelConfig.__slots__) <= VALUES.keys() | SILENT


@settings(max_examples=400)
@given(one=commands, change=st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(0, 3), max_size=3))
def test_two_commands_never_share_a_result_with_different_files(one: dict[str, Any], change: dict[str, int]) -> None:
    other = {**one, **{name: VALUES[name][index % len(VALUES[name])] for name, index in change.items()}}
    with suppress(UserError):  # no such workload
        written = files(one) + files(other)
        for a in written:
            for b in written:
                if a.content != b.content and result_name(a.name) == result_name(b.name):
                    assert a.name == b.name  # which writing refuses
                assert len(f"{a.name.removesuffix('.txt')}-EndToEnd.csv") < 256


@pytest.mark.parametrize("name", sorted(VALUES))
def test_each_option_alone(name: str) -> None:
    """Every value of an option beside a model that takes it: files that differ have results that differ."""
    bases: list[dict[str, Any]] = [{"model_size": "7"}, {"model_size": "moe", "tensor_model_parallel_size": 1}]
    bases += [{"model_size": "deepseek16"}, {"model_size": "7", "pipeline_model_parallel": 2}, ESSENTIAL]
    bases += [{"model_size": "moe", "tensor_model_parallel_size": 1, "expert_model_parallel_size": 4}]
    tried = 0
    for base in bases:
        found = files(base)
        for value in VALUES[name]:
            with suppress(UserError):
                found += files({**base, name: value})
                tried += 1
        for a in found:
            for b in found:
                if a.content != b.content and result_name(a.name) == result_name(b.name):
                    assert a.name == b.name
    assert tried


@pytest.mark.parametrize(
    ("typed", "start"),
    [
        ({"pp_rank": "1"}, "gpt_7B-pp_rank1-"),
        ({"enable_sequence_parallel": True}, "gpt_7B-sp-"),
        ({"recompute_granularity": "full"}, "gpt_7B-recompute_full-"),
        ({"dtype": "float16"}, "gpt_7B-float16-"),
        ({"epoch_num": 2}, "gpt_7B-iter2-"),
        ({"use_distributed_optimizer": False}, "gpt_7B-no_distributed_optimizer-"),
        ({"num_layers": 24, "hidden_size": 4096}, "gpt_7B-num_layers24-"),  # its hidden size is 4096
        ({"swiglu": True}, "gpt_7B-"),
        ({"gpu_type": "H100", "seq_length": 2048}, "H100-gpt_7B-seq2048-"),
        ({"model_name": "my-world_size"}, "my-world-size-"),
        ({"min_comm_bytes": 4096}, "gpt_7B-min_comm_bytes4096-"),
    ],
)
def test_what_is_not_the_default_stands_before_world_size(typed: dict[str, Any], start: str) -> None:
    plain = {"model_size": "7", "pipeline_model_parallel": 4, "world_size": 64, "comp_filepath": "Example.txt"}
    (file,) = files({**plain, **typed})
    assert file.name.startswith(f"{start}world_size64-tp4-pp4-ep1-gbs1024-mbs1-seq")


def test_a_long_list_of_marks_is_a_digest() -> None:
    typed = {**ESSENTIAL, "num_query_groups": 4, "normalization": "RMSNorm", "position_embedding_type": "rope"}
    (file,) = files({**typed, "add_bias_linear": False, "tensor_model_parallel_size": 4})
    assert re.match(r"custom-model[0-9a-f]{8}-fixed_compute-world_size32-tp4-", file.name)
    (other,) = files({**typed, "add_bias_linear": True, "tensor_model_parallel_size": 4})
    assert other.name.split("-")[1] != file.name.split("-")[1]


def test_a_files_experts_are_told_from_a_dense_model_of_its_name(tmp_path: Path) -> None:
    """MOE-True stands at the end of the name, where the simulator does not look."""
    sizes = "num_layers = 4\nhidden_size = 512\nnum_attention_heads = 8\n"
    for folder, more in (("a", ""), ("b", "num_experts = 8\nmoe_ffn_hidden_size = 512\nmoe_grouped_gemm = true\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(sizes + more)
    names = [
        files({"model_size": str(tmp_path / folder / "mine.toml"), "tensor_model_parallel_size": 1})[0].name
        for folder in "ab"
    ]
    assert names[0].startswith("mine-fixed_compute-world_size")
    assert names[1].startswith("mine-with_experts-moe_grouped_gemm-fixed_compute-world_size")


def test_profiles_of_two_models_have_two_names() -> None:
    from aicb.naming import model_marks

    def name(**typed: Any) -> str:
        configured = configure({**ESSENTIAL, "tensor_model_parallel_size": 1, **typed})
        return profile_name(configured.job, model_marks(configured), "H100")

    assert name() != name(num_layers=6)
    assert name().startswith("H100-custom-num_layers12-hidden_size2048-num_attention_heads16-tp1-")
    assert name(model_name="mine") == "H100-mine-tp1-ep1-mbs1-seq4096-bfloat16-flash_attn-True.txt"
