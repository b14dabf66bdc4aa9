"""Compute times: every measured microsecond lands once, in the column and row it belongs to, and none is invented."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aicb.config.configure import configure
from aicb.config.job import Job
from aicb.errors import UserError
from aicb.step.kernels import STEP_END, kernel_table, slice_of
from aicb.times.compute import ComputeTimes, fixed_times, profile_times, unused_on_stage
from aicb.times.profile import KernelTime, Profile, parse_profile, read_profile
from aicb.workload.rows import build
from aicb.workload.simai import header, text

EXAMPLE = Path(__file__).resolve().parent.parent / "workload" / "aiob_inputs" / "Example.txt"
Columns = tuple[int, int, int]  # ns of fwd, ig, wg


def written(job: Job, times: ComputeTimes) -> list[list[str]]:
    """Fields of every row of the file, as anyone who reads it would split them."""
    whole = b"".join(text(header(job, job.training.epoch_num), build(job, times), job.training.epoch_num)).decode()
    return [line.split() for line in whole.splitlines()[2:]]


def columns(row: list[str]) -> Columns:
    return int(row[2]), int(row[5]), int(row[8])


def rows_of(job: Job, times: ComputeTimes) -> dict[str, Columns]:
    """Times by row name; rows of one name must agree."""
    found: dict[str, Columns] = {}
    for row in written(job, times):
        assert found.setdefault(row[0], columns(row)) == columns(row), row[0]
    return found


def total(job: Job, times: ComputeTimes) -> Columns:
    every = [columns(row) for row in written(job, times)]
    return sum(row[0] for row in every), sum(row[1] for row in every), sum(row[2] for row in every)


# --- the sample profile of the first generation ---


def gpt_7b(**typed: Any) -> Job:
    """`-m 7 --tp 2` as its users run it: 2048 data-parallel ranks, 4 micro-batches of 36 layers."""
    split = {"world_size": 4096, "tensor_model_parallel_size": 2, "global_batch": 8192}
    return configure({"model_size": "7", **split, **typed}).job


def example(job: Job) -> ComputeTimes:
    return profile_times(job, read_profile(EXAMPLE))


def test_the_sample_profile_without_sequence_parallelism() -> None:
    """Averages in us: layernorm 70, atten_qkv 889, atten_flash 512, atten_linear 349, layernorm2 71, mlp_linear_1 1408,
    mlp_gelu 257, mlp_linear_2 742, Emb 799, layernorm_post 70, logit_time 12824, param_time 17374.
    """  # noqa: D205 - the values are the summary
    assert rows_of(gpt_7b(), example(gpt_7b())) == {
        "grad_gather": (0, 0, 0),
        "grad_param_comm": (0, 0, 0),
        "grad_param_compute": (0, 17374000, 0),
        "embedding_layer": (799000, 0, 799000),
        # 70 + 889 + 512 + 349 | 2 x 70 + 889 + 2 x 512 + 349 | 889 + 349
        "attention_layer": (1820000, 2402000, 1238000),
        # 71 + 1408 + 257 + 742 | 2 x 71 + 1408 + 2 x 257 + 742 | 1408 + 742
        "mlp_layer": (2478000, 2806000, 2150000),
        # 70 + 12824 | 2 x 70 + 12824 | 12824
        "final_layer": (12894000, 12964000, 12824000),
        "cross_entropy1": (0, 0, 0),
        "cross_entropy2": (0, 0, 0),
        "cross_entropy3": (0, 0, 0),
        "optimizer1": (0, 0, 0),
        "optimizer2": (0, 0, 0),
        "optimizer3": (0, 0, 0),
    }


def test_no_time_is_invented_and_none_used_twice() -> None:
    """The whole iteration in us: 4 micro-batches of embedding, 36 layers and head, and the optimizer once.

    fwd: 4 x (799 + 36 x (1820 + 2478) + 12894) = 4 x 168421.
    ig: 4 x (36 x (2402 + 2806) + 12964) + 17374 = 4 x 200452 + 17374.
    wg: 4 x (799 + 36 x (1238 + 2150) + 12824) = 4 x 135591.
    """
    job = gpt_7b()
    assert total(job, example(job)) == (673684000, 819182000, 542364000)


def test_the_optimizer_runs_once_an_iteration() -> None:
    """Three iterations of 4 micro-batches: three optimizer steps."""
    job = gpt_7b(epoch_num=3)
    steps = [columns(row) for row in written(job, example(job)) if row[0] == "grad_param_compute"]
    assert steps == [(0, 17374000, 0)] * 3


def test_sequence_parallelism_splits_the_same_times_over_two_rows() -> None:
    job = gpt_7b(enable_sequence_parallel=True)
    rows = rows_of(job, example(job))
    assert rows["attention_column"] == (959000, 1029000, 889000)  # 70 + 889 | 140 + 889 | 889
    assert rows["attention_row"] == (861000, 1373000, 349000)  # 512 + 349 | 1024 + 349 | 349
    assert rows["mlp_column"] == (1479000, 1550000, 1408000)  # 71 + 1408 | 142 + 1408 | 1408
    assert rows["mlp_row"] == (999000, 1256000, 742000)  # 257 + 742 | 514 + 742 | 742
    assert rows["final_column"] == (12894000, 12964000, 12824000)
    for name in ("attention_column_regather", "mlp_column_regather", "final_column_regather", "layernorm"):
        assert rows[name] == (0, 0, 0)
    assert total(job, example(job)) == (673684000, 819182000, 542364000)  # as without


def test_each_stage_holds_its_own_kernels() -> None:
    """4 stages of 9 layers; 64 micro-batches. All stages together are the whole model and 4 optimizers.

    A layer: fwd 4298, ig 5208, wg 3388 us. Stage 0 adds the embedding, 799 fwd and wg; stage 3 the head.
    """
    first = gpt_7b(world_size=128, tensor_model_parallel_size=4, pipeline_model_parallel=4, global_batch=512)
    totals = [total(first.at(rank), example(first.at(rank))) for rank in range(4)]
    layers = (64 * 9 * 4298_000, 64 * 9 * 5208_000 + 17374_000, 64 * 9 * 3388_000)
    assert totals[0] == (layers[0] + 64 * 799_000, layers[1], layers[2] + 64 * 799_000)
    assert totals[1] == totals[2] == layers
    assert totals[3] == (layers[0] + 64 * 12894_000, layers[1] + 64 * 12964_000, layers[2] + 64 * 12824_000)
    assert unused_on_stage(first.at(1), example(first.at(1))) == ["Emb", "layernorm_post", "logit_time"]


def test_the_summary_can_say_that_gradients_were_estimated_on_an_unknown_gpu() -> None:
    times = example(gpt_7b())
    assert times.gradients.startswith("estimated")
    assert "Example.txt" in times.source
    assert "unknown" in times.source
    assert times.warnings == ()


# --- profiles made for a test: distinct times, so that a sum tells its terms ---

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "seq_length": 16,
    "tensor_model_parallel_size": 2, "world_size": 2, "global_batch": 2, "position_embedding_type": "rope",
}  # fmt: skip
SP = {"enable_sequence_parallel": True}
UNFUSED = ("atten_core_qk", "atten_core_softmax", "atten_core_contex")
# us: forward, input gradient, weight gradient
MEASURED: dict[str, tuple[float, ...]] = {
    "Emb": (1, 0, 2),
    "layernorm": (10, 20),
    "atten_qkv": (100, 110, 120),
    "atten_rope": (3, 4),
    "atten_flash": (1000, 2500),
    "atten_linear": (40, 41, 42),
    "atten_residual": (5, 6),
    "layernorm2": (11, 21),
    "mlp_linear_1": (200, 210, 220),
    "mlp_gelu": (7, 8),
    "mlp_linear_2": (300, 310, 320),
    "mlp_residual": (0.5, 0.25),
    "layernorm_post": (12, 22),
    "logit_time": (400, 410, 420),
    "cross_entropy": (9, 13),
    "param_time": (5000,),
}


def small(**typed: Any) -> Job:
    return configure({**SMALL, **typed}).job


def profile(times: Mapping[str, tuple[float, ...]], **origin: str) -> Profile:
    names = ("time_gpu_avg", "input_grad_avg", "weight_grad_avg")
    lines = ["train_iter:10", *(f"# {key}: {value}" for key, value in origin.items())]
    for section, values in times.items():
        lines += [f"{section}:", *(f"    {name}: {value}" for name, value in zip(names, values, strict=False))]
    return parse_profile("\n".join(lines) + "\n", "own.txt")


def without(*names: str) -> dict[str, tuple[float, ...]]:
    assert set(names) <= set(MEASURED)
    return {name: values for name, values in MEASURED.items() if name not in names}


ROWS = {
    "embedding_layer": (1_000, 0, 2_000),
    "attention_layer": (1_158_000, 2_681_000, 162_000),  # 10+100+3+1000+40+5 | 20+110+4+2500+41+6 | 120+42
    "mlp_layer": (518_500, 549_250, 540_000),  # 11+200+7+300+0.5 | 21+210+8+310+0.25 | 220+320
    "final_layer": (412_000, 432_000, 420_000),  # 12+400 | 22+410 | 420
    "cross_entropy1": (9_000, 13_000, 0),
    "grad_param_compute": (0, 5_000_000, 0),
}
ROWS_SP = {
    "embedding_layer": (1_000, 0, 2_000),
    "attention_column": (110_000, 130_000, 120_000),  # 10+100 | 20+110 | 120
    "attention_row": (1_048_000, 2_551_000, 42_000),  # 3+1000+40+5 | 4+2500+41+6 | 42
    "mlp_column": (211_000, 231_000, 220_000),  # 11+200 | 21+210 | 220
    "mlp_row": (307_500, 318_250, 320_000),  # 7+300+0.5 | 8+310+0.25 | 320
    "final_column": (412_000, 432_000, 420_000),
    "cross_entropy1": (9_000, 13_000, 0),
    "grad_param_compute": (0, 5_000_000, 0),
}


@pytest.mark.parametrize(("typed", "expected"), [({}, ROWS), (SP, ROWS_SP)], ids=["no SP", "SP"])
def test_measured_gradients_are_used_as_measured(typed: dict[str, Any], expected: dict[str, Columns]) -> None:
    job = small(**typed)
    times = profile_times(job, profile(MEASURED, gpu="NVIDIA H200"))
    assert times.gradients == "measured"
    assert "NVIDIA H200" in times.source
    assert times.warnings == ()
    assert {name: row for name, row in rows_of(job, times).items() if any(row)} == expected


def test_one_tensor_parallel_rank_computes_its_cross_entropy_in_the_head_row() -> None:
    """There is no cross_entropy row then: 12 + 400 + 9 | 22 + 410 + 13 | 420."""
    job = small(tensor_model_parallel_size=1, world_size=1)
    rows = rows_of(job, profile_times(job, profile(MEASURED)))
    assert rows["final_layer"] == (421_000, 445_000, 420_000)
    assert "cross_entropy1" not in rows


def test_a_profile_with_some_gradients_says_which_were_estimated() -> None:
    """Only Emb has a measured gradient here: a summary that says "measured" would be wrong about all else."""
    mixed = {**{name: values[:1] for name, values in MEASURED.items()}, "Emb": MEASURED["Emb"]}
    assert "estimated" in profile_times(small(), profile(mixed)).gradients


def test_a_gemm_with_one_measured_gradient_does_not_lose_the_other() -> None:
    """Its weight gradient takes about as long as its forward; 0 is a time that nobody measured."""
    times = profile_times(small(), profile({**MEASURED, "atten_qkv": MEASURED["atten_qkv"][:2]}))
    assert times.kernels["atten_qkv"][:2] == (100_000, 110_000)
    assert times.kernels["atten_qkv"].wg == 100_000


# --- recompute ---


@pytest.mark.parametrize(
    ("typed", "row", "ig"),
    [({}, "attention_layer", 3_681_000), (SP, "attention_row", 3_551_000)],  # 1000 us of atten_flash more
    ids=["no SP", "SP"],
)
def test_selective_recompute_adds_core_attention_to_ig_of_its_row(typed: dict[str, Any], row: str, ig: int) -> None:
    plain, again = small(**typed), small(**typed, recompute_granularity="selective")
    before, after = (rows_of(job, profile_times(job, profile(MEASURED))) for job in (plain, again))
    assert after[row] == (before[row][0], ig, before[row][2])
    assert {name: after[name] for name in after if name != row} == {
        name: before[name] for name in before if name != row
    }


def test_selective_recompute_of_unfused_attention_repeats_its_three_kernels() -> None:
    times = profile({**without("atten_flash"), **dict(zip(UNFUSED, [(50, 1), (60, 2), (70, 3)], strict=True))})
    job = small(use_flash_attn=False, recompute_granularity="selective")
    # fwd 10+100+3+50+60+70+40+5; ig 20+110+4+1+2+3+41+6 and 50+60+70 again
    assert rows_of(job, profile_times(job, times))["attention_layer"] == (338_000, 367_000, 162_000)


@pytest.mark.parametrize(("typed", "expected"), [({}, ROWS), (SP, ROWS_SP)], ids=["no SP", "SP"])
def test_full_recompute_adds_the_forward_of_every_layer_row(
    typed: dict[str, Any], expected: dict[str, Columns]
) -> None:
    job = small(**typed, recompute_granularity="full")
    rows = rows_of(job, profile_times(job, profile(MEASURED)))
    again = {name: row for name, row in rows.items() if name.endswith("_recompute")}
    layer = [name for name in expected if name.startswith(("attention", "mlp"))]
    assert again == {f"{name}_recompute": (0, expected[name][0], 0) for name in layer}
    assert {name: row for name, row in rows.items() if any(row) and name not in again} == expected


# --- what must be there ---

REQUIRED = (
    "Emb",
    "layernorm",
    "atten_qkv",
    "atten_flash",
    "atten_linear",
    "layernorm2",
    "mlp_linear_1",
    "mlp_gelu",
    "mlp_linear_2",
    "param_time",
)
ON_LAST_STAGE = ("layernorm_post", "logit_time")


@pytest.mark.parametrize("name", [*REQUIRED, *ON_LAST_STAGE])
def test_a_missing_section_is_an_error_that_names_file_and_section(name: str) -> None:
    with pytest.raises(UserError) as caught:
        profile_times(small(), profile(without(name)))
    assert f"own.txt: no section {name}" in str(caught.value)


@pytest.mark.parametrize("name", REQUIRED)
def test_every_stage_needs_the_others(name: str) -> None:
    """The embedding too: the file would not be one of a whole model."""
    job = small(pipeline_model_parallel=2, world_size=4)
    for rank in (0, 1):
        with pytest.raises(UserError, match=f"no section {name}"):
            profile_times(job.at(rank), profile(without(name)))


def test_only_the_last_stage_needs_the_head() -> None:
    job, headless = small(pipeline_model_parallel=2, world_size=4), profile(without(*ON_LAST_STAGE))
    rows = rows_of(job, profile_times(job, headless))
    assert rows["attention_layer"] == ROWS["attention_layer"]
    with pytest.raises(UserError, match=r"layernorm_post, logit_time.*last stage"):
        profile_times(job.at(1), headless)


def test_sections_of_our_own_may_be_missing_but_are_not_made_up() -> None:
    bare = profile(without("atten_rope", "atten_residual", "mlp_residual", "cross_entropy"))
    times = profile_times(small(), bare)
    rows = rows_of(small(), times)
    assert times.warnings == ()
    assert rows["attention_layer"] == (1_150_000, 2_671_000, 162_000)  # 10+100+1000+40 | 20+110+2500+41 | 120+42
    assert rows["cross_entropy1"] == (0, 0, 0)


def test_unfused_attention() -> None:
    """Their first-generation gradients: twice the forward each."""
    times = {name: values[:1] for name, values in without("atten_flash").items()}
    times |= dict(zip(UNFUSED, [(50,), (60,), (70,)], strict=True))
    job = small(use_flash_attn=False)
    read = profile_times(job, profile(times))
    assert read.warnings == ()
    # fwd 10+100+3+50+60+70+40+5; ig 2x10+100+2x3+2x(50+60+70)+40+2x5; wg 100+40
    assert rows_of(job, read)["attention_layer"] == (338_000, 536_000, 140_000)


@pytest.mark.parametrize("name", UNFUSED)
def test_a_part_of_unfused_attention_is_missing(name: str) -> None:
    times = {**without("atten_flash"), **dict.fromkeys(UNFUSED, (50.0,))}
    del times[name]
    with pytest.raises(UserError, match=f"no section {name}"):
        profile_times(small(use_flash_attn=False), profile(times))


def test_the_other_form_of_core_attention_is_used_with_a_warning() -> None:
    unfused = {**without("atten_flash"), **dict.fromkeys(UNFUSED, (50.0, 60.0))}
    for job, times, forward in (
        (small(), unfused, 308_000),  # 10+100+3+3x50+40+5
        (small(use_flash_attn=False), MEASURED, 1_158_000),
        (small(dtype="float32"), MEASURED, 1_158_000),  # float32 has no flash kernel to ask for
    ):
        read = profile_times(job, profile(times))
        (warning,) = read.warnings
        assert all(name in warning for name in ("atten_flash", *UNFUSED))
        assert rows_of(job, read)["attention_layer"][0] == forward


def test_both_forms_of_core_attention_use_the_one_asked_for() -> None:
    both = {**MEASURED, **dict.fromkeys(UNFUSED, (50.0, 60.0))}
    read = profile_times(small(), profile(both))
    assert rows_of(small(), read)["attention_layer"] == ROWS["attention_layer"]
    (warning,) = read.warnings
    assert all(name in warning for name in UNFUSED)  # not used, so named


def test_a_section_that_no_kernel_uses_is_named() -> None:
    read = profile_times(small(), profile({**MEASURED, "moe_router": (4,), "my_own": (5,)}))
    (warning,) = read.warnings
    assert "moe_router, my_own" in warning
    assert {name: row for name, row in rows_of(small(), read).items() if any(row)} == ROWS


@pytest.mark.parametrize("time", ["1e308", "1e300", "2147484"])
def test_a_time_too_long_to_write_is_an_error_not_a_crash(time: str) -> None:
    """2147484 us are 2147484000 ns, above what the simulator reads (2147483583)."""
    long = parse_profile(
        "train_iter:1\n" + "".join(f"{name}:\n    time_gpu_avg: {time}\n" for name in MEASURED), "own.txt"
    )
    with pytest.raises(UserError):
        written(small(), profile_times(small(), long))


# --- the slice ---


def test_a_profile_of_this_slice_passes_and_of_another_is_refused_field_by_field() -> None:
    """A profile states the slice it was measured for; here it was TP 4, sequence 32, float16."""
    stated = {**slice_of(small()), "tensor_model_parallel_size": "4", "seq_length": "32", "dtype": "float16"}
    assert profile_times(small(), profile(MEASURED, **slice_of(small()))).warnings == ()
    with pytest.raises(UserError) as caught:
        profile_times(small(), profile(MEASURED, **stated))
    message = str(caught.value)
    assert "own.txt" in message
    assert "--allow-profile-mismatch" in message
    for difference in (
        "tensor_model_parallel_size: profile 4, asked 2",
        "seq_length: profile 32, asked 16",
        "dtype: profile float16, asked bfloat16",
    ):
        assert difference in message
    assert "hidden_size" not in message
    assert "\n" not in message


def test_a_mismatch_that_is_allowed_is_a_warning_that_says_the_same() -> None:
    stated = {**slice_of(small()), "hidden_size": "128"}
    read = profile_times(small(), profile(MEASURED, **stated), allow_mismatch=True)
    (warning,) = read.warnings
    assert "hidden_size: profile 128, asked 64" in warning
    assert {name: row for name, row in rows_of(small(), read).items() if any(row)} == ROWS


def test_a_profile_of_experts_does_not_serve_a_dense_model() -> None:
    """Its `mlp_` sections are those of the experts, and every section that a dense model needs is there."""
    experts = moe(tensor_model_parallel_size=1, expert_model_parallel_size=1)
    dense = configure({**SMALL, "tensor_model_parallel_size": 1, "world_size": 4, "global_batch": 8}).job
    with pytest.raises(UserError, match="num_experts"):
        profile_times(dense, profile(one_us_each(experts), **slice_of(experts)))


def test_the_optimizer_s_time_goes_with_its_elements() -> None:
    """5000 us for half the elements of this rank are 10000 us for all of them."""
    job = small(world_size=2)
    # GPT style, TP 2, hidden 64, ffn 256, 2 layers, one data-parallel rank. Vocabulary 100 -> 256, 128 a rank:
    # 128 x 64 = 8192. A layer: two norms 256; QKV 96 x 65 = 6240; output 64 x 32 + 64 = 2112; fc1 128 x 65 = 8320;
    # fc2 64 x 128 + 64 = 8256: 25184, twice; final norm 128; tied. 58688 parameters. In the buffer each tensor is
    # rounded up to 64: QKV's bias 96 -> 128, twice: 58752 = 128 x 459.
    read = profile_times(job, profile(MEASURED, optimizer_elements="29376"))
    assert rows_of(job, read)["grad_param_compute"] == (0, 10_000_000, 0)
    (warning,) = read.warnings
    assert "29,376" in warning
    assert "58,752" in warning
    same = profile_times(job, profile(MEASURED, optimizer_elements="58752"))
    assert rows_of(job, same)["grad_param_compute"] == (0, 5_000_000, 0)
    assert same.warnings == ()


PASSES = {"grad_zero": (1000,), "grad_scale": (2000,), "grad_clip": (300,)}


def test_gradient_passes_are_part_of_the_optimizer_s_row() -> None:
    """Two data-parallel ranks: zeroed, scaled by 1/2, clipped, updated. With one there is nothing to scale."""
    row = rows_of(small(world_size=4), profile_times(small(world_size=4), profile({**MEASURED, **PASSES})))
    assert row["grad_param_compute"] == (0, 8_300_000, 0)
    alone = small(world_size=2)
    assert rows_of(alone, profile_times(alone, profile({**MEASURED, **PASSES})))["grad_param_compute"][1] == 6_300_000


def test_gradient_passes_go_with_the_elements_they_pass_over() -> None:
    """Two replicas of 58688 parameters, 29376 of the padded 58752 a shard: measured on twice or half as many."""
    job = small(world_size=4)
    stated = {"gradient_elements": "117376", "optimizer_elements": "14688"}
    read = profile_times(job, profile({**MEASURED, **PASSES}, **stated))
    assert rows_of(job, read)["grad_param_compute"] == (0, 500_000 + 1_000_000 + 600_000 + 10_000_000, 0)
    assert [warning.split()[0] for warning in read.warnings] == ["grad_zero", "grad_scale", "grad_clip", "param_time"]


@pytest.mark.parametrize("stated", ["²", "9" * 5000, "0", "many", "-5"])
def test_elements_that_are_no_number_are_no_crash(stated: str) -> None:
    try:
        read = profile_times(small(), profile(MEASURED, optimizer_elements=stated))
    except UserError:
        return
    assert rows_of(small(), read)["grad_param_compute"] == (0, 5_000_000, 0)


# --- mixture of experts ---

MOE: dict[str, Any] = {
    **SP, "num_experts": 8, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "n_dense_layers": 1,
    "moe_shared_expert_intermediate_size": 32, "expert_model_parallel_size": 4, "world_size": 8, "global_batch": 8,
}  # fmt: skip


def moe(**typed: Any) -> Job:
    return small(**{**MOE, **typed})


def one_us_each(job: Job) -> dict[str, tuple[float, ...]]:
    return {kernel.name: (1,) for kernel in kernel_table(job)}


def distinct(job: Job) -> dict[str, tuple[float, ...]]:
    """A first-generation profile of every kernel: 1, 2, 4, ... ns, so that a sum tells its terms."""
    return {kernel.name: (2**i / 1000,) for i, kernel in enumerate(kernel_table(job))}


def test_a_dense_profile_does_not_serve_experts() -> None:
    with pytest.raises(UserError) as caught:
        profile_times(moe(), profile(MEASURED))
    message = str(caught.value)
    for name in ("moe_router", "moe_permute", "moe_unpermute", "mlp_shared_linear_1", "dense_linear_1"):
        assert name in message
    assert "layernorm" not in message


def test_expert_kernels_land_on_the_expert_rows() -> None:
    job = moe(n_dense_layers=0)
    times = {
        **without("mlp_linear_1", "mlp_gelu", "mlp_linear_2"),
        "moe_router": (2, 3),
        "moe_permute": (4, 5),
        "moe_unpermute": (6, 7),
        "mlp_linear_1": (100, 110, 120),
        "mlp_gelu": (8, 9),
        "mlp_linear_2": (200, 210, 220),
        "mlp_shared_linear_1": (30, 31, 32),
        "mlp_shared_gelu": (10, 11),
        "mlp_shared_linear_2": (40, 41, 42),
        "mlp_shared_residual": (3, 4),
    }
    found = written(job, profile_times(job, profile(times)))
    expert = [columns(row) for row in found if row[0] == "mlp_moelayer" and any(columns(row))]
    of_a_layer = [
        (13_000, 24_000, 0),  # layernorm2 11 and router 2 | 21 + 3
        (4_000, 5_000, 0),  # permute
        (308_000, 329_000, 340_000),  # 100+8+200 | 110+9+210 | 120+220
        (6_500, 7_250, 0),  # unpermute 6 and residual 0.5 | 7 + 0.25
    ]
    assert expert == of_a_layer * 4  # two layers, two micro-batches
    shared = {row[0]: columns(row) for row in found if row[0].startswith("mlp_shared")}
    assert shared["mlp_shared_column"] == (30_000, 31_000, 32_000)
    assert shared["mlp_shared_row"] == (53_000, 56_000, 42_000)  # 10+40+3 | 11+41+4


def test_imbalance_scales_the_work_that_grows_with_the_routed_tokens() -> None:
    even, skewed = moe(), moe(moe_load_imbalance=1.5)
    times = profile({**one_us_each(even), "mlp_gelu": (10, 20), "mlp_linear_2": (200, 210, 220)})
    before, after = profile_times(even, times), profile_times(skewed, times)
    assert after.kernels["mlp_linear_1"] == (1_500, 1_500, 1_500)  # 1 us, estimated gradients
    assert after.kernels["mlp_gelu"] == (15_000, 30_000, 0)
    assert after.kernels["mlp_linear_2"] == (300_000, 315_000, 330_000)
    routed = {"mlp_linear_1", "mlp_gelu", "mlp_linear_2"}
    for name in before.kernels.keys() - routed:
        assert after.kernels[name] == before.kernels[name], name
    (warning,) = after.warnings
    assert "1.5" in warning
    assert all(name in warning for name in routed)


# --- the placeholder ---


def test_the_placeholder_stands_only_where_there_is_compute() -> None:
    job = small(**SP)
    assert rows_of(job, fixed_times(job, 5)) == {
        "grad_param_compute": (0, 5, 0),  # the optimizer is one time, in ig (rows.md)
        "layernorm": (0, 0, 0),
        "embedding_layer": (5, 0, 5),  # its whole backward is weight gradient
        "attention_column": (5, 5, 5),
        "attention_column_regather": (0, 0, 0),
        "attention_row": (5, 5, 5),
        "mlp_column": (5, 5, 5),
        "mlp_column_regather": (0, 0, 0),
        "mlp_row": (5, 5, 5),
        "final_column": (5, 5, 5),
        "final_column_regather": (0, 0, 0),
        "cross_entropy1": (5, 5, 0),  # no weights
        "cross_entropy2": (0, 0, 0),
        "cross_entropy3": (0, 0, 0),
        "optimizer1": (0, 0, 0),
        "optimizer2": (0, 0, 0),
        "optimizer3": (0, 0, 0),
    }


def test_a_placeholder_of_zero_is_allowed_and_a_negative_one_is_not() -> None:
    assert total(small(), fixed_times(small(), 0)) == (0, 0, 0)
    with pytest.raises(UserError, match="--fixed_compute_ns -1"):
        fixed_times(small(), -1)


MLA: dict[str, Any] = {
    **SP, "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_dim": 16, "qk_rope_dim": 8,
    "v_head_dim": 12, "qk_layernorm": True,
}  # fmt: skip
JOBS: dict[str, Job] = {
    "dense": small(),
    "SP": small(**SP),
    "one rank": small(tensor_model_parallel_size=1, world_size=1),
    "data parallel": small(world_size=4, use_distributed_optimizer=False, global_batch=4),
    "selective": small(**SP, recompute_granularity="selective"),
    "full": small(**SP, recompute_granularity="full"),
    "unfused": small(use_flash_attn=False),
    "MoE": moe(),
    "MoE full": moe(recompute_granularity="full"),
    "MLA": small(**MLA),
    "MLA full": small(**MLA, recompute_granularity="full"),
    "stages": small(pipeline_model_parallel=2, world_size=4),
}


def communication(rows: Iterable[list[str]]) -> list[list[str]]:
    """Fields without columns 3, 6 and 9, the compute times."""
    return [[field for i, field in enumerate(row) if i not in (2, 5, 8)] for row in rows]


@pytest.mark.parametrize("name", JOBS)
def test_a_profile_changes_columns_3_6_and_9_alone(name: str) -> None:
    for rank in range(JOBS[name].pp):
        job = JOBS[name].at(rank)
        fixed, measured = written(job, fixed_times(job, 1)), written(job, profile_times(job, profile(distinct(job))))
        assert communication(fixed) == communication(measured)
        assert [columns(row) for row in fixed] != [columns(row) for row in measured]


@pytest.mark.parametrize("name", JOBS)
def test_the_placeholder_stands_where_a_profile_has_time(name: str) -> None:
    """Cell by cell: whoever swaps the placeholder for a profile must not see compute appear or vanish."""
    for rank in range(JOBS[name].pp):
        job = JOBS[name].at(rank)
        fixed, measured = written(job, fixed_times(job, 1)), written(job, profile_times(job, profile(distinct(job))))
        for one, other in zip(fixed, measured, strict=True):
            assert [time > 0 for time in columns(one)] == [time > 0 for time in columns(other)], one[0]


@pytest.mark.parametrize("name", JOBS)
def test_every_kernel_s_forward_is_in_the_file_as_often_as_it_runs(name: str) -> None:
    """Each of the distinct powers of two: once a layer that has the kernel, once a micro-batch for the ends."""
    job = replace(JOBS[name], training=replace(JOBS[name].training, recompute_granularity="none"))
    times = distinct(job)
    expert = {"moe_router", "moe_permute", "moe_unpermute", "mlp_linear_1", "mlp_gelu", "mlp_linear_2"}
    expected = 0
    for power, kernel in enumerate(times):
        if kernel in STEP_END:
            runs = 0
        elif kernel in ("Emb", "layernorm_post", "logit_time", "cross_entropy"):
            runs = 1
        elif job.model.num_experts and (kernel in expert or kernel.startswith(("dense_", "mlp_shared"))):
            runs = 1  # one layer of each kind
        else:
            runs = 2  # both layers
        expected += 2**power * runs * job.ga
    stages = [job.at(rank) for rank in range(job.pp)]
    assert sum(total(stage, profile_times(stage, profile(times)))[0] for stage in stages) == expected


def test_a_kernel_time_is_the_median_where_the_file_has_it() -> None:
    """One hiccup in ten moves a mean by a half: a first-generation file has no other, ours has."""
    more = {"forward_median": 100.0, "input_grad_avg": 320.0, "input_grad_median": 200.0, "weight_grad_median": 300.0}
    sections = {name: KernelTime(values[0]) for name, values in MEASURED.items()}
    sections["atten_qkv"] = KernelTime(160.0, 99.0, 700.0, {**more, "weight_grad_avg": 480.0})
    sections["atten_linear"] = KernelTime(160.0, 99.0, 700.0, {"input_grad_avg": 320.0, "weight_grad_avg": 480.0})
    times = profile_times(small(), Profile("own.txt", 1, {}, sections))
    assert times.kernels["atten_qkv"] == (100_000, 200_000, 300_000)
    assert times.kernels["atten_linear"] == (160_000, 320_000, 480_000)


def test_a_kernel_time_of_a_first_generation_profile_is_the_average() -> None:
    """Neither the shortest nor the longest sample, nor a sum of two of them."""
    sections = {name: KernelTime(values[0], 0.001, 1e6) for name, values in MEASURED.items()}
    times = profile_times(small(), Profile("own.txt", 1, {}, sections))
    assert times.kernels["atten_flash"].fwd == 1_000_000
    assert times.kernels["param_time"] == (0, 5_000_000, 0)
