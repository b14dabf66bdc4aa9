"""Protects `-m FILE` and `aicb models --export`: a model file is read exactly, and a bad one gives one clear line."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aicb.config.model import ModelConfig, make_model
from aicb.config.presets import PRESETS, preset
from aicb.errors import UserError
from aicb.files import MAX_BYTES
from aicb.models.load import load, looks_like_path
from aicb.models.toml import export_toml

ROOT = Path(__file__).resolve().parent.parent
HUGGINGFACE = ROOT / "tests" / "data" / "huggingface"
SMALL = "num_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\n"
MOE = SMALL + "num_experts = 8\nmoe_ffn_hidden_size = 32\n"
MLA = SMALL + "multi_latent_attention = true\nkv_lora_rank = 8\nqk_nope_dim = 4\nqk_rope_dim = 2\nv_head_dim = 4\n"


def refused(path: Path | str) -> str:
    """The message of load(): one printable line that names the file."""
    with pytest.raises(UserError) as error:
        load(str(path))
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 2000
    return message


def toml(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# What -m takes for a path


@pytest.mark.parametrize("text", ["a.json", "A.TOML", "./7", "models/llama", "/nowhere", "existing", "folder"])
def test_a_path_is_told_from_a_preset(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "existing").touch()
    (tmp_path / "folder").mkdir()
    assert looks_like_path(text)


@pytest.mark.parametrize("text", ["7", "moe", "llama9", "", "gpt_7B", "a\0b", "x" * 5000])
def test_a_preset_stays_a_preset(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a folder of its name, such as the results of an earlier run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe").mkdir()
    assert not looks_like_path(text)


# Presets out, and back in


@pytest.mark.parametrize("name", PRESETS)
def test_an_exported_preset_comes_back_equal(name: str, tmp_path: Path) -> None:
    base, warnings = load(str(toml(tmp_path, export_toml(name))))
    assert warnings == []
    assert make_model(base, {}) == make_model(preset(name).fields, {})


@pytest.mark.parametrize("name", PRESETS)
def test_an_export_shows_every_field_with_what_it_means(name: str) -> None:
    lines = [line.removeprefix("# ") for line in export_toml(name).splitlines()]
    for field in fields(ModelConfig):
        if field.name == "moe_layer_freq" and preset(name).fields.get("n_dense_layers"):
            assert any(line.startswith("n_dense_layers = ") for line in lines)
            continue
        (line,) = [line for line in lines if line.startswith(f"{field.name} = ")]
        assert len(line.partition("  # ")[2]) > 5


def test_an_export_can_be_edited(tmp_path: Path) -> None:
    """Fewer layers, other heads: nothing else has to be changed by hand to fit."""
    text = export_toml("deepseek671").replace("num_layers = 61", "num_layers = 9")
    text = text.replace("qk_nope_dim = 128", "qk_nope_dim = 64")
    model = make_model(load(str(toml(tmp_path, text)))[0], {})
    assert model.moe_layer_freq == (0, 0, 0, 1, 1, 1, 1, 1, 1)
    assert model.kv_channels == 128
    text = export_toml("7").replace("num_experts = 0", "num_experts = 8")
    model = make_model(load(str(toml(tmp_path, text)))[0], {})
    assert (model.num_experts, model.moe_ffn_hidden_size, set(model.moe_layer_freq)) == (8, 16384, {1})


def test_an_export_of_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="llama3-8b"):
        export_toml("llama3-8")


# Our TOML


def test_a_small_file_is_enough_and_is_named_after_itself(tmp_path: Path) -> None:
    base, warnings = load(str(toml(tmp_path, SMALL, "my model.toml")))
    assert base == {"name": "my_model", "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert warnings == []


def test_experts_are_read_in_every_spelling(tmp_path: Path) -> None:
    def model(more: str) -> ModelConfig:
        return make_model(load(str(toml(tmp_path, MOE + more)))[0], {})

    assert model("").moe_layer_freq == (1, 1)
    assert model("moe_layer_freq = 2").moe_layer_freq == (1, 0)
    assert model("moe_layer_freq = [0, 1]").moe_layer_freq == (0, 1)
    assert model("n_dense_layers = 1").moe_layer_freq == (0, 1)
    assert model("n_shared_expert = 3").moe_shared_expert_intermediate_size == 96
    assert model("n_shared_expert = 0").moe_shared_expert_intermediate_size == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "num_layers is missing: a model needs num_layers, hidden_size, num_attention_heads"),
        (SMALL.replace("num_layers = 2", ""), "num_layers is missing"),
        (SMALL + "num_layer = 3", '"num_layer" is no field of a model (nearest: num_layers'),
        (SMALL + "[model]\na = 1", '"model" is no field'),
        (SMALL + '"a\\nb" = 1', r"a\nb"),
        (SMALL + "num_layers = 3", "not valid TOML: Cannot overwrite a value"),
        (SMALL + "vocab_size =", "not valid TOML"),
        ('{"num_layers": 2}', "not valid TOML"),
        (SMALL + 'vocab_size = "32000"', 'vocab_size "32000" must be a whole number from 1 to 2147483647'),
        (SMALL + "vocab_size = 32000.0", "vocab_size 32000.0 must be a whole number"),
        (SMALL + "vocab_size = true", "vocab_size true must be a whole number"),
        (SMALL + "vocab_size = nan", "vocab_size NaN must be a whole number"),
        (SMALL + "vocab_size = 2020-01-01", 'vocab_size "2020-01-01" must be a whole number'),
        (SMALL + "vocab_size = [1]", "vocab_size (a list of 1) must be a whole number"),
        (SMALL + "vocab_size = 0", "vocab_size 0 must be a whole number from 1"),
        (SMALL + "vocab_size = -5", "vocab_size -5 must be a whole number from 1"),
        (SMALL + f"vocab_size = 0x{'f' * 9000}", "vocab_size (a huge number) must be a whole number"),
        (SMALL + f"vocab_size = {'9' * 5000}", "not valid TOML"),
        (SMALL.replace("= 2", "= 2000000000"), "num_layers 2000000000 must be a whole number from 1 to 100000"),
        (SMALL + "num_experts = -1", "num_experts -1 must be a whole number from 0"),
        (SMALL + "swiglu = 1", "swiglu 1 must be true or false"),
        (SMALL + 'swiglu = "true"', 'swiglu "true" must be true or false'),
        (SMALL + "name = 7", "name 7 must be a text usable in a file name"),
        (SMALL + 'name = "a/b"', 'name "a/b" must be a text usable'),
        (SMALL + 'name = ""', 'name "" must be a text usable'),
        (SMALL + 'name = ".."', 'name ".." must be a text usable'),
        (SMALL + 'normalization = "layernorm"', 'normalization "layernorm" must be one of LayerNorm, RMSNorm'),
        (SMALL + "normalization = 1", "normalization 1 must be one of"),
        (SMALL + "normalization = []", "normalization (a list of 0) must be one of"),
        (SMALL + 'position_embedding_type = "alibi"', "must be one of rope, learned_absolute, none"),
        (MOE + 'moe_router_load_balancing_type = "x"', "must be one of aux_loss, none"),
        (MOE + "moe_layer_freq = [0, 2]", "moe_layer_freq (a list of 2) must hold a 0 or 1 for each layer"),
        (MOE + "moe_layer_freq = [true, 1]", "must hold a 0 or 1"),
        (MOE + 'moe_layer_freq = "1"', 'moe_layer_freq "1" must be a whole number'),
        (MOE + "moe_layer_freq = [1]", "--moe_layer_freq needs one 0 or 1 for each of --num_layers 2"),
        (MOE + "moe_layer_freq = [0, 0]", "no layer with experts"),
        (MOE + "moe_layer_freq = 0", "moe_layer_freq 0 must be a whole number from 1"),
        (MOE + "n_dense_layers = 2", "--n_dense_layers 2 must be from 0 to"),
        (MOE + "n_dense_layers = 1\nmoe_layer_freq = 1", "n_dense_layers and moe_layer_freq exclude each other"),
        (MOE + "n_shared_expert = 1\nmoe_shared_expert_intermediate_size = 8", "exclude each other"),
        (SMALL + "num_experts = 8\nn_shared_expert = 1", "n_shared_expert 1 needs moe_ffn_hidden_size"),
        (MOE + "moe_router_topk = 9", "--moe_router_topk 9 must not exceed --num_experts 8"),
        (SMALL + "moe_ffn_hidden_size = 8", "moe_ffn_hidden_size 8 has no meaning without num_experts"),
        (SMALL + "n_dense_layers = 1", "n_dense_layers 1 has no meaning without num_experts"),
        (SMALL + "n_shared_expert = 1", "n_shared_expert 1 has no meaning without num_experts"),
        (SMALL + "kv_lora_rank = 8", "kv_lora_rank 8 has no meaning without multi_latent_attention"),
        (MLA + "kv_channels = 64", "kv_channels 64 has no meaning with multi_latent_attention"),
        (MLA + "num_query_groups = 2", "num_query_groups 2 has no meaning with multi_latent_attention"),
        (MLA.replace("kv_lora_rank = 8", ""), "--kv_lora_rank 0 must be at least 1"),
        (SMALL + "num_query_groups = 3", "--num_attention_heads 4 must be a multiple of --num_query_groups 3"),
        (SMALL.replace("64", "66"), "--hidden_size 66 must be a multiple of --num_attention_heads 4"),
        (SMALL + "swiglu = true\nsquared_relu = true", "exclude each other"),
    ],
)
def test_what_a_toml_file_must_not_hold(text: str, words: str, tmp_path: Path) -> None:
    message = refused(toml(tmp_path, text))
    assert message.startswith(f"{tmp_path / 'mine.toml'}: ")
    assert words in message


# Any file


def test_json_and_toml_are_told_apart_without_a_suffix(tmp_path: Path) -> None:
    config = (HUGGINGFACE / "gpt2.json").read_text()
    for name, text in (("a", SMALL), ("b", config), ("c.json", config), ("d.JSON", "\ufeff" + config)):
        base, _ = load(str(toml(tmp_path, text, name)))
        assert base["num_layers"] == (2 if name == "a" else 12)


def test_a_folder_stands_for_its_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    toml(folder, (HUGGINGFACE / "gpt2.json").read_text(), "config.json")
    for path in (folder, f"{folder}/", folder / "config.json"):
        assert load(str(path))[0]["name"] == "My-Model"


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "empty").mkdir()
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "both" / "config.json").mkdir(parents=True)
    assert "fifo.json: not a regular file" in refused(tmp_path / "fifo.json")
    assert "empty: a folder without config.json: give" in refused(tmp_path / "empty")
    assert "both: not a regular file" in refused(tmp_path / "both")
    assert f"huge.json: {MAX_BYTES + 1} bytes, and a model file has at most" in refused(tmp_path / "huge.json")
    assert "missing.toml: cannot be read (No such file or directory)" in refused(tmp_path / "missing.toml")
    assert "cannot be read" in refused(tmp_path / "loop.json")
    assert "cannot be read" in refused(tmp_path / ("x" * 300 + ".json"))
    assert "cannot be read" in refused("a\0b.json")
    assert "/dev/zero: not a regular file" in refused("/dev/zero")
    assert r"line\nbreak.json" in refused(tmp_path / "line\nbreak.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON: Expecting value"),
        (b'{"model_type": "llama", "hidden', "not valid JSON: Unterminated string"),
        (b"\x7fELF\x02\x01\x01\xff", "byte 0xff at 7 is not UTF-8 text"),
        (b"\x00\x00\x00", "not valid JSON"),
        (b"[1, 2]", "found (a list of 2) where a config.json has an object"),
        (b"null", "found null where a config.json has an object"),
        (b'{"a": 1, "a": 2}', 'the key "a" is there twice'),
        (b'{"x": {"b": 1, "b": 1}}', 'the key "b" is there twice'),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_json_object(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    assert words in refused(path)


def test_a_byte_is_counted_from_the_start_of_the_file_also_after_a_bom(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfnum_layers = 2\n\xff")
    assert "mine.toml: byte 0xff at 18 is not UTF-8 text" in refused(tmp_path / "mine.toml")
    assert load(str(toml(tmp_path, f"\ufeff{SMALL}")))[0]["num_layers"] == 2


def test_deeply_nested_toml_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in refused(toml(tmp_path, "num_layers = " + "[" * 50_000))


VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(0, 2), max_size=4),
    st.sampled_from([1, 2, 4, "rope", "RMSNorm", 0, -1, 2**40]),
)
KEYS = st.sampled_from([field.name for field in fields(ModelConfig)] + ["n_dense_layers", "n_shared_expert", "typo"])


def loads_or_is_refused(data: bytes, suffix: str) -> None:
    """Nothing but UserError, and what loads is a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{suffix}"
        path.write_bytes(data)
        messages: list[str] = []
        try:
            base, messages = load(str(path))
            make_model(base, {})
        except UserError as error:
            messages = [str(error)]
        assert all(message.isprintable() for message in messages)


@given(st.dictionaries(KEYS, VALUES), st.sampled_from([SMALL, MOE, MLA, ""]))
def test_any_toml_loads_or_is_refused(values: dict[str, object], start: str) -> None:
    kept = [line for line in start.splitlines() if line.partition(" ")[0] not in values]
    lines = kept + [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    loads_or_is_refused("\n".join(lines).encode(), ".toml")


@given(st.binary(max_size=60), st.sampled_from([".toml", ".json", ""]))
def test_any_bytes_are_refused_or_load(data: bytes, suffix: str) -> None:
    loads_or_is_refused(data, suffix)


def test_importing_it_costs_nothing_that_is_not_needed() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import aicb.models.load; "
        "unwanted = {'json', 'tomllib', 'tomli', 'difflib', 'aicb.models.toml', 'aicb.models.huggingface'}; "
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
