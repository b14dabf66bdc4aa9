"""Nothing measured is lost: what an interrupted try keeps, what --resume makes of it and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aicb.config.job import Job
from aicb.config.parallel import ParallelConfig
from aicb.errors import UserError
from aicb.step.kernels import kernel_table
from aicb.times.profile import read_profile
from profiler import kernels
from profiler.run import profile_jobs
from profiler.settings import Settings
from tests.profiler.fakes import ROOT
from tests.profiler.test_run import Bench, bench, job, profiled, settings, tiny

__all__ = ["bench", "job"]  # fixtures
NAME = "Fake-1-tiny.txt"
SHARED = ("layernorm2", "mlp_residual", "layernorm_post")
"""Kernels of the shape of one before them."""


def stop_at(bench: Bench, name: str | None, failure: type[BaseException] = KeyboardInterrupt) -> None:
    def fail(building: str) -> None:
        if building == name:
            raise failure("stopped")

    bench.before = fail


def interrupted(job: Job, bench: Bench, folder: Path, name: str) -> Path:
    """The part that is left when measuring stops at kernel `name`."""
    stop_at(bench, name)
    with pytest.raises(KeyboardInterrupt):
        profiled(job, folder)
    stop_at(bench, None)
    bench.built.clear()
    return folder / f"{NAME}.partial"


def sections(path: Path) -> dict[str, Any]:
    return dict(read_profile(path).sections)


def test_stopped_at_any_kernel_resuming_measures_the_rest_alone(job: Job, bench: Bench, tmp_path: Path) -> None:
    whole = sections(profiled(job, tmp_path / "whole"))
    for index, name in enumerate(bench.names):
        if name in SHARED:
            continue
        folder = tmp_path / name
        part = interrupted(job, bench, folder, name)
        assert part.exists() == (index > 0)
        path = profiled(job, folder, resume=True)
        assert bench.built == [other for other in bench.names[index:] if other not in SHARED]
        assert sections(path) == whole
        resumed = read_profile(path).origin.get("resumed")
        assert resumed == (f"{index} kernels are an earlier try's: {', '.join(bench.names[:index])}" if index else None)
        assert sorted(found.name for found in folder.iterdir()) == ["Fake-1-tiny.json", NAME]


def test_a_line_cut_short_is_measured_again(job: Job, bench: Bench, tmp_path: Path) -> None:
    whole = sections(profiled(job, tmp_path / "whole"))
    part = interrupted(job, bench, tmp_path, "mlp_gelu")
    text = part.read_bytes()
    for cut in (1, 2, len(text) // 3, len(text) - 5, len(text)):
        part.write_bytes(text[:-cut])
        if part.with_name(NAME).exists():
            part.with_name(NAME).unlink()
        assert sections(profiled(job, tmp_path, resume=True)) == whole
        assert not part.exists()


def test_without_resume_nothing_measured_is_thrown_away_unasked(job: Job, bench: Bench, tmp_path: Path) -> None:
    part = interrupted(job, bench, tmp_path, "mlp_gelu")
    with pytest.raises(UserError, match=r"holds 8 kernels of an earlier try: pass --resume to go on .* or --force"):
        profiled(job, tmp_path)
    assert bench.built == []
    assert part.exists()
    assert "resumed" not in read_profile(profiled(job, tmp_path, force=True)).origin
    assert not part.exists()


def edited(key: str, value: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf'"{key}": "[^"]*"', f'"{key}": "{value}"', text, count=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited("hidden_size", "128"), "hidden_size is 128 there, 64 here"),
        (edited("gpu", "NVIDIA Other"), "gpu is NVIDIA Other there, NVIDIA Fake 1 here"),
        (edited("torch", "2.0"), "torch is 2.0 there, 3 here"),
        (edited("attention_implementation", "flash"), "attention_implementation is flash there, SDPA flash here"),
        (edited("l2", "hot"), "l2 is hot there, cold here"),
        (edited("ranks", "2"), "ranks is 2 there, 1 here"),
        (lambda text: text.replace('"hidden_size": "64", ', "", 1), "hidden_size is None there, 64 here"),
        (lambda text: text.replace('"kernel"', '"x"', 1), "no line of a profile's part"),
        (lambda text: text.replace("\n", "\nx\n", 1), ":2: no line of a profile's part"),
        (lambda _: "[]\n", ":1: no line of a profile's part"),
        (lambda text: text.replace('"us": [', '"us": ["a", ', 1), "partial:2: no line of a profile's part"),
    ],
)
def test_a_part_of_something_else_is_refused(
    job: Job, bench: Bench, tmp_path: Path, change: Callable[[str], str], said: str
) -> None:
    part = interrupted(job, bench, tmp_path, "mlp_gelu")
    text = change(part.read_text())
    part.write_text(text)
    with pytest.raises(UserError) as caught:
        profiled(job, tmp_path, resume=True)
    assert said in str(caught.value)
    assert "--force to start over" in str(caught.value)
    assert part.read_text() == text
    assert bench.built == []


def test_resume_leaves_a_finished_profile_alone(job: Job, bench: Bench, tmp_path: Path) -> None:
    path = profiled(job, tmp_path)
    before = path.read_bytes()
    bench.built.clear()
    assert profiled(job, tmp_path, resume=True) == path
    assert (bench.built, path.read_bytes()) == ([], before)


def test_no_reader_takes_a_part_for_a_profile(job: Job, bench: Bench, tmp_path: Path) -> None:
    part = interrupted(job, bench, tmp_path, "param_time")
    assert json.loads(part.read_text().splitlines()[-1])["kernel"] == "grad_clip"
    with pytest.raises(UserError):
        read_profile(part)


def test_a_users_error_says_what_is_kept(job: Job, bench: Bench, tmp_path: Path) -> None:
    stop_at(bench, "mlp_gelu", UserError)
    with pytest.raises(UserError) as caught:
        profiled(job, tmp_path)
    assert str(caught.value) == (
        f"stopped; 8 of 18 kernels are kept in {tmp_path / NAME}.partial: --resume goes on from there"
    )


@pytest.mark.parametrize("said", ["CUDA error: an illegal memory access was encountered\nmore", "cuDNN Frontend error"])
def test_what_the_device_refuses_is_one_line(job: Job, bench: Bench, tmp_path: Path, said: str) -> None:
    def fail(name: str) -> None:
        if name == "atten_flash":
            raise RuntimeError(said)

    bench.before = fail
    with pytest.raises(UserError) as caught:
        profiled(job, tmp_path)
    first = said.splitlines()[0]
    assert str(caught.value).startswith(f"atten_flash failed on NVIDIA Fake 1: {first}; 3 of 18 kernels are kept in ")


# Several splits


def test_splits_share_what_has_one_shape(bench: Bench, tmp_path: Path) -> None:
    """Halving TP changes every GEMM but no norm (no sequence parallelism), residual or head width."""
    jobs = {}
    for tp in (2, 1):
        split = ParallelConfig(world_size=tp, tensor_model_parallel_size=tp)
        jobs[tp] = replace(tiny(), parallel=split)
    wanted = [(job, lambda _, tp=tp: tmp_path / f"tp{tp}.txt") for tp, job in jobs.items()]
    paths = profile_jobs(wanted, settings())
    assert [path.name for path in paths] == ["tp2.txt", "tp1.txt"]
    first, second = bench.built[:15], bench.built[15:]
    assert first == [name for name in bench.names if name not in SHARED]
    assert not set(second) & {*SHARED, "layernorm", "atten_residual"}
    assert {"atten_qkv", "atten_flash", "mlp_linear_1", "mlp_gelu", "logit_time"} <= set(second)
    keys = [kernels._key(job, kernel) for job in jobs.values() for kernel in kernel_table(job)]
    assert len(bench.built) == len(set(keys))
    assert read_profile(paths[1]).origin["measured_once"].startswith("layernorm as layernorm of tp2.txt, ")
    assert list(read_profile(paths[1]).sections) == list(read_profile(paths[0]).sections)


def test_a_split_that_cannot_be_stops_all_before_anything_is_measured(bench: Bench, tmp_path: Path) -> None:
    def refuse(_: str) -> Path:
        raise UserError("no")

    with pytest.raises(UserError, match=r"^no$"):
        profile_jobs([(tiny(), lambda _: tmp_path / "a.txt"), (tiny(), refuse)], Settings(show_progress=False))
    assert bench.built == []


# A process that is killed


def test_a_killed_process_loses_no_finished_kernel(tmp_path: Path) -> None:
    words = "profile --device cpu -m 7 --num_layers 2 --tp 2 --hidden_size 64 --num_attention_heads 4 --vocab_size 256"
    words += " --world_size 8 --global_batch 8 --seq_length 32 --train_iter 3 --l2 hot --profile_only"
    command = [sys.executable, "-m", "aicb", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "profiling 6/" in line:
                break
        process.send_signal(signal.SIGKILL)
    (part,) = tmp_path.rglob("*.partial")
    kept = [json.loads(line) for line in part.read_text().split("\n")[1:-1]]
    assert len(kept) >= 5
    command.append("--resume")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path / done.stdout.strip()
    assert read_profile(path).origin["resumed"].startswith(f"{len(kept)} kernels")
    measured = json.loads(path.with_suffix(".json").read_text())["ranks"][0]["kernels"]
    for entry in kept:
        assert measured[entry["kernel"]]["forward"]["us"] == pytest.approx(entry["times"]["forward"]["us"])
