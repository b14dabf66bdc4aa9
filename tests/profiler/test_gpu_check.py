"""The report of scripts/gpu_check.sh, from profiles that exist; the measuring itself needs a GPU."""

import os
import subprocess
from pathlib import Path

import pytest

from aicb.errors import UserError
from aicb.times.profile import parse_profile
from aicb.times.rates import compare
from profiler import gpu_check
from tests.profiler.fakes import ROOT

GOLDEN = (Path(__file__).parent / "golden_profile.txt").read_text()


def test_two_runs_are_compared_and_rated() -> None:
    first = parse_profile(GOLDEN.replace("NVIDIA Fake 1", "NVIDIA H200"), "a")
    second = parse_profile(GOLDEN.replace("forward_median: 102\n", "forward_median: 107.1\n"), "b")
    lines = gpu_check.report("tiny", first, second, (12.34, 10.0)).splitlines()
    row = next(line.split() for line in lines if line.startswith("atten_qkv") and " forward" in line)
    # (32, 64) x (64, 64): 2 x 32 x 64 x 64 = 262144 FLOP in 102 us are 0.0026 TFLOP/s.
    assert row[:6] == ["atten_qkv", "forward", "102.0", "107.1", "5.0", "0.0"]
    assert row[-2:] == ["0%", "-"]  # no samples beside it, so no spans
    assert "== tiny on NVIDIA H200 (peak 989.5 TFLOP/s, 4800 GB/s)" in lines
    assert "wall time, start included: 12.3 s and 10.0 s" in lines
    assert "two runs at most 5.0 % apart (atten_qkv forward); over 3 %: atten_qkv forward" in lines
    assert "sum_of_parts_over_whole_forward: 0.950" in lines
    # GEMMs: input gradients 2 x (102 + 104 + 107 + 109 + 112) = 1068 us, weight gradients 3 x 534 = 1602; in all 6577,
    # less the embedding's weight gradient of 300.
    said = "weight gradients into fp32 (addmm): 1602.0 us, input gradients of the same GEMMs 1068.0 us; the difference"
    assert any(line.startswith(f"{said} is 8.5") for line in lines)


def test_an_unknown_gpu_has_no_share() -> None:
    same = parse_profile(GOLDEN, "a")
    assert "(peak unknown)" in gpu_check.report("tiny", same, same, (1, 1))
    assert " 0%" not in gpu_check.report("tiny", same, same, (1, 1))


def test_a_run_that_fails_is_told_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "RUNS", {"none": {"model_size": "no-such-model"}})
    assert gpu_check.main([str(tmp_path), "cpu"]) == 1
    assert "none: FAILED: exit code 1: " in capsys.readouterr().out


def test_profiles_without_a_common_section_are_not_compared() -> None:
    one, other = (parse_profile(f"train_iter:1\n{name}:\n    time_gpu_avg: 1\n", name) for name in ("Emb", "logit"))
    with pytest.raises(UserError, match=r"^Emb and logit have no section in common$"):
        compare(one, other)


@pytest.mark.parametrize(("lacking", "code"), [("nothing", 0), ("pytest", 1), ("typer", 0), ("torch", 2)])
def test_the_script_fails_where_the_gpu_tests_could_not_run(lacking: str, code: int, tmp_path: Path) -> None:
    """A Python whose every call succeeds but for the import of one module."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *import*{lacking}*) exit 1;; esac\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}
    script = ROOT / "scripts" / "gpu_check.sh"
    done = subprocess.run(["sh", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("pytest is not installed here: tests/gpu were NOT run" in done.stdout) == (lacking == "pytest")
