"""`aicb check`: what the simulator misreads is an error, what it survives a warning, its surprises are notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from aicb.cli import main
from aicb.workload.reading import Finding, check

KEYWORD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
SPLIT = "model_parallel_NPU_group: 2 ep: 2 pp: 2 vpp: 3 ga: 4 all_gpus: 16 checkpoints: 0 checkpoint_initiates: 0"
ROW = "attention_column -1 10 ALLGATHER 8388608 20 REDUCESCATTER 8388608 30 NONE 0 100"


def findings(text: str, folder: Path, notes: bool = False) -> list[Finding]:
    path = folder / "workload.txt"
    path.write_text(text)
    return list(check(path, with_notes=notes))


def workload(head: str, *rows: str) -> str:
    return "\n".join([f"{KEYWORD} {head}", str(len(rows)), *rows]) + "\n"


def one(text: str, folder: Path) -> Finding:
    (finding,) = findings(text, folder)
    return finding


# --- two levels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "level", "said"),
    [
        (f"{SPLIT} pp_comm 8192", "warning", "without a colon"),  # as SimAI's shipped workload_analytical.txt
        (f"{SPLIT} pp_comm: 8192 pp_comm 8192", "warning", "without a colon"),
        (f"{SPLIT} pp_comm: 8192 pp_comm 4096", "error", "beside pp_comm: 8192"),
        (f"{SPLIT} pp_comm 4096 pp_comm: 8192", "error", "beside pp_comm: 8192"),
        (f"{SPLIT} pp_comm: 8192 pp_comm", "error", "no value follows"),
        (f"{SPLIT} pp_comm: 8192 pp_comm none", "error", "'none'"),
        (f"{SPLIT} pp_comm: 8192 pp_comm 2147483648", "error", "'2147483648'"),
        (f"{SPLIT} pp_comm: 8388608.0", "warning", "8388608.0"),  # stoi stops at the point
        (f"{SPLIT} pp_comm: +8192", "warning", "+8192"),
        (f"{SPLIT} pp_comm: 1e9", "error", "1e9"),  # it reads 1
        (f"{SPLIT} pp_comm: 8192 ga: 4", "warning", "twice"),
        (f"{SPLIT} pp_comm: 8192 ga: 5", "error", "twice"),
        (SPLIT, "warning", "no pp_comm:"),
        (f"{SPLIT} pp_comm: 0", "warning", "pp_comm: 0 with pp: 2"),
        (f"{SPLIT.replace('all_gpus: 16', '')} pp_comm: 8192", "warning", "no all_gpus:"),
        (f"{SPLIT.replace('vpp: 3', '')} pp_comm: 8192", "error", "no vpp:"),
        (f"{SPLIT.replace('checkpoints: 0', 'checkpoints:0')} pp_comm: 8192", "warning", "blank"),
        (f"{SPLIT.replace('ga: 4', 'ga:4')} pp_comm: 8192", "error", "blank"),
        # Each fits in 32 bits; their product, which the bubble is divided by, does not.
        (f"{SPLIT.replace('ga: 4', 'ga: 715827883')} pp_comm: 8192", "error", "ga: 715827883 x vpp: 3 is above"),
    ],
)
def test_headers(head: str, level: str, said: str, tmp_path: Path) -> None:
    finding = one(workload(head, ROW), tmp_path)
    assert (finding.line, finding.level) == (1, level)
    assert said in finding.text


def test_the_largest_product_of_ga_and_vpp_is_sound(tmp_path: Path) -> None:
    """715827882 x 3 = 2^31 - 2."""
    assert findings(workload(f"{SPLIT.replace('ga: 4', 'ga: 715827882')} pp_comm: 8192", ROW), tmp_path) == []


@pytest.mark.parametrize(
    ("row", "level", "said"),
    [
        (ROW.replace("REDUCESCATTER 8388608", "REDUCESCATTER 0"), "warning", "ig_bytes is 0"),  # as in SimAI's example
        (ROW.replace("NONE 0", "NONE 8"), "warning", "beside NONE"),
        (ROW.replace("attention_column", "a,b"), "warning", "comma"),
        (ROW.replace("ALLGATHER", "AllGather"), "error", "no communication word"),
        (ROW.replace("ALLGATHER", "ALLGATHER_DP_EP"), "error", "suffix"),
        (ROW.replace(" -1 ", " 2147483648 "), "error", "placeholder 2147483648 is outside 32 bits"),
        (ROW.replace(" -1 ", " -2147483649 "), "error", "outside 32 bits"),
        (ROW.replace(" -1 ", f" {'9' * 5000} "), "error", "outside 32 bits"),
        (ROW.replace(" 10 ", " 1.5 "), "error", "fwd_time '1.5'"),
    ],
)
def test_rows(row: str, level: str, said: str, tmp_path: Path) -> None:
    finding = one(workload(f"{SPLIT} pp_comm: 8192", row), tmp_path)
    assert (finding.line, finding.level) == (3, level)
    assert said in finding.text


@pytest.mark.parametrize("placeholder", ["2147483647", "-2147483648", "0", "-0", "0000000000001"])
def test_placeholders_of_32_bits_are_sound(placeholder: str, tmp_path: Path) -> None:
    assert findings(workload(f"{SPLIT} pp_comm: 8192", ROW.replace(" -1 ", f" {placeholder} ")), tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "level"), [("ALLREDUCE 0", "error"), ("ALLREDUCE 8", "warning"), ("ALLREDUCE 1048576", "error")]
)
def test_a_tp_collective_of_one_rank_kills_the_total_only_where_it_gives_nan(
    fields: str, level: str, tmp_path: Path
) -> None:
    row = f"attention_layer -1 10 {fields} 20 NONE 0 30 NONE 0 100"
    head = f"{SPLIT.replace('group: 2', 'group: 1')} pp_comm: 8192"
    assert {finding.level for finding in findings(workload(head, row), tmp_path)} == {level}


def test_a_blank_line_between_rows_is_a_warning(tmp_path: Path) -> None:
    text = workload(f"{SPLIT} pp_comm: 8192", ROW, ROW).replace(f"{ROW}\n", f"{ROW}\n\n", 1)
    assert one(text, tmp_path).level == "warning"


def test_warnings_do_not_hide_what_the_rows_break(tmp_path: Path) -> None:
    """The groups are known from a header that the simulator reads, and one without a colon is such a header."""
    head = SPLIT.replace("group: 2", "group: 1").replace("all_gpus: 16", "all_gpus: 8")
    found = findings(workload(f"{head} pp_comm 8192", ROW), tmp_path)
    assert [(finding.line, finding.level) for finding in found] == [(1, "warning"), (3, "error"), (3, "error")]


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "outside.txt"
    path.write_text(workload(f"{SPLIT} pp_comm 8192", ROW))
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{path}:1: warning: pp_comm 8192" in out
    assert "no error, 1 warning" in out
    assert main(["check", "--strict", str(path)]) == 1
    path.write_text(workload(f"{SPLIT} pp_comm: 8192 pp_comm", ROW))
    assert main(["check", str(path)]) == 1
    assert f"{path}:1: error: pp_comm" in capsys.readouterr().out


# --- files of ours against their own header --------------------------------------------------------------------------


def generated(folder: Path, *words: str) -> Path:
    command = ["generate", "-m", "7", "--tp", "2", "--pp", "2", "--world_size", "16", "--global_batch", "32"]
    assert main([*command, "--result_dir", str(folder), *words]) == 0
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (lambda text: text.replace("pp_rank: 0", "pp_rank: 2"), 1, "pp_rank: 2 must be below pp: 2"),
        (lambda text: text.replace("vpp: 18", "vpp: 19"), 1, "vpp: 19 is above the 18 layers"),
        (lambda text: text.replace("ga: 8", "ga: 5"), 2, "rows embedding_layer are no multiple of ga: 5"),
        (lambda text: text.replace("iterations: 1", "iterations: 3"), 2, "no multiple of iterations: 3"),
        (lambda text: text.replace("iterations: 1", "iterations: 0"), 1, "iterations: must be"),
    ],
)
def test_a_header_that_its_rows_contradict(change: object, line: int, said: str, tmp_path: Path) -> None:
    assert callable(change)
    path = generated(tmp_path)
    assert list(check(path)) == []
    path.write_text(change(path.read_text()))
    assert any((one.line, one.level) == (line, "error") and said in one.text for one in check(path))
    path.write_text(path.read_text().replace(" aicb_version: 100", ""))  # somebody else's: nothing to hold it to
    assert list(check(path)) == []


@pytest.mark.parametrize("number", range(3, 12))
def test_a_lost_row_is_found_though_the_count_was_mended(number: int, tmp_path: Path) -> None:
    path = generated(tmp_path, "--epoch_num", "2")
    lines = path.read_text().splitlines()
    name = lines[number].split()[0]
    del lines[number]
    lines[1] = str(int(lines[1]) - 1)
    path.write_text("\n".join(lines) + "\n")
    found = [one for one in check(path) if one.level == "error"]
    assert [one.line for one in found] == [2]
    assert f"rows {name} are no multiple of" in found[0].text


def test_a_lost_micro_batch_is_found(tmp_path: Path) -> None:
    path = generated(tmp_path)
    lines = path.read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("embedding_layer")]
    del lines[starts[2] : starts[3]]
    lines[1] = str(len(lines) - 2)
    path.write_text("\n".join(lines) + "\n")
    assert any(one.level == "error" and "embedding_layer" in one.text for one in check(path))


def test_short_files_are_held_to_what_they_say(tmp_path: Path) -> None:
    path = generated(tmp_path, "--micro_batches_written", "3")
    text = path.read_text()
    assert " ga: 8 " in text
    assert " micro_batches_written: 3 " in text
    assert text.count("embedding_layer") == 3
    assert list(check(path)) == []
    path.write_text(text.replace("micro_batches_written: 3", "micro_batches_written: 4"))
    assert any("no multiple of micro_batches_written: 4" in one.text for one in check(path))


# --- notes -----------------------------------------------------------------------------------------------------------


def noted(head: str, row: str, folder: Path) -> list[str]:
    found = findings(workload(head, row), folder, notes=True)
    assert {finding.level for finding in found} <= {"note"}
    assert findings(workload(head, row), folder) == []
    return [finding.text for finding in found]


def test_small_collectives_over_odd_groups_are_noted(tmp_path: Path) -> None:
    head = "model_parallel_NPU_group: 6 ep: 1 pp: 1 vpp: 3 ga: 4 all_gpus: 12 pp_comm: 0"
    small, large = (f"attention_layer -1 1 ALLREDUCE {size} 1 NONE 0 1 NONE 0 100" for size in (2**20 - 1, 2**20))
    (note,) = noted(head, small, tmp_path)
    assert "1 collectives under 1 MiB over TP as 0" in note
    assert noted(head, large, tmp_path) == []
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        known = head.replace("group: 6", f"group: {ranks}").replace("all_gpus: 12", f"all_gpus: {ranks}")
        assert noted(known, small, tmp_path) == []
    wide = head.replace("group: 6", "group: 256").replace("all_gpus: 12", "all_gpus: 256")
    assert "groups have 256 ranks" in noted(wide, small, tmp_path)[0]


def test_a_tp_group_over_part_of_a_server_is_noted(tmp_path: Path) -> None:
    head = "model_parallel_NPU_group: {0} ep: 1 pp: 1 vpp: 3 ga: 4 all_gpus: {0} pp_comm: 0"
    row = "attention_layer -1 1 ALLREDUCE 8388608 1 NONE 0 1 NONE 0 100"
    assert "TP group of 12 ranks for one node" in noted(head.format(12), row, tmp_path)[0]
    assert noted(head.format(16), row, tmp_path) == []
    assert noted(head.format(6), row, tmp_path) == []


def test_a_row_near_the_longest_time_is_noted(tmp_path: Path) -> None:
    head = "model_parallel_NPU_group: 2 ep: 1 pp: 1 vpp: 3 ga: 4 all_gpus: 2 pp_comm: 0"
    row = "attention_layer -1 1 ALLREDUCE 8388608 {} NONE 0 1 NONE 0 100"
    (note,) = noted(head, row.format(2_100_000_000), tmp_path)
    assert note.startswith("attention_layer ig takes 2.100 s: above 2.147 s")
    assert noted(head, row.format(1_900_000_000), tmp_path) == []


def test_the_summary_of_generate_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Six ranks of TP: four bytes a token of cross-entropy are 16 KiB."""
    words = ["-m", "7", "--tp", "6", "--world_size", "12", "--num_attention_heads", "24", "--hidden_size", "1536"]
    words += ["--result_dir", str(tmp_path), "--global_batch", "2"]
    assert main(["generate", *words]) == 0
    assert "collectives under 1 MiB over TP as 0: its groups have 6 ranks" in capsys.readouterr().out
