"""The commands users typed, run in a folder of their own, and what they must write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aicb.cli import main
from aicb.workload.reading import check, totals

REPOSITORY = Path(__file__).parent.parent
EXAMPLE = str(REPOSITORY / "workload" / "aiob_inputs" / "Example.txt")
COMMON = ["--frame", "Megatron", "--micro_batch", "1", "--seq_length", "4096", "--swiglu", "--use_flash_attn"]
PROFILE = ["--aiob_enable", "--comp_filepath", EXAMPLE]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def generate(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["generate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()[2:]]


def head(path: str) -> dict[str, int]:
    words = Path(path).read_text().splitlines()[0].split()[1:]
    return {key.rstrip(":"): int(value) for key, value in zip(words[::2], words[1::2], strict=True)}


FIRST = ["-m", "7", "--world_size", "4096", "--tensor_model_parallel_size", "2", "--pipeline_model_parallel", "1"]
FIRST += ["--global_batch", "8192", *COMMON, *PROFILE]


def test_first_command(capsys: pytest.CaptureFixture[str]) -> None:
    summary = generate(capsys, *FIRST)
    name = "gpt_7B-world_size4096-tp2-pp1-ep1-gbs8192-mbs1-seq4096-MOE-False-GEMM-False-flash_attn-True.txt"
    assert summary["file"] == f"results/workload/{name}"
    assert (summary["tp"], summary["dp"], summary["ga"]) == (2, 2048, 4)
    assert "estimated" in summary["gradients"]
    header = head(summary["file"])
    assert (header["model_parallel_NPU_group"], header["ga"], header["all_gpus"], header["pp_comm"]) == (2, 4, 4096, 0)
    assert not list(check(Path(summary["file"])))
    attention = [row for row in rows(summary["file"]) if row[0] == "attention_layer"]
    assert len(attention) == 36 * 4
    assert attention[0][2:5] == ["1820000", "ALLREDUCE", "33554432"]  # 2 bytes x 4096 tokens x 4096


def test_pipeline_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "7", "--world_size", "128", "--tensor_model_parallel_size", "4", "--pipeline_model_parallel", "4"]
    words += ["--global_batch", "512", *COMMON, *PROFILE]
    first = generate(capsys, *words)
    assert (first["ga"], first["layers"]) == (64, 9)
    assert head(first["file"])["pp_comm"] == 33554432
    names = totals(Path(first["file"])).row_counts
    assert (names["attention_layer"], names["embedding_layer"], names["final_layer"]) == (9 * 64, 64, 0)
    last = generate(capsys, *words, "--pp_rank", "3")
    assert Path(last["file"]).name.startswith("gpt_7B-pp_rank3-world_size128-")
    names = totals(Path(last["file"])).row_counts
    assert (names["embedding_layer"], names["final_layer"]) == (0, 64)
    assert head(last["file"])["pp_rank"] == 3


def test_all_stages_and_the_slowest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "7", "--world_size", "128", "--tp", "4", "--pp", "4", "--global_batch", "512", *COMMON, *PROFILE]
    stages = generate(capsys, *words, "--pp_rank", "all")
    assert [stage["pp_rank"] for stage in stages] == [0, 1, 2, 3]
    assert len({stage["file"] for stage in stages}) == 4
    slowest = generate(capsys, *words, "--pp_rank", "slowest")
    assert slowest == max(stages, key=lambda stage: sum(stage["compute_ns"].values()))
    assert slowest["pp_rank"] == 3  # the head's 12.9 ms outweigh the embedding's 0.8 ms


def test_epoch_num_repeats_the_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    once = generate(capsys, "-m", "13", *COMMON)
    thrice = generate(capsys, "-m", "13", *COMMON, "--epoch_num", "3")
    assert "gpt_13B-iter3-" in thrice["file"]
    assert rows(thrice["file"]) == 3 * rows(once["file"])
    assert int(Path(thrice["file"]).read_text().splitlines()[1]) == 3 * len(rows(once["file"]))
    assert head(thrice["file"]) == {**head(once["file"]), "iterations": 3}
    assert thrice["bytes_per_group"] == {group: 3 * size for group, size in once["bytes_per_group"].items()}


def test_a_profile_changes_times_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "7", "--world_size", "16", "--tensor_model_parallel_size", "8", "--global_batch", "12", *COMMON]
    without, given = generate(capsys, *words), generate(capsys, *words, *PROFILE)
    assert without["file"] != given["file"]
    assert Path(without["file"]).read_text().splitlines()[:2] == Path(given["file"]).read_text().splitlines()[:2]
    differing = set()
    for one, other in zip(rows(without["file"]), rows(given["file"]), strict=True):
        differing |= {column for column in range(12) if one[column] != other[column]}
    assert differing == {2, 5, 8}  # columns 3, 6 and 9, counted from 1
    assert {row[6] for row in rows(given["file"]) if row[0] == "attention_layer"} == {"ALLREDUCE"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "15"], "-m 15: no such preset"),
        (["-m", "7", "--epoch_nun", "16"], "no such option: --epoch_nun (nearest: --epoch_num"),
        (["-m", "deepseek"], "-m deepseek: which one? deepseek16, deepseek236, deepseek671"),
        (["-m", "7", "--pp", "10", "--world_size", "80"], "--num_layers 36 must be a multiple of"),
        (["-m", "7", "--world_size", "16", "--tp", "2", "--global_batch", "2"], "8 data-parallel ranks"),
        (["-m", "7", "--tp"], "--tp"),
        (["-m", "7", "--tp", "two"], "--tp"),
        (["-m", "7", "stray"], "stray"),
        (["-m", "7", "--pp_rank", "1"], "--pp_rank 1"),
        (["-m", "7", "--pp_rank", "x"], "--pp_rank x"),
        (["-m", "7", "--comp_filepath", "nowhere.txt"], "nowhere.txt"),
        (["-m", "7", "--comp_filepath", EXAMPLE, "--fixed_compute_ns", "3"], "exclude each other"),
        (["-m", "7", "--fixed_compute_ns", "-3"], "--fixed_compute_ns -3"),
        (["-m", "7", "--fixed_compute_ns", "2147483584"], "2147483583"),
        (["-m", "7", "--min_comm_bytes", "-1"], "--min_comm_bytes -1"),
        (["-m", "7", "--seq_length", "1000000", "--sp", "--micro_batch", "4"], "16 GiB"),
        (["-m", "7", "--pp", "4", "--seq_length", "1000000", "--dtype", "float32", "--tp", "1"], "pp_comm"),
        (["-m", "7", "--result_dir", EXAMPLE], "Example.txt"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aicb: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_different_commands_never_overwrite_each_other_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(generate(capsys, "-m", "7")["file"])
    before = path.read_bytes()
    assert generate(capsys, "-m", "7")["file"] == str(path)  # the same content is no conflict
    assert main(["generate", "-m", "7", "--swiglu"]) == 2  # this format's users know one name for both
    assert "--force" in capsys.readouterr().err
    assert path.read_bytes() == before
    generate(capsys, "-m", "7", "--swiglu", "--force")
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    "words",
    [["--sp"], ["--recompute"], ["--recompute_granularity", "full"], ["--dtype", "float16"], PROFILE,
     ["--epoch_num", "2"], ["--no-use_distributed_optimizer"], ["--gpu_type", "H100"], ["--no-use_flash_attn"]],
)  # fmt: skip
def test_what_commonly_differs_is_in_the_name(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    plain = generate(capsys, "-m", "7")["file"]
    assert generate(capsys, "-m", "7", *words)["file"] != plain


def test_names_never_start_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert Path(generate(capsys, "-m", "7")["file"]).name.startswith("gpt_7B-")
    assert Path(generate(capsys, "-m", "7", "--gpu_type", "H100")["file"]).name.startswith("H100-gpt_7B-")


def test_min_comm_bytes_leaves_out_the_small_ones(capsys: pytest.CaptureFixture[str]) -> None:
    summary = generate(capsys, "-m", "7", "--min_comm_bytes", "1000000")
    sizes = {int(row[i]) for row in rows(summary["file"]) for i in (4, 7, 10)} - {0}
    assert min(sizes) >= 1000000
    assert not list(check(Path(summary["file"])))


def test_world_size_of_the_environment_is_not_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("TP", "3")
    assert generate(capsys, "-m", "7")["world_size"] == 32


def test_quiet_and_plain_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "7", "--quiet"]) == 0
    path = capsys.readouterr().out.strip()
    assert Path(path).is_file()
    assert main(["generate", "-m", "7"]) == 0
    said = capsys.readouterr().out
    for fragment in ("7,472,312,320 parameters", "DP 8 x TP 4 x PP 1, EP 1", "ga 128", "placeholder of 1 ns", path):
        assert fragment in said


@pytest.mark.parametrize("kind", ["directory", "binary", "truncated", "empty", "unreadable"])
def test_bad_profiles(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "profile.txt"
    content = {"binary": b"\0\xff\x00", "truncated": Path(EXAMPLE).read_bytes()[:-40], "empty": b""}.get(kind, b"x")
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(content)
    assert main(["generate", "-m", "7", "--comp_filepath", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "profile.txt" in err
    assert not (tmp_path / "results").exists()


def test_a_full_disk_loses_nothing() -> None:
    """A limit on file size makes write() fail as a full disk does."""
    command = [sys.executable, "-m", "aicb", "generate", "-m", "7", "--quiet"]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    path = Path(done.stdout.strip())
    before = path.read_bytes()
    limited = f"ulimit -f 8; exec {sys.executable} -m aicb generate -m 7 --force --epoch_num 1 --seq_length 2048"
    limited = f"trap '' XFSZ; {limited} --quiet; "
    other = subprocess.run(["sh", "-c", limited], env=environment, capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert other.stderr.startswith("aicb: error: ")
    assert other.stderr.count("\n") == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_the_script_passes_everything_through(tmp_path: Path) -> None:
    script = str(REPOSITORY / "scripts" / "megatron_workload_with_aiob.sh")
    done = subprocess.run(["sh", script, *FIRST, "--quiet"], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_file()
    assert (tmp_path / "results" / "workload").is_dir()
    failed = subprocess.run(["sh", script, "-m", "15"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2


def test_two_processes_at_once_never_lose_a_workload() -> None:
    """Both see no file at their start; the one that comes second must not replace the other's."""
    command = [sys.executable, "-m", "aicb", "generate", "-m", "7", "--tp", "4", "--global_batch", "65536", "--quiet"]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    both = [
        subprocess.Popen([*command, swiglu], env=environment, stdout=subprocess.PIPE)
        for swiglu in ("--swiglu", "--no-swiglu")
    ]
    outputs = [process.communicate()[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2]
    winner = codes.index(0)
    path = Path(outputs[winner].decode().strip())
    gathered = (3_754_203_648, 3_763_544_064)[winner]  # bytes of its parameters, fewer with SwiGLU's narrower MLP
    assert f"\tALLGATHER\t{gathered}\t" in path.read_text()[:2000]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "aicb", "generate", "-m", "7", "--tp", "4", "--global_batch", "26214400"]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.rglob(".aicb-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 128 + number
    assert "Traceback" not in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_all_stages_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "-m", "7", "--world_size", "128", "--pp", "4", "--result_dir", "out"]
    path = Path(generate(capsys, *words[1:], "--pp_rank", "2")["file"])
    path.write_text("another workload\n")
    assert main([*words, "--pp_rank", "all"]) == 2
    assert [file.name for file in Path("out").iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--device has no effect"),
        (["--time_budget", "3"], "--time_budget has no effect"),
        (["--allow-profile-mismatch"], "--allow_profile_mismatch has no effect"),
        (["--pp_rank", "slowest"], "--pp_rank slowest without a profile"),
    ],
)
def test_options_without_effect_are_named(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["generate", "-m", "7", *words]) == 0
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_notes_name_what_has_no_effect_and_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "moe", "--sp", "--ffn_hidden_size", "64", "--moe_ffn_hidden_size", "128"]
    notes = generate(capsys, *words, "--max_position_embeddings", "9", "--min_comm_bytes", "1000000")["notes"]
    assert any("--ffn_hidden_size has no effect" in note for note in notes)
    assert any("--max_position_embeddings has no effect" in note for note in notes)
    assert any("--min_comm_bytes 1000000: " in note and " left out" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile_only"], "--profile_only measures"),
        (["--profile_only", *PROFILE], "--profile_only measures"),
        (["--aiob_enable", "--fixed_compute_ns", "5"], "exclude each other"),
        (["--no-recompute", "--recompute_granularity", "full"], "exclude each other"),
        (["--json", "--quiet"], "exclude each other"),
        (["--gpu_type", ""], "--gpu_type needs a value"),
        (["--result_dir", "--quiet"], "--result_dir needs a value"),
        (["--num_layers", "99999999999999999999"], "at most 100000"),
        (["--moe_layer_freq", "+".join(["[1]*99999"] * 50)], "--moe_layer_freq"),
        (["--fixed_compute_ns", "3000000000"], "--fixed_compute_ns"),
        (["--global_batch", "17179869184"], "--global_batch"),
        (["--world_size", "17179869184", "--global_batch", "17179869184"], "--world_size"),
    ],
)
def test_contradictions_and_limits(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["generate", "-m", "7", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_architecture_half_typed_names_the_preset_behind_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--num_layers", "2", "--hidden_size", "64"]) == 2
    assert "preset 13" in capsys.readouterr().err


def test_many_stages_are_quick(capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage once asked for all stages: quadratic, minutes at this size."""
    words = ["-m", "7", "--num_layers", "1000", "--pp", "1000", "--world_size", "4000", "--fixed_compute_ns", "1"]
    assert generate(capsys, *words, "--pp_rank", "slowest")["pp"] == 1000
