"""Every command of the README runs, in the order written, and prints what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aicb.megatron import NO_EFFECT

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```(sh|sh gpu|text)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if not line.startswith("make")
]
MEASURING = [line for kind, block in BLOCKS if kind == "sh gpu" for line in block.splitlines()]
TINY = "--device cpu --num_layers 1 --hidden_size 64 --num_attention_heads 8 --num_query_groups 8 --ffn_hidden_size 64"
TINY += " --vocab_size 64 --seq_length 16 --dtype float32 --time_budget 2 --train_iter 3 --l2 hot"


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "80"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout, so that results stay out of this one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("workload", "scripts", "tests", "aicb.py", "aicb", "profiler"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15
    assert len(MEASURING) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, checkout: Path) -> None:
    done = run(command, checkout)
    assert done.returncode == 0, done.stderr
    measuring = command.startswith("aicb profile")  # says on stderr how far it is
    script = "--args_file" in command and done.stderr.endswith(" have no effect on the workload\n")
    assert measuring or script or done.stderr == ""


def test_make_run_generates_the_sample(checkout: Path) -> None:
    """What `make run` runs after installing, which other tests' environment has done already."""
    dry = subprocess.run(["make", "-n", "run"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    recipe = dry.stdout.replace("\\\n", " ")
    command = next(line for line in recipe.splitlines() if "aicb generate" in line)
    done = run(command[command.index("aicb generate") :], checkout)
    assert done.returncode == 0, done.stderr
    assert "rows        314" in done.stdout


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"\b[A-Z]+_TABLE\b|\bTODO\b|\bTBD\b", README)


def test_the_summary_shown_is_the_summary_printed(tmp_path: Path) -> None:
    (tmp_path / "workload").symlink_to(REPOSITORY / "workload")
    shown = next(block for kind, block in BLOCKS if kind == "text" and block.startswith("model "))
    first = next(command for command in COMMANDS if command.startswith("aicb generate"))
    assert run(first, tmp_path).stdout == shown


def test_the_file_shown_is_the_file_written(tmp_path: Path) -> None:
    (tmp_path / "workload").symlink_to(REPOSITORY / "workload")
    first = next(command for command in COMMANDS if command.startswith("aicb generate"))
    written = (tmp_path / run(f"{first} --quiet", tmp_path).stdout.strip()).read_text().splitlines()
    shown = next(block for kind, block in BLOCKS if block.startswith("HYBRID")).splitlines()
    assert written[:2] == shown[:2]
    assert shown[3].split() in [line.split() for line in written]


@pytest.mark.parametrize("command", MEASURING)
def test_measuring_command_runs_on_a_cpu_at_a_tiny_size(command: str, checkout: Path) -> None:
    """The README's own flags, then smaller shapes that win over them; one process in place of torchrun's eight."""
    command = re.sub(r"^torchrun --nproc_per_node \d+ ", "python ", command)
    done = run(f"{command} {TINY}", checkout)
    assert done.returncode == 0, done.stderr


def test_the_first_tools_idle_flags_are_listed() -> None:
    """Those that its own scripts pass; Megatron-LM's are too many."""
    idle = [
        "activation_func",
        "computation_enable",
        "enable_visual",
        "master_addr",
        "nnodes",
        "node_rank",
        "nproc_per_node",
    ]
    for name in (*idle, "master_port", "overlap_version", "padded_vocab_size", "workload_only"):
        assert name in NO_EFFECT
        assert f"`--{name}`" in README
