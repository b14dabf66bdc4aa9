"""The generator against real Megatron-Core: every collective and every parameter count of the recordings, exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from aicb.config.parameters import tensors
from aicb.step.collectives import Collective
from aicb.times.compute import fixed_times
from aicb.workload.reading import totals
from aicb.workload.rows import build
from aicb.workload.simai import header, text
from tests.recordings import FOLDER, Sent, job_of, load, recorded

RECORDINGS = sorted(FOLDER.glob("*.json"))
SCALAR = Collective("ALLREDUCE", "TP", 4)  # optimizer rows; the recording holds them under not_in_the_workload_format


def test_every_recording_is_here() -> None:
    names = {path.stem for path in RECORDINGS}
    assert len(names) >= 119
    assert {"dense_tp8_sp1", "pp4_stage1_tp2_sp1", "moe_a2a_tp2_ep2_dp2_recfull", "mla_tp2_sp1_q96_te"} <= names


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_collectives_equal_the_recording(path: Path) -> None:
    recording = load(path)
    job = job_of(recording["config"])
    ours: Sent = Counter()
    for (column, sent), count in build(job, fixed_times(job, 1)).collectives().items():
        if sent != SCALAR:
            ours[column, sent.kind, sent.group, sent.bytes] += count
    assert ours == recorded(recording)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_written_file_says_the_same(path: Path, tmp_path: Path) -> None:
    """The text itself, read back by `aicb show`, so that words, groups and repeats are held to the recording too."""
    recording = load(path)
    job = job_of(recording["config"])
    written = tmp_path / "workload.txt"
    written.write_bytes(b"".join(text(header(job, 2), build(job, fixed_times(job, 1)), 2)))
    read = totals(written)
    expected_bytes: Counter[tuple[str, str, str]] = Counter()
    expected_calls: Counter[tuple[str, str, str]] = Counter()
    for (column, kind, group, size), count in recorded(recording).items():
        expected_bytes[column, kind, group] += 2 * size * count
        expected_calls[column, kind, group] += 2 * count
    if job.tp > 1:  # three scalars of 4 bytes an iteration
        expected_bytes["fwd", "ALLREDUCE", "TP"] += 2 * 3 * 4
        expected_calls["fwd", "ALLREDUCE", "TP"] += 2 * 3
    assert read.sent == expected_bytes
    assert read.calls == expected_calls


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_parameters_equal_the_recording(path: Path) -> None:
    recording = load(path)
    held = job_of(recording["config"]).parameters()
    assert {"dense": held.dense, "expert": held.expert, "sequence_parallel": held.sequence_parallel} == recording[
        "parameters"
    ]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_tensor_equals_the_recording(path: Path) -> None:
    """Shape by shape: two errors that cancel in a total would still change the optimizer's padded buffer."""
    recording = load(path)
    job = job_of(recording["config"])
    ours: Counter[tuple[tuple[int, ...], bool]] = Counter()
    for tensor in tensors(job.model, job.shard()):
        ours[tensor.shape, tensor.expert] += tensor.count
    theirs = Counter((tuple(shape), kind == "expert") for _, shape, kind, _ in recording["parameter_tensors"])
    assert ours == theirs


@pytest.mark.parametrize(
    "path", [path for path in RECORDINGS if path.stem.startswith("pp")], ids=lambda path: path.stem
)
def test_pp_comm_is_the_recorded_send(path: Path) -> None:
    recording = load(path)
    sends = {sent["bytes"] for sent in recording["not_in_the_workload_format"] if sent["kind"] == "send"}
    assert sends == {job_of(recording["config"]).pp_comm}
