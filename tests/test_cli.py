"""The command line as users meet it: spelling of options, output, exit codes, start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aicb.cli import main
from aicb.options import OPTIONS
from aicb.words import switches

REPOSITORY = Path(__file__).parent.parent
EXAMPLE = str(REPOSITORY / "workload" / "aiob_inputs" / "Example.txt")

# Scripts depend on these names: an option may be added, never renamed.
NAMES = """
frame model_name gpu_type world_size tensor_model_parallel_size pipeline_model_parallel expert_model_parallel_size
context_parallel_size pp_rank num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers enable_sequence_parallel use_distributed_optimizer global_batch micro_batch seq_length
epoch_num num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
make_vocab_size_divisible_by max_position_embeddings position_embedding_type normalization swiglu squared_relu
add_bias_linear qk_layernorm untie_embeddings_and_output_weights use_flash_attn dtype recompute_activations
recompute_granularity aiob_enable comp_filepath allow_profile_mismatch fixed_compute_ns min_comm_bytes result_dir
moe_enable num_experts moe_router_topk moe_grouped_gemm moe_ffn_hidden_size moe_shared_expert_intermediate_size
n_shared_expert moe_layer_freq n_dense_layers moe_router_load_balancing_type moe_load_imbalance multi_latent_attention
q_lora_rank kv_lora_rank qk_nope_dim qk_rope_dim v_head_dim force json quiet model_size add_qkv_bias train_iter device
l2 time_budget min_time sustained resume profile_only profile_dir micro_batches_written short
args_file group_query_attention rotary_percent expert_tensor_parallel_size moe_aux_loss_coeff moe_router_dtype
moe_router_enable_expert_bias hidden_dropout attention_dropout attention_backend fusion gradient_accumulation_fusion
""".split()
SHORT = {
    "-m": "model_size",
    "--model": "model_size",
    "--tp": "tensor_model_parallel_size",
    "--pp": "pipeline_model_parallel",
    "--pipeline_model_parallel_size": "pipeline_model_parallel",
    "--tp_num": "tensor_model_parallel_size",
    "--pp_num": "pipeline_model_parallel",
    "--ep_num": "expert_model_parallel_size",
    "--comm_frame": "frame",
    "--ep": "expert_model_parallel_size",
    "--cp": "context_parallel_size",
    "--sp": "enable_sequence_parallel",
    "--sequence_parallel": "enable_sequence_parallel",
    "--global_batch_size": "global_batch",
    "--micro_batch_size": "micro_batch",
    "--flash_attn": "use_flash_attn",
    "--recompute": "recompute_activations",
    "--experts": "num_experts",
    "--topk": "moe_router_topk",
    "--grouped_gemm": "moe_grouped_gemm",
    "--n_shared_experts": "n_shared_expert",
    "--n_dense_layer": "n_dense_layers",
    "--qk_nope_head_dim": "qk_nope_dim",
    "--qk_rope_head_dim": "qk_rope_dim",
    "--qk_head_dim": "qk_nope_dim",
    "--qk_pos_emb_head_dim": "qk_rope_dim",
    "--aiob": "aiob_enable",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_option_names_are_frozen() -> None:
    assert sorted(NAMES) == sorted(option.name for option in OPTIONS)
    assert {alias: option.name for option in OPTIONS for alias in option.aliases} == SHORT


def test_every_switch_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "generate", "--help")
    for option in OPTIONS:
        assert f"--{option.name}" in out
        if option.type is bool:
            assert f"--no-{option.name}" in out


def test_dashes_and_underscores_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    one = run(capsys, "generate", "-m", "7", "--tensor-model-parallel-size", "2", "--no-use-flash-attn", "--json")
    other = run(capsys, "generate", "-m", "7", "--tensor_model_parallel_size", "2", "--no_use_flash_attn", "--json")
    assert one == other
    assert json.loads(one[1])["tp"] == 2
    assert "flash_attn-False" in json.loads(one[1])["file"]


def test_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = "-m moe --tp 2 --pp 2 --ep 4 --sp --topk 1 --experts 16 --flash_attn --recompute --grouped_gemm --json"
    code, out, _ = run(capsys, "generate", *words.split())
    summary = json.loads(out)
    assert code == 0
    assert (summary["tp"], summary["pp"], summary["ep"], summary["sequence_parallel"]) == (2, 2, 4, True)
    assert summary["file"].endswith("MOE-True-GEMM-True-flash_attn-True.txt")
    for mark in ("num_experts16", "moe_router_topk1", "moe_grouped_gemm", "sp", "recompute_selective"):
        assert f"-{mark}-" in summary["file"].split("world_size")[0]


def test_switches_take_the_values_that_scripts_write() -> None:
    assert switches(["--sp", "off", "--tp", "2"]) == ["--no-sp", "--tp", "2"]
    assert switches(["--enable-sequence-parallel", "True"]) == ["--enable-sequence-parallel"]
    assert switches(["--sp=on", "--sp=0"]) == ["--sp", "--no-sp"]
    assert switches(["--model_name", "off", "--model_name=off"]) == ["--model_name", "off", "--model_name=off"]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--world_siz", "4"], "--world_size"),
        (["--expert_parallel", "4"], "--expert_model_parallel_size"),
        (["-x"], "-x"),
    ],
)
def test_unknown_options_name_the_nearest(capsys: pytest.CaptureFixture[str], words: list[str], fragment: str) -> None:
    code, out, err = run(capsys, "generate", "-m", "7", *words, "--tp", "2")
    assert (code, out) == (2, "")
    assert "no such option" in err
    assert fragment in err
    assert not Path("results").exists()


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "genrate")
    assert code == 2
    assert "generate" in err
    assert err.count("\n") == 1


def test_bare_command_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "generate" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, "aicb 0.1.0\n", "")


def test_models_lists_every_preset_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert "671,026,404,352" in out
    assert "gpt_7B" in out


def test_check_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    path = run(capsys, "generate", "-m", "7", "--quiet")[1].strip()
    assert run(capsys, "check", path)[0] == 0
    broken = Path("broken.txt")
    broken.write_text(Path(path).read_text().replace("ALLREDUCE", "AllReduce", 1))
    code, out, _ = run(capsys, "check", path, "broken.txt")
    assert code == 1
    assert "broken.txt:6: error: fwd_comm 'AllReduce'" in out
    assert run(capsys, "check", "nowhere.txt")[0] == 2


def test_show_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "7", "--tp", "2", "--world_size", "16", "--global_batch", "8", "--comp_filepath", EXAMPLE, "--quiet"]
    path = run(capsys, "generate", *words)[1].strip()
    code, out, _ = run(capsys, "show", path)
    assert code == 0
    # 36 layers of attention 1.820 and MLP 2.478 ms, embedding 0.799 and head 12.894 ms; ga is 1
    assert "168421000" in out
    assert "36  " in out.split("attention_layer", 1)[1]


def test_show_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", EXAMPLE)
    assert code == 0
    assert "12824.0" in out
    assert "GPU" in out


def test_show_of_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.txt").write_text("hello\n")
    code, out, err = run(capsys, "show", "other.txt")
    assert (code, out) == (2, "")
    assert "other.txt:1" in err


@pytest.mark.parametrize(
    "line",
    [
        "padded_vocab_size: 50k",
        "hidden_size: 1e3",
        "tensor_model_parallel_size: 1.5",
        "squared_relu: 0.0",
        "gpu: \x1b[31mred",
    ],
)
def test_show_of_a_broken_slice_shows_the_times(capsys: pytest.CaptureFixture[str], line: str) -> None:
    text = Path(EXAMPLE).read_text().split("\n", 1)
    Path("slice.txt").write_text(f"{text[0]}\n# format_version: 2\n# {line}\n{text[1]}")
    code, out, _ = run(capsys, "show", "slice.txt")
    assert code == 0
    assert "12824.0" in out
    assert "\x1b" not in out


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    Path("b.txt").write_text(Path(EXAMPLE).read_text().replace("time_gpu_avg: 799", "time_gpu_avg: 1598"))
    code, out, _ = run(capsys, "compare", EXAMPLE, "b.txt")
    assert code == 0
    assert "2.000" in next(line for line in out.splitlines() if line.startswith("Emb"))
    assert "1.000" in next(line for line in out.splitlines() if line.startswith("atten_qkv"))


@pytest.mark.parametrize(
    ("edit", "tolerance", "code", "said"),
    [
        (("", ""), "0%", 0, "all of 12 times within 0 %"),
        (("time_gpu_avg: 799", "time_gpu_avg: 838"), "5%", 0, "all of 12 times within 5 %"),
        (
            ("time_gpu_avg: 799", "time_gpu_avg: 840"),
            "5%",
            1,
            "1 of 12 times more than 5 % apart: Emb forward (+5.1 %)",
        ),
        (("time_gpu_avg: 799", "time_gpu_avg: 750"), "5 %", 1, "Emb forward (-6.1 %)"),
        (("time_gpu_avg: 799", "time_gpu_avg: 0"), "99.9%", 1, "Emb forward (-100.0 %)"),
        (("Emb:", "Emb2:"), "5%", 1, "in one of the two alone: Emb forward, Emb2 forward"),
        (
            ("time_gpu_avg: 799", "time_gpu_avg: 799\n    input_grad_avg: 5"),
            "5%",
            0,
            "does not state it: Emb input_grad",
        ),
    ],
)
def test_compare_with_a_tolerance(
    capsys: pytest.CaptureFixture[str], edit: tuple[str, str], tolerance: str, code: int, said: str
) -> None:
    text = Path(EXAMPLE).read_text()
    assert edit[0] in text
    Path("b.txt").write_text(text.replace(*edit, 1))
    done, out, _ = run(capsys, "compare", EXAMPLE, "b.txt", "--tolerance", tolerance)
    assert done == code
    assert said in out


@pytest.mark.parametrize("tolerance", ["5", "0.05", "-5%", "five", "", "nan%", "1e3%"])
def test_a_tolerance_that_is_no_percentage_is_refused(capsys: pytest.CaptureFixture[str], tolerance: str) -> None:
    code, _, err = run(capsys, "compare", EXAMPLE, EXAMPLE, "--tolerance", tolerance)
    assert code == 2
    assert "such as 5%" in err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m aicb models | head -1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(REPOSITORY)}
    )
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["--help"], ["generate", "-m", "7", "--comp_filepath", EXAMPLE], ["models"]])
def test_start_up_loads_nothing_heavy(words: list[str]) -> None:
    heavy = ["torch", "numpy", "pandas", "rich", "hypothesis"]
    code = f"import sys; from aicb.cli import main; assert main({words!r}) == 0; "
    code += f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(REPOSITORY)}
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate --tp 1,2", "--tensor_model_parallel_size 1,2: several values make one profile each, so they need "),
        ("profile --seq_length 8,16", "--seq_length 8,16: several values make one profile each, so they need "),
        ("profile --profile_only --tp 2,2", "--tensor_model_parallel_size 2,2: each value once"),
        ("generate --micro_batch 1,x", "'1,x' is not a valid integer, or several with commas between them"),
    ],
)
def test_several_values_make_profiles_alone(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert said in err
