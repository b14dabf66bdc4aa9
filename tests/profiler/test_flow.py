"""The whole flow as users start it: torchrun, two ranks, from nothing to a workload that passes `aicb check`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aicb.times.profile import read_profile
from aicb.workload.reading import check

REPOSITORY = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(REPOSITORY / "aicb.py")]
TINY = "--aiob_enable --device cpu --dtype float32 --hidden_size 64 --num_attention_heads 4 --vocab_size 256"
TINY += " --seq_length 32 --world_size 8 --global_batch 8 --time_budget 2 --train_iter 3 --l2 hot"
MODELS = {
    "dense": "-m 7 --num_layers 2 --tp 4",
    "experts": "-m moe --num_layers 2 --tp 2 --ep 2 --sp --num_query_groups 2 --kv_channels 16 --ffn_hidden_size 96 "
    "--n_shared_expert 1 --n_dense_layers 1",
    "latent": "-m deepseek16 --num_layers 2 --tp 2 --ep 2 --sp --ffn_hidden_size 64 --moe_ffn_hidden_size 32 "
    "--num_experts 8 --kv_lora_rank 16 --qk_nope_dim 16 --qk_rope_dim 8 --v_head_dim 16",
}
EXPECTED = {
    "dense": {"atten_qkv", "mlp_linear_1", "atten_core_qk", "logit_time", "cross_entropy", "param_time"},
    "experts": {"moe_router", "moe_permute", "mlp_linear_1", "mlp_shared_linear_1", "dense_linear_1"},
    "latent": {"attention_q_column", "attention_linear_kv_lora", "attention_kv_column", "attention_o_row"},
}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_from_profile_to_checked_workload(name: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, *TINY.split(), *MODELS[name].split(), "--json"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)  # one rank prints, and nothing but the summary
    assert summary["gradients"] == "measured"
    assert not list(check(tmp_path / summary["file"]))
    (profile,) = (tmp_path / "results" / "aiob_outputs").glob("*.txt")
    assert "-l2hot-" in profile.name
    found = read_profile(profile)
    assert found.origin["ranks_measured"] == "2"
    assert EXPECTED[name] <= set(found.sections)
    assert not any("not measured by this profile" in note for note in summary["notes"])
    samples = json.loads(profile.with_suffix(".json").read_text())
    assert samples
    # The workload's times are the profile's: the medians of what ends a step, in whole ns.
    row = next(line for line in (tmp_path / summary["file"]).read_text().splitlines() if "grad_param_compute" in line)
    assert int(row.split()[5]) == sum(round(found.sections[name].forward * 1000) for name in ends_of_step(summary))


def ends_of_step(summary: dict[str, Any]) -> list[str]:
    """Gradients are scaled by 1/DP, where there are several."""
    names = ["grad_zero", "grad_clip", "param_time"]
    return [*names, "grad_scale"] if "grad_scale" not in " ".join(summary["notes"]) else names


def interrupt_once_it_measures(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(r"profiling [3-9]/", line):
            break
    process.send_signal(signal.SIGINT)


def test_a_killed_run_leaves_no_profile(tmp_path: Path) -> None:
    """SIGINT goes to torchrun, as Ctrl-C does; nothing that looks complete may stay."""
    command = [*TORCHRUN, *TINY.split(), *MODELS["dense"].split(), "--seq_length", "512", "--time_budget", "60"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        interrupt_once_it_measures(process)
        process.communicate()
        assert process.returncode != 0
    parts = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert all(part.endswith(".partial") for part in parts), parts


def test_an_interrupted_process_says_what_is_kept_and_goes_on_from_there(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "aicb.py"), *TINY.split(), *MODELS["dense"].split()]
    command += ["--seq_length", "512", "--time_budget", "60"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        interrupt_once_it_measures(process)
        rest = process.communicate()[1]
        assert process.returncode == 130
    assert "aicb: error: interrupted" in rest
    (part,) = (path for path in tmp_path.rglob("*") if path.is_file())
    kept = len(part.read_text().splitlines()) - 1
    assert kept >= 2
    assert f" kernels are kept in {part.relative_to(tmp_path)}: --resume goes on from there\n" in rest
    done = run([*command, "--profile_only"], tmp_path)
    assert done.returncode == 2
    assert f"{part.relative_to(tmp_path)} holds {kept} kernels of an earlier try: pass --resume" in done.stderr
    done = run([*command, "--profile_only", "--resume", "--time_budget", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path / done.stdout.strip())
    assert found.origin["resumed"].startswith(f"{kept} kernels are an earlier try's: Emb, ")
    assert EXPECTED["dense"] <= set(found.sections)
    assert not part.exists()


def test_a_killed_process_leaves_no_profile(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "aicb.py"), *TINY.split(), *MODELS["dense"].split()]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "whole layer" in line:
                break
        process.kill()
    time.sleep(0.1)
    assert list(tmp_path.rglob("*.txt")) == []


def test_a_profile_is_replaced_only_with_force(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "aicb.py"), *TINY.split(), *MODELS["dense"].split(), "--profile_only"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    path = tmp_path / done.stdout.strip()
    before = path.read_bytes()
    done = run(command, tmp_path)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert "profiling" not in done.stderr  # refused before anything was measured
    assert path.read_bytes() == before
    subprocess.run([*command, "--force"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert path.read_bytes() != before


def test_without_a_gpu_the_error_names_both_ways_out(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, "-m", "aicb", "generate", "-m", "7", "--aiob_enable"]
    done = run(command, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--comp_filepath" in done.stderr
    assert "--device cpu" in done.stderr


def test_without_torch_the_error_names_both_ways_out(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from aicb.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", "-m", "7", "--aiob_enable"]
    done = run(command, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "torch is not installed" in done.stderr
    assert "--comp_filepath" in done.stderr


def test_a_rank_that_waits_for_the_others_ends_when_told(tmp_path: Path) -> None:
    """Inside torch's rendezvous no Python handler runs, so SIGTERM must keep its default there."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    alone = {**environment(), **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29771"}
    command = [sys.executable, str(REPOSITORY / "aicb.py"), *TINY.split(), *MODELS["dense"].split()]
    with subprocess.Popen(command, cwd=tmp_path, env=alone, stderr=subprocess.DEVNULL) as process:
        time.sleep(8)  # torch is loaded, and rank 1 never comes
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=120) == -signal.SIGTERM


def test_an_unwritable_result_folder_is_found_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(REPOSITORY / "aicb.py"), *TINY.split(), *MODELS["dense"].split()]
    command += ["--result_dir", "file/below"]
    done = run(command, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("aicb: error: --result_dir file/below: ")
    assert done.stderr.count("\n") == 1
