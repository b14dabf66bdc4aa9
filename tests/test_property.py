"""Over the option space: every file the generator can write passes `aicb check`; what it refuses, it says in a line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from aicb.config.configure import configure
from aicb.config.job import Job
from aicb.errors import UserError
from aicb.step.kernels import kernel_table, slice_of
from aicb.times.compute import ComputeTimes, fixed_times, profile_times
from aicb.times.profile import KernelTime, Profile
from aicb.workload.reading import check, totals
from aicb.workload.rows import Iteration, build
from aicb.workload.simai import header, text


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options that mostly make sense together: sizes are multiples of the split; a rule is broken only now and then."""
    tp, pp, ep = (draw(st.sampled_from(sizes)) for sizes in ((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4)))
    dp = ep * draw(st.sampled_from([1, 2, 3]))
    micro, ga, layers = draw(st.integers(1, 3)), draw(st.integers(1, 5)), pp * draw(st.integers(1, 3))
    heads = tp * draw(st.integers(1, 4))
    typed: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 8 * heads * draw(st.sampled_from([1, 3])),
        "num_attention_heads": heads,
        "ffn_hidden_size": tp * draw(st.integers(1, 600)),
        "vocab_size": draw(st.integers(1, 3000)),
        "make_vocab_size_divisible_by": draw(st.sampled_from([1, 128])),
        "seq_length": tp * draw(st.integers(1, 400)),
        "micro_batch": micro,
        "global_batch": micro * dp * ga,
        "world_size": tp * pp * dp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel": pp,
        "epoch_num": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "recompute_granularity": draw(st.sampled_from(["none", "selective", "full"])),
        "position_embedding_type": draw(st.sampled_from(["rope", "learned_absolute", "none"])),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
    }
    switches = ["qk_layernorm", "untie_embeddings_and_output_weights", "use_distributed_optimizer"]
    typed |= {name: draw(st.booleans()) for name in switches}
    typed |= draw(st.sampled_from([{}, {"swiglu": True}, {"squared_relu": True}]))
    typed |= draw(st.sampled_from([{}, {"add_bias_linear": False}, {"add_bias_linear": False, "add_qkv_bias": True}]))
    typed["enable_sequence_parallel"] = draw(st.booleans())
    if typed["dtype"] != "float32":
        typed["use_flash_attn"] = draw(st.booleans())
    if draw(st.booleans()):
        typed |= {"num_query_groups": tp, "kv_channels": 2 * draw(st.integers(1, 9))}
    if pp > 1 and draw(st.booleans()):
        first, last, middle = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        typed |= {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
        typed["num_layers"] = first + last + middle * (pp - 2)
    elif layers // pp == 2:
        typed["num_layers_per_virtual_pipeline_stage"] = 2
    if draw(st.booleans()):
        typed |= _experts(draw, tp, ep)
    elif draw(st.integers(0, 19)) == 0:
        typed["expert_model_parallel_size"] = ep
    if draw(st.integers(0, 2)) == 0:
        typed |= _latent(draw)
        for name in ("num_query_groups", "kv_channels", "add_qkv_bias"):
            typed.pop(name, None)
    return typed


def _experts(draw: st.DrawFn, tp: int, ep: int) -> dict[str, Any]:
    experts = ep * draw(st.integers(1, 4))
    found: dict[str, Any] = {
        "expert_model_parallel_size": ep,
        "num_experts": experts,
        "moe_router_topk": draw(st.integers(1, experts)),
        "moe_ffn_hidden_size": tp * draw(st.integers(1, 100)),
        "moe_router_load_balancing_type": draw(st.sampled_from(["aux_loss", "none"])),
        "moe_grouped_gemm": draw(st.booleans()),
        "moe_load_imbalance": draw(st.sampled_from([1.0, 1.25])) if ep > 1 else 1.0,
        "enable_sequence_parallel": draw(st.integers(0, 19)) > 0,
    }
    width = {"moe_shared_expert_intermediate_size": tp * 7}
    found |= draw(st.sampled_from([{}, {"n_shared_expert": 2}, width]))
    found |= draw(st.sampled_from([{}, {"moe_layer_freq": "2"}, {"n_dense_layers": 0}]))
    return found


def _latent(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "enable_sequence_parallel": True,
        "q_lora_rank": draw(st.sampled_from([0, 24])),
        "kv_lora_rank": draw(st.integers(1, 64)),
        "qk_nope_dim": draw(st.integers(1, 32)),
        "qk_rope_dim": 2 * draw(st.integers(1, 8)),
        "v_head_dim": draw(st.integers(1, 32)),
    }


def _configured(typed: dict[str, Any]) -> tuple[Job | None, str]:
    try:
        return configure(typed).job, ""
    except UserError as error:
        return None, str(error)


def _times(job: Job, us: float | None) -> ComputeTimes:
    """Placeholders, or a profile in which every kernel takes `us`."""
    if us is None:
        return fixed_times(job, 1)
    sections = {kernel.name: KernelTime(us) for kernel in kernel_table(job)}
    return profile_times(job, Profile("profile.txt", 1, slice_of(job), sections))


def _written(job: Job, folder: Path, minimum: int, us: float | None) -> tuple[Path, Iteration]:
    iteration, repeat = build(job, _times(job, us), minimum), job.training.epoch_num
    path = folder / f"{job.pp_rank}.txt"
    path.write_bytes(b"".join(text(header(job, repeat), iteration, repeat)))
    return path, iteration


@settings(max_examples=300, deadline=None)
@given(typed=options(), minimum=st.sampled_from([0, 0, 100, 10**6]), us=st.sampled_from([None, 0.5, 123.456]))
def test_every_file_that_can_be_written_passes_check(typed: dict[str, Any], minimum: int, us: float | None) -> None:
    job, refusal = _configured(typed)
    if job is None:
        event("refused")
        assert "--" in refusal
        assert "\n" not in refusal
        return
    event("written")
    event(f"experts {job.model.num_experts > 0}, latent {job.model.multi_latent_attention}, tp > 1 {job.tp > 1}")
    with tempfile.TemporaryDirectory() as name:
        held, layers = 0, 0
        for stage in (job.at(rank) for rank in range(job.pp)):
            path, iteration = _written(stage, Path(name), minimum, us)
            assert list(check(path)) == []
            read = totals(path)
            assert read.rows == iteration.rows * job.training.epoch_num
            assert (read.row_counts["embedding_layer"] > 0) == stage.is_first
            assert (read.row_counts["final_layer"] + read.row_counts["final_column"] > 0) == stage.is_last
            assert all(size >= minimum for size in _sizes(iteration))
            held += stage.parameters().dense
            layers += len(stage.layers)
        assert layers == job.model.num_layers
        assert held > 0


def _sizes(iteration: Iteration) -> list[int]:
    return [sent.bytes for (_, sent) in iteration.collectives()]
