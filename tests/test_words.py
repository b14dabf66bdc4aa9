"""Megatron-LM's own command lines: pasted lists and scripts work, and nothing that matters is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aicb.argsfile import read_args
from aicb.cli import main
from aicb.config.configure import layer_freq
from aicb.errors import UserError
from aicb.megatron import NO_EFFECT, REFUSED, SWITCH, TRANSLATED, VALUE, VALUES
from aicb.options import OPTIONS
from aicb.words import translate

SCRIPTS = Path(__file__).parent / "data" / "scripts"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def generate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(["generate", *words, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["generate", *words]) == 2
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("aicb: error: ")]
    assert said.out == ""
    assert len(errors) == 1
    return errors[0]


# --- whole scripts ---------------------------------------------------------------------------------------------------

SPLIT = ["--world_size", "1024", "--global_batch", "2048"]
SCRIPT_MODELS = [
    # 96 (12 h^2 + 13 h) + (50257 + 2048) h + 2 h, h = 12288: GPT-3's 175B with its biases, norms and positions
    ("gpt3-175b.sh", [], 174_604_259_328),
    # 8,030,261,248 as published with RMSNorm; LayerNorm, the default that this script keeps, adds 65 x 4096 biases
    ("llama3-8b.sh", ["--tp", "8"], 8_030_527_488),
    ("mixtral-8x7b.yaml", [], 46_702_792_704),  # as published
    ("qwen3-30b-a3b.sh", ["--tp", "4", "--sp", "--ep", "8"], 30_532_122_624),  # as published
    ("glm4.5-355b.sh", ["--tp", "8", "--sp", "--ep", "16"], 352_797_814_784),  # without MTP and router bias
]


@pytest.mark.parametrize(("name", "split", "parameters"), SCRIPT_MODELS)
def test_a_training_script_gives_its_model(
    name: str, split: list[str], parameters: int, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, err = generate(capsys, "--args_file", str(SCRIPTS / name), *SPLIT, *split)
    assert summary["parameters_total"] == parameters
    assert err.count("\n") == 1
    assert err.startswith("aicb: warning: --")
    assert "no effect on the workload" in err


def test_the_script_s_split_and_batches_count_and_what_is_typed_wins(capsys: pytest.CaptureFixture[str]) -> None:
    script = ["--args_file", str(SCRIPTS / "gpt3-175b.sh"), "--world_size", "1024"]
    summary, _ = generate(capsys, *script)
    assert (summary["tp"], summary["pp"], summary["seq_length"], summary["global_batch"]) == (8, 16, 2048, 1536)
    assert summary["dtype"] == "float16"
    summary, _ = generate(capsys, "--dtype", "bfloat16", *script, "--pipeline-model-parallel-size", "8")
    assert (summary["tp"], summary["pp"], summary["dtype"]) == (8, 8, "bfloat16")


def test_a_pasted_list_gives_the_same_as_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    pasted = read_args(str(SCRIPTS / "glm4.5-355b.sh"))
    summary, _ = generate(capsys, *pasted, *SPLIT, "--tp", "8", "--sp", "--ep", "16")
    assert summary["parameters_total"] == 352_797_814_784


# --- the table of flags ----------------------------------------------------------------------------------------------


def test_no_flag_is_in_two_tables() -> None:
    ours = {option.name for option in OPTIONS} | {alias[2:] for option in OPTIONS for alias in option.aliases}
    tables = [ours, set(NO_EFFECT), set(REFUSED), set(TRANSLATED)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert len(NO_EFFECT) + len(REFUSED) > 480
    assert set(NO_EFFECT.values()) <= {SWITCH, VALUE, VALUES}


@pytest.mark.parametrize("dashes", [False, True])
@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_a_flag_without_effect_is_taken_out_with_its_values(name: str, dashes: bool) -> None:
    flag = f"--{name.replace('_', '-') if dashes else name}"
    values = {SWITCH: [], VALUE: ["-1"], VALUES: ["1", "0.5", "x"]}[NO_EFFECT[name]]
    assert translate(["-m", "7", flag, *values, "--tp", "2"]) == (["-m", "7", "--tp", "2"], [flag])
    assert translate([f"{flag}=1", "--tp", "2"]) == (["--tp", "2"], [flag])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_flag_that_changes_the_work_is_refused_by_name_and_value(name: str) -> None:
    follows, neutral, assumed = REFUSED[name]
    words = [f"--{name.replace('_', '-')}", *([] if follows == SWITCH else ["0.25"])]
    with pytest.raises(UserError) as caught:
        translate(["-m", "7", *words, "--tp", "2"])
    assert str(caught.value).startswith(" ".join(words) + " changes what is computed or sent")
    assert assumed in str(caught.value)
    for value in neutral:
        assert translate([f"--{name}", value, "--tp", "2"]) == (["--tp", "2"], [])
    if follows == SWITCH:
        assert translate([f"--{name}", "false", "--tp", "2"]) == (["--tp", "2"], [])


def test_one_warning_names_all_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = generate(capsys, "-m", "7", "--lr", "1e-4", "--seed", "-1", "--lr", "2e-4", "--no-bias-gelu-fusion")
    assert err == "aicb: warning: --lr, --seed, --no-bias-gelu-fusion have no effect on the workload\n"
    _, err = generate(capsys, "-m", "7", "--workload_only", "on", "--tp", "1")
    assert err == "aicb: warning: --workload_only has no effect on the workload\n"


def test_a_value_that_is_missing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lr needs a value" in refused(capsys, "-m", "7", "--lr")
    assert "--lr needs a value" in refused(capsys, "-m", "7", "--lr", "--tp", "2")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--disable-bias-linear"], {"add_bias_linear": False}),
        (["--use-rotary-position-embeddings", "--no-position-embedding"], {"position_embedding_type": "rope"}),
        (["--group-query-attention"], {"num_query_groups": 1}),
        (["--group-query-attention", "--num-query-groups", "4"], {"num_query_groups": 4}),
        (["--bf16"], {}),
        (["--rotary-percent", "0.5", "--position-embedding-type", "rope"], {"rotary_percent": 0.5}),
        (["--attention-backend", "flash"], {}),
    ],
)
def test_megatron_s_words_mean_what_ours_do(words: list[str], expected: dict[str, Any]) -> None:
    from aicb.config.configure import configure

    kept, silent = translate(
        ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8", "--tp", "1", *words]
    )
    assert silent == []
    job = configure(typed(kept)).job
    for name, value in expected.items():
        assert getattr(job.model, name) == value


def typed(words: list[str]) -> dict[str, Any]:
    """What the command line hands on, without running it."""
    from aicb import cli

    found: dict[str, Any] = {}

    def catch(values: dict[str, Any], _: object) -> list[Any]:
        found.update(values)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aicb.generate.generate", catch)
        assert cli.main(["generate", *words]) == 0
    return found


def test_attention_backends(capsys: pytest.CaptureFixture[str]) -> None:
    summary, _ = generate(capsys, "-m", "7", "--attention-backend", "unfused")
    assert "no_flash_attn" in summary["file"]
    assert "must be one of auto" in refused(capsys, "-m", "7", "--attention-backend", "magic")


def test_experts_own_tensor_parallelism_must_be_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "moe", "--tp", "2", "--sp", "--ep", "2", "--expert-tensor-parallel-size"]
    generate(capsys, *words, "2")
    assert "--expert_tensor_parallel_size 1 must be" in refused(capsys, *words, "1")


def test_a_balancing_loss_without_weight_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """And without statistics, as the recordings show: 8 experts' counts of 8 bytes in each of 32 layers."""
    words = ["-m", "moe", "--tp", "2", "--sp", "--global_batch", "16"]
    plain, _ = generate(capsys, *words, "--moe-router-load-balancing-type", "aux_loss")
    without, _ = generate(
        capsys, *words, "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0"
    )
    assert plain["bytes_per_group"]["TP"] - without["bytes_per_group"]["TP"] == 32 * 8 * 8
    assert "seq_aux_loss must be one of" in refused(capsys, *words, "--moe-router-load-balancing-type", "seq_aux_loss")


def test_the_router_bias_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    summary, _ = generate(capsys, "-m", "moe", "--tp", "1", "--moe-router-enable-expert-bias")
    assert any("512 B all-reduced over TP x DP" in note for note in summary["notes"])  # 2 B x 8 experts x 32 layers


# --- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        ("[0]*3+[1]*89", (0,) * 3 + (1,) * 89),
        ("([1]*48)", (1,) * 48),
        ("'([1]*48)'", (1,) * 48),
        ("\"'([1]*4)'\"", (1,) * 4),
        ("[0, 1, 1]", (0, 1, 1)),
        ("([1]*3+[0]*2)*2", (1, 1, 1, 0, 0) * 2),
        ("(([0]*1+[1]*2)*2+[1])*2", ((0, 1, 1) * 2 + (1,)) * 2),
    ],
)
def test_layer_lists(text: str, expected: int | tuple[int, ...]) -> None:
    assert layer_freq(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[2]",
        "[1]*",
        "[1]**2",
        "([1]",
        "[1])",
        "[1]*99999999",
        "([1]*1000)*1000",
        "__import__('os')",
        "[1]-[0]",
        "(((((",
    ],
)
def test_what_is_no_layer_list(text: str) -> None:
    with pytest.raises(UserError, match="--moe_layer_freq"):
        layer_freq(text)


@given(st.text(alphabet="[]()*+01, '\"", max_size=40))
def test_no_list_is_a_crash(text: str) -> None:
    said = "--moe_layer_freq"
    try:
        layer_freq(text)
    except UserError as error:
        said = str(error)
    assert "--moe_layer_freq" in said


# --- files -----------------------------------------------------------------------------------------------------------


def words_of(text: str, name: str = "args.sh") -> list[str]:
    Path(name).write_text(text)
    return read_args(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--num-layers 2 \\\n  --hidden-size 64 # width\n", ["--num-layers", "2", "--hidden-size", "64"]),
        ("N=2\nARGS='--num-layers $N'\n", ["--num-layers", "2"]),
        ('ARGS=" \\\n --num-layers 2"\npython x.py $ARGS --fp16\n', ["--num-layers", "2", "--fp16"]),
        ("A=1\nB=$((A+2*3))\nX=(--num-layers ${B} --lr=$A)\n", ["--num-layers", "7", "--lr=1"]),
        ("X+=(\n\n# --tp 2\n--num-layers 2\n)\n", ["--num-layers", "2"]),
        ("X=(--num-layers ${L:-12} '--save a b')\n", ["--num-layers", "12", "--save", "a", "b"]),
        ("X=(--swiglu)\ntorchrun pretrain.py ${X[@]} --fp16 2>&1 | tee --append log\n", ["--swiglu", "--fp16"]),
        ("git clone --depth 1 somewhere\nX=(--swiglu)\n", ["--swiglu"]),
        ("X=(--save $UNKNOWN --swiglu)\n", ["--save", "-", "--swiglu"]),  # it has no effect, whatever it is
    ],
)  # fmt: skip
def test_shell_scripts(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("X=(\n --num-layers $LAYERS\n)\n", "args.sh:1: --num-layers $LAYERS: the variable is not assigned"),
        ("X=(--num-layers $((A+1)))\n", "not assigned"),
        ("X=(--num-layers $(cat layers))\n", "not assigned"),
        ("torchrun pretrain.py --swiglu $MORE\n", "not assigned"),
        ("X=(--num-layers '2)\n", "quotes are not in pairs"),
        ("echo hello\n", "no flag in it"),
        ("", "no flag in it"),
    ],
)
def test_what_a_script_leaves_open_is_an_error(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        words_of(text)
    message = str(caught.value)
    assert message.startswith("args.sh:")
    assert said in message
    assert "\n" not in message


def test_yaml() -> None:
    text = "model: # a section\n  num_layers: 2\n  --swiglu: true\n  fp16: false\n  lr: null\n"
    text += "  name: 'a b'\n- --tp 2\n---\n"
    assert words_of(text, "x.yaml") == ["--num_layers", "2", "--swiglu", "--name", "a b", "--tp", "2"]
    with pytest.raises(UserError, match=r"x\.yaml:1: neither"):
        words_of("num_layers = 2\n", "x.yaml")


def test_files_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.sh: cannot be read" in refused(capsys, "--args_file", "nowhere.sh")
    assert "--args_file needs a file" in refused(capsys, "--args_file")
    Path("binary.sh").write_bytes(b"--num-layers \xff\xfe")
    assert "binary.sh:1: the byte 0xff" in refused(capsys, "--args_file=binary.sh")


@given(st.text(alphabet="ab =$(){}[]\"'\\\n#-+*12\t", max_size=80))
def test_no_script_is_a_crash(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.sh"
    path.write_text(text)
    said = ""
    try:
        read_args(str(path))
    except UserError as error:
        said = str(error)
    assert "\n" not in said
