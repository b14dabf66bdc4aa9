"""From two short simulations to the whole iteration, on result files made by hand in the simulator's layout."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from aicb.cli import main
from aicb.errors import UserError
from aicb.workload.extrapolate import extrapolate

COLUMNS = (
    *("Expose DP comm", "Expose DP_EP comm", "Expose TP comm", "Expose_EP_comm", "Expose_PP_comm", "bubble time"),
    *("total comp", "total exposed comm", "Total time"),
)
ROW_HEAD = (
    "layer_name,Analytical_test,fwd compute,wg compute,ig compute,fwd exposed comm,wg exposed comm,ig exposed comm"
)
ONCE = (900, 0, 7, 0, 0, 31, 450, 907, 1388)  # us: what does not depend on the micro-batches
EACH: tuple[Fraction | int, ...] = (
    0,
    0,
    Fraction("120.3"),
    0,
    0,
    Fraction("33.7"),
    Fraction("2000.9"),
    Fraction("120.3"),
    Fraction("2154.9"),
)
STEM = "gpt_7B-fixed_compute-micro_batches_written{}-world_size32-tp4-pp1-ep1-gbs1024-mbs1-seq4096-MOE-False"
HEADER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 1 pp: {pp} vpp: 36 ga: {ga} all_gpus: 32 "
HEADER += "checkpoints: 0 checkpoint_initiates: 0 pp_comm: 0 pp_rank: {rank} iterations: 1 micro_batches_written: {k} "
HEADER += "aicb_version: 100"


def exact(micro_batches: int) -> list[Fraction]:
    return [Fraction(once) + micro_batches * Fraction(each) for once, each in zip(ONCE, EACH, strict=True)]


def result(folder: Path, name: str, written: int, once: int = 1, values: list[str] | None = None) -> Path:
    """What the simulator leaves after `written` micro-batches of two layers."""
    figures = exact(written)
    shown = [f"{int(value)} ({float(100 * value / figures[-1]):.2f}%)" for value in figures[:-1]] + [
        str(int(figures[-1]))
    ]
    rows = ["grad_gather,Analytical_test,0,0,0,0,900,0"] * once
    rows += ["attention_layer,Analytical_test,1000,500,500,60,0,60"] * (2 * written)
    run = name.removesuffix("EndToEnd.csv")
    lines = [ROW_HEAD, *rows, ",".join(["File name", *COLUMNS]), ",".join([run, *(values or shown)])]
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def pair(folder: Path, long: int = 17) -> tuple[Path, Path]:
    one, other = (result(folder, f"{STEM.format(k)}-EndToEnd.csv", k) for k in (1, long))
    return one, other


def test_the_whole_iteration_from_the_names_alone(tmp_path: Path) -> None:
    """ga is 1024 / (32 / 4) = 128; the simulator's names of its own say it outright."""
    found = extrapolate(pair(tmp_path))
    assert (found.ga, found.written) == (128, (1, 17))
    for column, value in zip(COLUMNS, exact(128), strict=True):
        estimate = found.figures[column]
        assert abs(estimate.value - value) <= estimate.error
        assert estimate.error == Fraction(127, 16)  # a microsecond, carried 127 micro-batches from 16
    assert extrapolate(tuple(reversed(pair(tmp_path)))) == found
    own = [f"gpt_7B-micro_batches_written{k}-tp4-pp1-dp8-ga128-ep1-NVL8-DP0-EndToEnd.csv" for k in (1, 17)]
    results = [result(tmp_path, name, k) for name, k in zip(own, (1, 17), strict=True)]
    assert extrapolate(results).figures == found.figures


def test_whole_microseconds_are_exact(tmp_path: Path) -> None:
    one = result(tmp_path, f"{STEM.format(1)}-EndToEnd.csv", 1, values=["10 (1.00%)"] * 8 + ["1000"])
    other = result(tmp_path, f"{STEM.format(17)}-EndToEnd.csv", 17, values=["170 (1.00%)"] * 8 + ["9000"])
    found = extrapolate((one, other))
    assert found.figures["Total time"].value == 1000 + 127 * 500
    assert found.figures["bubble time"].value == 10 + 127 * 10


def test_decimals_are_kept_and_narrow_the_error(tmp_path: Path) -> None:
    one = result(tmp_path, f"{STEM.format(1)}-EndToEnd.csv", 1, values=["10.25 (1.00%)"] * 8 + ["1000.50"])
    other = result(tmp_path, f"{STEM.format(17)}-EndToEnd.csv", 17, values=["170.25 (1.00%)"] * 8 + ["9000.50"])
    found = extrapolate((one, other)).figures["Total time"]
    assert (found.value, found.error) == (Fraction(1000.5) + 127 * 500, Fraction(127, 1600))


def test_the_workload_beside_the_result_counts_more_than_names(tmp_path: Path) -> None:
    one, other = (result(tmp_path, f"{name}-EndToEnd.csv", k) for name, k in (("a", 1), ("b", 17)))
    with pytest.raises(UserError, match="--workload"):
        extrapolate((one, other))
    for name, k in (("a", 1), ("b", 17)):
        (tmp_path / f"{name}.txt").write_text(HEADER.format(pp=1, ga=64, rank=0, k=k) + "\n1\n")
    assert extrapolate((one, other)).ga == 64
    elsewhere = [tmp_path / "a.txt", tmp_path / "b.txt"]
    moved = [path.rename(tmp_path / f"{path.stem}-moved") for path in (one, other)]
    assert extrapolate(moved, elsewhere).ga == 64


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"ga": 32}, "not results of one pair"), ({"rank": 1}, "not results of one pair"), ({"k": 1}, "both have 1")],
)
def test_workloads_that_are_no_pair_are_refused(changed: dict[str, int], said: str, tmp_path: Path) -> None:
    one, other = (result(tmp_path, f"{name}-EndToEnd.csv", k) for name, k in (("a", 1), ("b", 17)))
    known = {"pp": 2, "ga": 64, "rank": 0}
    (tmp_path / "a.txt").write_text(HEADER.format(**known, k=1) + "\n1\n")
    (tmp_path / "b.txt").write_text(HEADER.format(**{**known, "k": 17, **changed}) + "\n1\n")
    with pytest.raises(UserError, match=said):
        extrapolate((one, other))


def test_results_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    with pytest.raises(UserError, match="both have 1 micro-batches"):
        extrapolate((one, one))
    stage = result(tmp_path, f"gpt_7B-pp_rank1-{STEM.format(17)[7:]}-EndToEnd.csv", 17)
    with pytest.raises(UserError, match="not results of one pair"):
        extrapolate((one, stage))
    longer = result(tmp_path, other.name, 17, once=2)  # the name of the pair, the rows of another stage
    with pytest.raises(UserError, match="1 and 2 rows grad_gather"):
        extrapolate((one, longer))
    with pytest.raises(UserError, match="--workload is there 1 time"):
        extrapolate((one, other), [tmp_path / "a.txt"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no summary"),
        ("File name,Total time\n", "no summary"),
        ("File name,Total time\nx\n", "1 values for 2 columns"),
        ("File name,Total time\nx,NaN or Inf\n", "Total time is 'NaN or Inf'"),
        ("File name,Total time\nx,1e9\n", "Total time is '1e9'"),
        ("File name,Total time\nx,1\nFile name,Total time\nx,1\n", "no summary"),
        ("File name,bubble time\nx,1\n", "2 values"),
    ],
)
def test_what_is_no_result_is_named(text: str, said: str, tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    other.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        extrapolate((one, other))
    assert str(other) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_three_ways_to_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["extrapolate", *map(str, pair(tmp_path))]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    total = printed["figures"]["Total time"]
    assert abs(total["us"] - float(exact(128)[-1])) <= total["error_us"]
    assert main([*words, "--csv"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head == ",".join(["File name", *COLUMNS])
    cells = line.split(",")
    assert cells[0] == STEM.format("").replace("-micro_batches_written", "") + "-"
    assert int(cells[-1]) == round(total["us"])
    assert cells[1].startswith("900 (")
    assert sum(float(cell.split("(")[1].rstrip("%)")) for cell in cells[6:9]) == pytest.approx(100, abs=0.1)
    assert main(words) == 0
    assert "Total time" in capsys.readouterr().out
    assert main([*words, "--csv", "--json"]) == 2
    assert main([*words[:2], str(tmp_path / "missing.csv")]) == 2
