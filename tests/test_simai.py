"""The SimAI text: every defect that the simulator would swallow in silence is found, and none is ever written."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aicb.config.configure import configure
from aicb.config.job import Job
from aicb.errors import UserError
from aicb.step.collectives import Collective
from aicb.times.compute import Nanoseconds, fixed_times
from aicb.workload import simai
from aicb.workload.reading import check, totals
from aicb.workload.rows import Iteration, Row, build

ROOT = Path(__file__).resolve().parent.parent
KEYWORD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
# TP 2, PP 2 of 16 GPUs: 4 data-parallel ranks, 2 of them in each group of an expert shard's replicas.
HEADER = {
    "model_parallel_NPU_group": "2",
    "ep": "2",
    "pp": "2",
    "vpp": "3",
    "ga": "4",
    "all_gpus": "16",
    "checkpoints": "0",
    "checkpoint_initiates": "0",
    "pp_comm": "8192",
}
NEEDED = ("model_parallel_NPU_group", "ep", "pp", "vpp", "ga", "all_gpus", "pp_comm")
ROWS = (
    "grad_gather -1 0 NONE 0 0 NONE 0 0 ALLGATHER 4096 100",
    "grad_param_comm -1 0 NONE 0 0 NONE 0 0 REDUCESCATTER 8192 100",
    "moe_grad_norm1 -1 0 NONE 0 0 NONE 0 0 ALLGATHER_DP_EP 4096 100",
    "embedding_layer -1 799000 ALLREDUCE 8192 0 NONE 0 799000 NONE 0 100",
    "attention_layer -1 10 ALLREDUCE 8192 20 ALLREDUCE 8192 30 NONE 0 100",
    "mlp_moelayer -1 10 ALLTOALL_EP 8192 20 ALLTOALL_EP 8192 30 NONE 0 100",
    "every_column -1 10 ALLGATHER 8192 20 REDUCESCATTER_EP 8192 30 ALLREDUCE 8192 100",
)
EVERY_COLUMN, EVERY_LINE = ROWS[-1].split(), 9  # the last row and its line
TIMES, WORDS, SIZES, PROCESS = (2, 5, 8), (3, 6, 9), (4, 7, 10), 11  # fields, from 0
LIMIT = 17179869184  # 16 GiB
KINDS = ("ALLREDUCE", "ALLGATHER", "REDUCESCATTER", "ALLTOALL")


def head(**changed: str) -> str:
    """Line 1; a key set to "" is left out."""
    pairs = {**HEADER, **changed}
    return " ".join([KEYWORD, *(f"{key}: {value}" for key, value in pairs.items() if value)])


def workload(*rows: str, first: str = head(), count: str | None = None) -> str:
    lines = rows or ROWS
    return "\n".join([first, str(len(lines)) if count is None else count, *lines]) + "\n"


def with_fields(**changed: str) -> str:
    """The sound workload with fields of its last row replaced: f4="0"."""
    row = list(EVERY_COLUMN)
    for name, value in changed.items():
        row[int(name[1:])] = value
    return workload(*ROWS[:-1], "\t".join(row))


def lines_found(text: str | bytes, folder: Path) -> list[int]:
    return [line for line, _ in findings(text, folder)]


def findings(text: str | bytes, folder: Path) -> list[tuple[int, str]]:
    path = folder / "workload.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    found = [(finding.line, finding.text) for finding in check(path)]
    assert all("\n" not in finding and finding for _, finding in found)
    return found


# --- sound files -----------------------------------------------------------------------------------------------------

ONE_GPU = {"model_parallel_NPU_group": "1", "ep": "1", "pp": "1", "all_gpus": "1", "pp_comm": "0"}
SOUND = {
    "as it stands": workload(),
    "one GPU": workload("attention_layer -1 10 NONE 0 20 NONE 0 30 NONE 0 100", first=head(**ONE_GPU)),
    "unknown keys are the writer's own": workload(first=head(pp_rank="1", note="sound", gb="1.5")),
    "keys in another order": workload(
        first=f"{KEYWORD} {' '.join(reversed([f'{k}: {v}' for k, v in HEADER.items()]))}"
    ),
    "no checkpoints": workload(first=head(checkpoints="", checkpoint_initiates="")),
    "CRLF line ends": workload().replace("\n", "\r\n"),
    "no line end after the last row": workload().rstrip("\n"),
    "tabs": workload().replace(" ", "\t"),
    "blank lines after the last row": workload() + "\n \n\n",
    "the longest time": with_fields(f2="2147483583", f5="2147483583", f8="2147483583"),
    "header values at int32's end": workload(first=head(pp_comm="2147483647", ga="2147483647", vpp="1")),
    # 16 GiB itself is fine; an all-reduce, the other EP collectives and the wg column may be larger.
    "largest gather and scatter": with_fields(f3="ALLGATHER", f4=str(LIMIT), f6="REDUCESCATTER", f7=str(LIMIT)),
    "largest all-to-all": with_fields(f3="ALLTOALL", f4=str(LIMIT), f6="ALLTOALL_EP", f7=str(LIMIT)),
    "large all-reduces": with_fields(f3="ALLREDUCE", f4=str(LIMIT + 1), f6="ALLREDUCE_EP", f7=str(LIMIT + 1)),
    "large EP gather and scatter": with_fields(
        f3="ALLGATHER_EP", f4=str(LIMIT + 1), f6="REDUCESCATTER_EP", f7=str(LIMIT + 1)
    ),
    "large wg": with_fields(f9="ALLGATHER", f10=str(4 * LIMIT)),
    "large wg over DP/EP": with_fields(f9="REDUCESCATTER_DP_EP", f10=str(4 * LIMIT)),
}


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND.keys())
def test_a_sound_workload_has_no_finding(text: str, tmp_path: Path) -> None:
    assert findings(text, tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fields", "suffixes"), [((3, 6), ("", "_EP")), ((9,), ("", "_DP_EP"))])
def test_every_word_the_format_knows_is_accepted(
    kind: str, fields: tuple[int, ...], suffixes: tuple[str, ...], tmp_path: Path
) -> None:
    for field in fields:
        for suffix in suffixes:
            assert findings(with_fields(**{f"f{field}": kind + suffix}), tmp_path) == []


SMALL = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "seq_length": 16,
    "tensor_model_parallel_size": 1, "world_size": 8, "global_batch": 16,
}  # fmt: skip
MOE = {"num_experts": 4, "moe_ffn_hidden_size": 32, "n_shared_expert": 1, "n_dense_layers": 1}
SPLITS: list[dict[str, Any]] = [
    {},
    {"world_size": 1, "global_batch": 2},
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "enable_sequence_parallel": True, "pipeline_model_parallel": 2},
    {"tensor_model_parallel_size": 4, "pipeline_model_parallel": 2, "use_distributed_optimizer": False},
    {**MOE},
    {**MOE, "expert_model_parallel_size": 4},
    {**MOE, "expert_model_parallel_size": 8, "num_experts": 8, "recompute_granularity": "full"},
    {**MOE, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "enable_sequence_parallel": True,
     "pipeline_model_parallel": 2},
]  # fmt: skip


@pytest.mark.parametrize("typed", SPLITS)
def test_what_we_write_has_no_finding(typed: dict[str, Any], tmp_path: Path) -> None:
    job = small_job(**typed)
    for rank in range(job.pp):
        stage = job.at(rank)
        written = b"".join(simai.text(simai.header(stage, 2), build(stage, fixed_times(stage, 1)), 2))
        assert findings(written, tmp_path) == []


def small_job(**typed: Any) -> Job:
    return configure({**SMALL, **typed}).job


# --- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_header_key_is_found(key: str, tmp_path: Path) -> None:
    ((line, text),) = findings(workload(first=head(**{key: ""})), tmp_path)
    assert line == 1
    assert key in text


@pytest.mark.parametrize("key", NEEDED)
def test_a_zero_in_the_header_is_found(key: str, tmp_path: Path) -> None:
    """Of pp_comm too: this file has two stages."""
    ((line, text),) = findings(workload(first=head(**{key: "0"})), tmp_path)
    assert line == 1
    assert key in text


@pytest.mark.parametrize("key", HEADER)
@pytest.mark.parametrize(
    "value", ["2.0", "1e9", "+2", "-2", "0x10", "1_000", "8,192", "2147483648", "9" * 25, "9" * 6000, "two", "²", "٢"]
)
def test_what_stoi_would_misread_is_found(key: str, value: str, tmp_path: Path) -> None:
    ((line, text),) = findings(workload(first=head(**{key: value})), tmp_path)
    assert line == 1
    assert f"{key}:" in text


@pytest.mark.parametrize("key", HEADER)
def test_a_missing_blank_after_the_colon_is_found(key: str, tmp_path: Path) -> None:
    first = head().replace(f" {key}: ", f" {key}:")
    ((line, text),) = findings(workload(first=first), tmp_path)
    assert line == 1
    assert "blank" in text
    assert key in text


@pytest.mark.parametrize("key", HEADER)
def test_a_key_given_twice_is_found(key: str, tmp_path: Path) -> None:
    ((line, text),) = findings(workload(first=f"{head()} {key}: {HEADER[key]}"), tmp_path)
    assert line == 1
    assert "twice" in text
    assert key in text


@pytest.mark.parametrize("key", HEADER)
def test_a_key_without_value_is_found(key: str, tmp_path: Path) -> None:
    first = head(**{key: ""}) + f" {key}:"
    ((line, text),) = findings(workload(first=first), tmp_path)
    assert line == 1
    assert key in text


@pytest.mark.parametrize("keyword", ["HYBRID_TRANSFORMER", KEYWORD.lower(), "MODEL", f"\ufeff{KEYWORD}", ""])
def test_a_wrong_keyword_is_found(keyword: str, tmp_path: Path) -> None:
    ((line, text),) = findings(workload(first=head().replace(KEYWORD, keyword)), tmp_path)
    assert line == 1
    assert KEYWORD in text


def test_an_empty_header_is_found(tmp_path: Path) -> None:
    assert lines_found(workload(first=""), tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pp_comm": "8388608.0"}, "8388608.0"),  # the reference generator's own
        ({"pp": "1", "pp_comm": "8192", "all_gpus": "8"}, "pp_comm"),  # one stage sends to no other
        ({"all_gpus": "18"}, "all_gpus"),  # 18 GPUs are no multiple of 2 x 2
        ({"ep": "3"}, "ep"),  # 4 data-parallel ranks are no multiple of 3
    ],
)
def test_header_values_that_cannot_be_are_found(changed: dict[str, str], named: str, tmp_path: Path) -> None:
    text = workload("attention_layer -1 1 NONE 0 1 NONE 0 1 NONE 0 100", first=head(**changed))
    ((line, finding),) = findings(text, tmp_path)
    assert line == 1
    assert named in finding


def test_two_defects_of_one_header_are_both_found(tmp_path: Path) -> None:
    """Whoever mends a file must not find the next defect only after the first is gone."""
    found = [text for line, text in findings(workload(first=head(ep="2.0", ga="0", vpp="")), tmp_path) if line == 1]
    for named in ("ep: '2.0'", "ga: 0", "vpp"):
        assert any(named in text for text in found), f"{named} is not reported: {found}"


# --- the count -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["6", "8", "0", "70"])
def test_a_wrong_count_is_found(count: str, tmp_path: Path) -> None:
    ((line, text),) = findings(workload(count=count), tmp_path)
    assert line == 2
    assert count in text
    assert "7 found" in text


@pytest.mark.parametrize("count", ["seven", "7.0", "+7", "-7", "7 7", "0x7", "", "2147483648", "9" * 5000, "²"])
def test_a_count_that_is_no_number_is_found(count: str, tmp_path: Path) -> None:
    assert lines_found(workload(count=count), tmp_path) == [2]


def test_a_missing_count_is_found(tmp_path: Path) -> None:
    assert lines_found("\n".join([head(), *ROWS]) + "\n", tmp_path) == [2]


def test_a_header_alone_is_found(tmp_path: Path) -> None:
    assert lines_found(head() + "\n", tmp_path) == [2]


def test_a_file_cut_within_a_row_is_found(tmp_path: Path) -> None:
    assert lines_found(workload()[:-20], tmp_path) == [EVERY_LINE]


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [EVERY_COLUMN[:11], [*EVERY_COLUMN, "0"], EVERY_COLUMN[:1], ["a", *EVERY_COLUMN]])
def test_a_row_without_exactly_12_fields_is_found(row: list[str], tmp_path: Path) -> None:
    ((line, text),) = findings(workload(*ROWS[:2], " ".join(row), *ROWS[2:]), tmp_path)
    assert line == 5  # two lines of header, two rows, then this one
    assert f"{len(row)} fields" in text


NO_INTEGERS = ("1.5", "1.0", "+1", "1_000", "1,000", "1e3", "0x10", "nan", "NONE", "10ns", "²", "٢")


@pytest.mark.parametrize("field", [*TIMES, *SIZES, PROCESS])
@pytest.mark.parametrize("value", [*NO_INTEGERS, "-1", "-0"])
def test_a_number_that_is_no_plain_integer_is_found(field: int, value: str, tmp_path: Path) -> None:
    ((line, text),) = findings(with_fields(**{f"f{field}": value}), tmp_path)
    assert line == EVERY_LINE
    assert value in text


@pytest.mark.parametrize("value", [*NO_INTEGERS, "--1", "-"])
def test_a_placeholder_that_is_no_integer_is_found(value: str, tmp_path: Path) -> None:
    assert lines_found(with_fields(f1=value), tmp_path) == [EVERY_LINE]


@pytest.mark.parametrize("field", TIMES)
@pytest.mark.parametrize("value", ["2147483584", "2147483647", "4294967296", "9" * 19, "9" * 20, "9" * 5000])
def test_a_time_that_hangs_the_simulator_is_found(field: int, value: str, tmp_path: Path) -> None:
    ((line, text),) = findings(with_fields(**{f"f{field}": value}), tmp_path)
    assert line == EVERY_LINE
    assert "2147483583" in text


@pytest.mark.parametrize("field", SIZES)
def test_a_size_beyond_64_bits_is_found(field: int, tmp_path: Path) -> None:
    assert lines_found(with_fields(**{f"f{field}": "18446744073709551616"}), tmp_path) == [EVERY_LINE]


@pytest.mark.parametrize("field", WORDS)
@pytest.mark.parametrize(
    "word",
    [
        *("allreduce", "AllReduce", "ALL_REDUCE", "ALLREDUCES", "ALREDUCE", "REDUCE_SCATTER", "BROADCAST", "SENDRECV"),
        *("none", "None", "NONE_EP", "NONE,", "0", "-", "_EP", "ALLREDUCE_", "ALLREDUCE_TP", "ALLREDUCE_DP"),
        *("ALLREDUCE_ep", "ALLREDUCE_EP_DP", "ALLREDUCE_EP_EP", "ALLTOALL_DPEP", "ALLGATHER-EP", "ALLREDUCE_DP_EP_"),
    ],
)
def test_a_word_that_silently_costs_nothing_is_found(field: int, word: str, tmp_path: Path) -> None:
    ((line, text),) = findings(with_fields(**{f"f{field}": word}), tmp_path)
    assert line == EVERY_LINE
    assert word in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("field", "suffix"), [(3, "_DP_EP"), (6, "_DP_EP"), (9, "_EP")])
def test_a_suffix_that_means_another_group_is_found(kind: str, field: int, suffix: str, tmp_path: Path) -> None:
    ((line, text),) = findings(with_fields(**{f"f{field}": kind + suffix}), tmp_path)
    assert line == EVERY_LINE
    assert suffix in text


@pytest.mark.parametrize("field", WORDS)
def test_none_with_a_size_is_found(field: int, tmp_path: Path) -> None:
    ((line, text),) = findings(with_fields(**{f"f{field}": "NONE"}), tmp_path)
    assert line == EVERY_LINE
    assert "8192" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", WORDS)
def test_a_collective_of_size_0_is_found(kind: str, field: int, tmp_path: Path) -> None:
    """`REDUCESCATTER 0` in its column rows is the reference generator's."""
    ((line, text),) = findings(with_fields(**{f"f{field}": kind, f"f{field + 1}": "0"}), tmp_path)
    assert line == EVERY_LINE
    assert kind in text


ONE_RANK = {
    "TP": ({"model_parallel_NPU_group": "1", "all_gpus": "8"}, "", (3, 6)),  # DP 8 / 2 = 4
    "EP": ({"ep": "1"}, "_EP", (3, 6)),
    "DP": ({"all_gpus": "4", "ep": "1"}, "", (9,)),  # 4 GPUs / (2 x 2)
    "DP_EP": ({"ep": "4"}, "_DP_EP", (9,)),  # 4 data-parallel ranks / 4
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", ONE_RANK)
def test_a_collective_over_one_rank_is_found(group: str, kind: str, tmp_path: Path) -> None:
    changed, suffix, fields = ONE_RANK[group]
    for field in fields:
        row = "one_rank -1 10 NONE 0 20 NONE 0 30 NONE 0 100".split()
        row[field : field + 2] = [kind + suffix, "8192"]
        ((line, text),) = findings(workload(" ".join(row), first=head(**changed)), tmp_path)
        assert line == 3
        assert f"{group} group has one rank" in text


@pytest.mark.parametrize("field", [3, 6])
@pytest.mark.parametrize("word", ["ALLGATHER", "REDUCESCATTER", "ALLTOALL", "ALLTOALL_EP"])
def test_a_collective_above_16_gib_is_found(field: int, word: str, tmp_path: Path) -> None:
    ((line, text),) = findings(with_fields(**{f"f{field}": word, f"f{field + 1}": "17179869185"}), tmp_path)
    assert line == EVERY_LINE
    assert "17179869184" in text


def test_a_name_with_a_comma_is_found(tmp_path: Path) -> None:
    assert lines_found(with_fields(f0="attention,layer"), tmp_path) == [EVERY_LINE]


def test_a_name_with_a_blank_is_found(tmp_path: Path) -> None:
    assert lines_found(with_fields(f0="attention layer"), tmp_path) == [EVERY_LINE]


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "\x1c", "\x1f", "\x85"])
def test_a_blank_that_separates_nothing_in_c_is_found(blank: str, tmp_path: Path) -> None:
    """The simulator's `>>` splits at ASCII blanks only: to it these two words are one."""
    assert lines_found(workload(*ROWS[:-1], ROWS[-1].replace(" 20 ", f" 20{blank}")), tmp_path) == [EVERY_LINE]


def test_a_blank_that_separates_nothing_in_the_header_is_found(tmp_path: Path) -> None:
    assert lines_found(workload(first=head().replace("ga: ", "ga:\u00a0")), tmp_path) == [1]


@pytest.mark.parametrize("empty", ["", "  ", "\t", "\r"])
def test_an_empty_line_between_rows_is_found(empty: str, tmp_path: Path) -> None:
    ((line, text),) = findings(workload(*ROWS[:3], empty, *ROWS[3:], count="7"), tmp_path)
    assert line == 6  # two lines of header, three rows, then this one
    assert "empty" in text


@pytest.mark.parametrize("comment", ["# a comment", "# a comment of exactly as many words as a row of the format has"])
def test_a_comment_is_found(comment: str, tmp_path: Path) -> None:
    found = lines_found(workload(*ROWS[:3], comment, *ROWS[3:]), tmp_path)
    assert set(found) == {6}


@pytest.mark.parametrize(
    "row",
    [
        "moe_grad_norm1 -1 1 NONE 0 1 NONE 0 1 ALLGATHER_DP_EP 0 100",
        "moe_grad_norm2 -1 1 NONE 0 1 NONE 0 1 REDUCESCATTER_DP_EP 0 100",
        "attention_column -1 1 ALLGATHER 8192 1 REDUCESCATTER 0 1 NONE 0 100",
    ],
)
def test_what_the_reference_generator_writes_wrong_is_found(row: str, tmp_path: Path) -> None:
    assert lines_found(workload(*ROWS, row), tmp_path) == [10]


def test_every_faulty_row_is_found_at_its_line(tmp_path: Path) -> None:
    """Equal lines too: a cache of lines already seen may only hold sound ones."""
    bad = "mlp_layer -1 1.5 NONE 0 1 NONE 0 1 NONE 0 100"
    assert lines_found(workload(ROWS[0], bad, ROWS[1], bad, ROWS[2], bad), tmp_path) == [4, 6, 8]


def test_a_defect_far_into_a_long_file_is_found_at_its_line(tmp_path: Path) -> None:
    rows = [*ROWS * 20_000, "mlp_layer -1 1 ALLREDUCE 0 1 NONE 0 1 NONE 0 100", *ROWS * 2_000]
    assert lines_found(workload(*rows), tmp_path) == [140_003]  # 2 lines of header, 140,000 rows, then this one


def test_a_finding_is_short_whatever_the_line(tmp_path: Path) -> None:
    for row in (with_fields(f0="x," * 20_000), with_fields(f3="X" * 40_000), with_fields(f1="9a" * 20_000)):
        ((_, text),) = findings(row, tmp_path)
        assert len(text) < 1000


# --- what is no workload at all --------------------------------------------------------------------------------------


def test_an_empty_file_is_found(tmp_path: Path) -> None:
    assert lines_found("", tmp_path) == [1, 2]


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a text file"):
        findings(bytes(range(256)) * 100, tmp_path)


def test_bytes_that_are_no_utf8_are_found_not_a_crash(tmp_path: Path) -> None:
    assert lines_found(workload().encode().replace(b"8192 100", b"\xff\xfe 100"), tmp_path)


def test_a_huge_line_is_refused(tmp_path: Path) -> None:
    for text in ("x" * 3_000_000, f"{head()}\n1\n{'x ' * 2_000_000}\n"):
        with pytest.raises(UserError, match="not a workload"):
            findings(text, tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "endless"):
        with pytest.raises(UserError, match="not a regular file"):
            list(check(path))
    with pytest.raises(UserError, match="no such file"):
        list(check(tmp_path / "missing.txt"))


def aicb(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aicb", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = aicb("check", tmp_path / "fifo")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "not a regular file" in done.stderr


def test_the_command_says_file_and_line_and_exits_1(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text(workload())
    bad.write_text(with_fields(f2="1.5"))
    done = aicb("check", good)
    assert (done.returncode, done.stderr) == (0, "")
    done = aicb("check", good, bad)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{bad}:9: error: fwd_time '1.5'" in done.stdout


def test_the_command_refuses_what_is_missing_with_exit_2(tmp_path: Path) -> None:
    done = aicb("check", tmp_path / "missing.txt")
    assert done.returncode == 2
    assert done.stderr.startswith("aicb: error: ")
    assert "no such file" in done.stderr


def test_the_command_shows_no_endless_list(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(workload(*["a -1 x NONE 0 1 NONE 0 1 NONE 0 100"] * 5000))
    done = aicb("check", path)
    assert done.returncode == 1
    assert done.stdout.count("\n") < 200
    assert "findings more" in done.stdout


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    text = bytearray(workload().encode())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        bits = st.sampled_from(
            [b"0", b"-", b"1e9", b"9" * 30, b"NONE", b"_EP", b"\n", b"\r", b" ", b"\t", b":", b"\xff"]
        )
        text[start:end] = draw(bits | st.binary(max_size=6))
    return bytes(text)


@given(content=mutated())
def test_no_content_is_a_crash(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """And what has no error can be totalled: `aicb show` trusts the checker."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.txt"
    path.write_bytes(content)
    try:
        found = list(check(path))
    except UserError:
        return
    if any(finding.level == "error" for finding in found):
        with pytest.raises(UserError):
            totals(path)
    else:
        assert totals(path).rows == int(content.split(b"\n")[1])


def test_the_time_of_a_check_grows_as_the_file_does(tmp_path: Path) -> None:
    def seconds(copies: int) -> float:
        path = tmp_path / f"{copies}.txt"
        path.write_text(workload(*ROWS[3:6] * copies))
        start = time.process_time()
        assert list(check(path)) == []
        return time.process_time() - start

    short = min(seconds(5_000) for _ in range(3))
    assert min(seconds(100_000) for _ in range(2)) < 100 * short  # 20 times the rows; were it quadratic, 400 times


# --- the writer ------------------------------------------------------------------------------------------------------

NUMBERS = {key: int(value) for key, value in HEADER.items()}
ROW = Row("mlp_layer", Nanoseconds(1, 2, 3), None, None, None)


def one_row(row: Row) -> Iteration:
    return Iteration((), (row,), (), 1)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (ROW._replace(time=Nanoseconds(2147483584, 0, 0)), "fwd_time 2147483584"),
        (ROW._replace(time=Nanoseconds(0, 2147483584, 0)), "ig_time 2147483584"),
        (ROW._replace(time=Nanoseconds(0, 0, 2147483584)), "wg_time 2147483584"),
        (ROW._replace(time=Nanoseconds(-1, 0, 0)), "-1"),
        (ROW._replace(fwd=Collective("ALLGATHER", "TP", LIMIT + 1)), "17179869185"),
        (ROW._replace(ig=Collective("REDUCESCATTER", "TP", LIMIT + 1)), "17179869185"),
        (ROW._replace(ig=Collective("ALLTOALL", "EP", LIMIT + 1)), "17179869185"),
        (ROW._replace(wg=Collective("ALLREDUCE", "DP", 0)), "ALLREDUCE"),
        (ROW._replace(wg=Collective("BROADCAST", "DP", 8)), "BROADCAST"),
        (ROW._replace(name="mlp,layer"), "comma"),
    ],
)
def test_the_writer_refuses_a_row_that_the_checker_would_find(row: Row, named: str) -> None:
    with pytest.raises(UserError) as caught:
        list(simai.text(NUMBERS, one_row(row), 1))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [{"pp_comm": 2**31}, {"all_gpus": 2**31}, {"ga": 0}, {"vpp": 0}, {"ep": 3}, {"pp": 1}, {"pp_comm": 0}],
)
def test_the_writer_refuses_a_header_that_the_checker_would_find(changed: dict[str, int]) -> None:
    with pytest.raises(UserError, match="cannot read this workload"):
        list(simai.text({**NUMBERS, **changed}, one_row(ROW), 1))


def test_the_writer_refuses_a_collective_over_one_rank() -> None:
    alone = {**NUMBERS, "model_parallel_NPU_group": 1, "all_gpus": 8}
    with pytest.raises(UserError, match="one rank"):
        list(simai.text(alone, one_row(ROW._replace(fwd=Collective("ALLREDUCE", "TP", 8))), 1))


def test_the_writer_refuses_more_rows_than_can_be_counted() -> None:
    with pytest.raises(UserError, match="2147483648 rows"):
        next(simai.text(NUMBERS, one_row(ROW), 2**31))


def test_a_long_sequence_is_refused_by_pp_comm() -> None:
    """2 bytes x 8192 x 32768 x hidden 4096 = 2^41 bytes of one send; stoi stops at 2^31 - 1."""
    job = configure({"model_size": "7", "pipeline_model_parallel": 2, "micro_batch": 8192, "seq_length": 32768,
                     "global_batch": 8192 * 4}).job  # fmt: skip
    with pytest.raises(UserError, match="pp_comm: 2199023255552"):
        next(simai.text(simai.header(job, 1), build(job, fixed_times(job, 1)), 1))


HEAD_LINE = f"{KEYWORD} {' '.join(f'{key}: {value}' for key, value in HEADER.items())}\n"
START = (ROW._replace(name="grad_gather", time=Nanoseconds(), wg=Collective("ALLGATHER", "DP", 4096)),)
BODY = tuple(
    ROW._replace(name=f"layer{i}", fwd=Collective("ALLREDUCE", "TP", 8192), ig=Collective("ALLTOALL", "EP", 64))
    for i in range(20)
)
END = (ROW._replace(name="optimizer1", time=Nanoseconds(), fwd=Collective("ALLREDUCE", "TP", 4)),)
START_TEXT = "grad_gather\t-1\t0\tNONE\t0\t0\tNONE\t0\t0\tALLGATHER\t4096\t100\n"
BODY_TEXT = "".join(f"layer{i}\t-1\t1\tALLREDUCE\t8192\t2\tALLTOALL_EP\t64\t3\tNONE\t0\t100\n" for i in range(20))
END_TEXT = "optimizer1\t-1\t0\tALLREDUCE\t4\t0\tNONE\t0\t0\tNONE\t0\t100\n"


@pytest.mark.parametrize("ga", [1, 2, 999, 5000])
def test_streaming_equals_putting_it_together(ga: int) -> None:
    chunks = list(simai.text(NUMBERS, Iteration(START, BODY, END, ga), 1))
    rows = 1 + 20 * ga + 1
    assert b"".join(chunks).decode() == f"{HEAD_LINE}{rows}\n{START_TEXT}{BODY_TEXT * ga}{END_TEXT}"
    assert max(map(len, chunks)) < 2**21  # memory does not grow with ga


def test_three_iterations_are_the_rows_three_times() -> None:
    written = b"".join(simai.text(NUMBERS, Iteration(START, BODY, END, 2), 3)).decode()
    once = START_TEXT + BODY_TEXT * 2 + END_TEXT
    assert written == f"{HEAD_LINE}126\n{once * 3}"  # 3 x (1 + 2 x 20 + 1)


def test_a_stage_without_micro_batch_rows_is_written() -> None:
    assert b"".join(simai.text(NUMBERS, Iteration(START, (), END, 4), 1)).decode() == (
        f"{HEAD_LINE}2\n{START_TEXT}{END_TEXT}"
    )


# --- replacing files -------------------------------------------------------------------------------------------------


def write(path: Path, iterations: int = 1, force: bool = False, row: Row = ROW) -> None:
    simai.write(path, NUMBERS, one_row(row), iterations, force)


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_different_workload_is_not_replaced_without_force(tmp_path: Path) -> None:
    path = tmp_path / "results" / "workload.txt"
    write(path)
    before, written = path.read_bytes(), path.stat().st_mtime_ns
    write(path)  # the same again is no conflict
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UserError, match="--force"):
        write(path, iterations=2)
    assert path.read_bytes() == before
    write(path, iterations=2, force=True)
    after = path.read_text()
    assert after.splitlines()[1:] == ["2", *["mlp_layer\t-1\t1\tNONE\t0\t2\tNONE\t0\t3\tNONE\t0\t100"] * 2]
    assert everything_in(path.parent) == ["workload.txt"]


@pytest.mark.parametrize(
    "change", [lambda text: text[:-1], lambda text: text + b"\n", lambda _: b""], ids=["cut", "longer", "empty"]
)
def test_a_file_that_only_begins_alike_is_different(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "workload.txt"
    write(path)
    other = change(path.read_bytes())
    path.write_bytes(other)
    with pytest.raises(UserError, match="different"):
        write(path)
    assert path.read_bytes() == other


@pytest.mark.parametrize("force", [False, True])
def test_a_broken_rule_leaves_nothing_behind(force: bool, tmp_path: Path) -> None:
    faulty = ROW._replace(time=Nanoseconds(2147483584, 0, 0))
    with pytest.raises(UserError, match="2147483584"):
        write(tmp_path / "results" / "workload.txt", row=faulty, force=force)
    assert everything_in(tmp_path) == []
    write(tmp_path / "workload.txt")
    before = (tmp_path / "workload.txt").read_bytes()
    with pytest.raises(UserError, match="2147483584"):
        write(tmp_path / "workload.txt", row=faulty, force=force)
    assert (tmp_path / "workload.txt").read_bytes() == before
    assert everything_in(tmp_path) == ["workload.txt"]


def test_a_result_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("mine")
    with pytest.raises(OSError, match="results"):
        write(tmp_path / "results" / "workload.txt")
    assert (tmp_path / "results").read_text() == "mine"


def test_a_folder_in_the_file_s_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "workload.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "workload.txt", force=True)
    assert everything_in(tmp_path) == ["workload.txt"]


@pytest.fixture
def little_space() -> Iterator[None]:
    """write() fails after 64 KiB, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("little_space")
@pytest.mark.parametrize("existed", [False, True])
def test_a_full_disk_loses_nothing(existed: bool, tmp_path: Path) -> None:
    path = tmp_path / "workload.txt"
    if existed:
        write(path)
    before = everything_in(tmp_path), path.read_bytes() if existed else b""
    with pytest.raises(OSError, match="too large") as caught:
        write(path, iterations=10_000, force=True)  # 450 kB
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert (everything_in(tmp_path), path.read_bytes() if existed else b"") == before
