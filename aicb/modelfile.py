"""Models in files: our TOML (ModelConfig's fields) and Hugging Face's config.json (see huggingface.py).

`aicb models --export NAME` writes a preset as TOML; edited or not, `-m FILE.toml` takes it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

from aicb import units
from aicb.errors import UserError, nearest, require
from aicb.files import Refusals, printable_path, read_text
from aicb.model import (
    ESSENTIAL,
    LOAD_BALANCING,
    MLA_FIELDS,
    MOE_FIELDS,
    NORMALIZATIONS,
    POSITION_EMBEDDINGS,
    PRESETS,
    ModelConfig,
    make_model,
    preset,
)

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 100_000
CONFIG_JSON = "config.json"
_EXTRA = ("n_dense_layers", "n_shared_expert")  # keys that make_model understands besides ModelConfig's fields
_CHOICES = {
    "position_embedding_type": POSITION_EMBEDDINGS,
    "normalization": NORMALIZATIONS,
    "moe_router_load_balancing_type": LOAD_BALANCING,
}
_FIELDS: dict[str, Field[Any]] = {field.name: field for field in fields(ModelConfig)}
_REFUSALS = Refusals(
    UserError,
    unreadable=f": cannot be read ({{reason}}): give a {CONFIG_JSON} or .toml file",
    irregular=f": not a regular file: give a {CONFIG_JSON} or .toml file",
    too_large=": {size} bytes, and a model file has at most {most}: is it another file?",
    no_text=f": byte {{byte}} at {{at}} is not UTF-8 text: give a {CONFIG_JSON} or .toml",
)
_T = TypeVar("_T")


def looks_like_path(text: str) -> bool:
    """Whether `-m text` means a file: it ends in .json or .toml, has a separator, or names something that exists.

    A preset's name stays a preset where a file of that name lies around: `./moe` means the file.
    """
    if text.lower().endswith((".json", ".toml")) or set(text) & {"/", os.sep, os.altsep}:
        return True
    with suppress(OSError, ValueError):  # too long for a name; a NUL
        return bool(text) and text not in PRESETS and Path(text).exists()
    return False


def load(path: str) -> tuple[dict[str, Any], list[str]]:
    """Read a TOML file of ours, a config.json, or a folder that holds one (a Hugging Face snapshot).

    Returns the base fields for `make_model` and warnings of one line each. Raises UserError, one line that names the
    file: unreadable, not what it should be, or no model that can be described.
    """
    shown = printable_path(path)
    file = _file_of(path, shown)
    text = read_text(file, shown, _REFUSALS)
    suffix, warnings = file.suffix.lower(), list[str]()
    if suffix == ".toml" or (suffix != ".json" and not text.lstrip().startswith("{")):
        base = _model_of_toml(_parse(text, shown, "TOML", _parse_toml), shown, file.stem)
    else:
        from aicb.huggingface import read_config  # only where there is one

        base, warnings = read_config(_parse(text, shown, "JSON", _parse_json), shown, file)
    try:
        model = make_model(base, {})
    except UserError as error:
        raise UserError(f"{shown}: {error}; correct it in the file") from error
    if model.multi_latent_attention:
        for name in ("num_query_groups", "kv_channels"):
            meant = getattr(model, name)
            require(
                base.get(name, meant) == meant,
                f"{shown}: {name} {base.get(name)} has no meaning with multi_latent_attention: leave it out",
            )
    return base, warnings


def _file_of(path: str, shown: str) -> Path:
    """The file that `path` means."""
    file = Path(path)
    with suppress(OSError):  # read_text says what is wrong
        if file.is_dir():
            file = file / CONFIG_JSON
            require(file.exists(), f"{shown}: a folder without {CONFIG_JSON}: give a model's file, or such a folder")
    return file


def _parse(text: str, shown: str, what: str, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(text)
    except RecursionError as error:
        raise UserError(f"{shown}: not valid {what}: nested too deeply; is it another file?") from error
    except ValueError as error:
        reason = units.printable(str(error))[:200]
        raise UserError(f"{shown}: not valid {what}: {reason}; is the file whole?") from error


def _parse_json(text: str) -> dict[str, Any]:
    import json

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {show(key)} is there twice")
            found[key] = value
        return found

    values = json.loads(text, object_pairs_hook=unique)
    if not isinstance(values, dict):
        raise ValueError(f"found {show(values)} where a config.json has an object")  # noqa: TRY004 - a file's error
    return values


def _parse_toml(text: str) -> dict[str, Any]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _model_of_toml(values: Mapping[str, Any], shown: str, stem: str) -> dict[str, Any]:
    known = [*_FIELDS, *_EXTRA]
    for key in values:
        if key not in known:
            hint = nearest(key, known) or f": known are {', '.join(known)}"
            raise UserError(f"{shown}: {show(key)} is no field of a model{hint}; correct or remove it")
    base: dict[str, Any] = {"name": file_name(stem) or "custom"}
    base |= {key: _typed(f"{shown}: {key}", key, value) for key, value in values.items()}
    for key in ESSENTIAL:
        require(key in base, f"{shown}: {key} is missing: a model needs {', '.join(ESSENTIAL)}; add it to the file")
    for one, other in (("n_dense_layers", "moe_layer_freq"), ("n_shared_expert", MOE_FIELDS[2])):
        require(not (one in base and other in base), f"{shown}: {one} and {other} exclude each other: remove one")
    _refuse_unusable(base, shown)
    if shared := base.pop("n_shared_expert", 0):
        width = base.get("moe_ffn_hidden_size") or base.get("ffn_hidden_size")
        require(width is not None, f"{shown}: n_shared_expert {shared} needs moe_ffn_hidden_size: add it to the file")
        base["moe_shared_expert_intermediate_size"] = shared * width
    return base


def _refuse_unusable(base: Mapping[str, Any], shown: str) -> None:
    """What the model cannot use is an error, not ignored; the value that says nothing may stand."""
    neutral: dict[str, tuple[Any, ...]] = {key: (_FIELDS[key].default,) for key in (*MOE_FIELDS, *MLA_FIELDS)}
    neutral |= {"moe_layer_freq": (1, ()), "n_dense_layers": (0,), "n_shared_expert": (0,)}
    for needs, keys in (("num_experts", (*MOE_FIELDS, *_EXTRA)), ("multi_latent_attention", MLA_FIELDS)):
        for key in () if base.get(needs) else keys:
            require(
                key not in base or base[key] in neutral[key],
                f"{shown}: {key} {base.get(key)} has no meaning without {needs}: add that, or remove {key}",
            )


def _typed(where: str, key: str, value: object) -> Any:
    """Return the value of one TOML key, checked. `where`: file and key."""
    field = _FIELDS.get(key)
    kind = "int" if field is None else field.type
    if key in _CHOICES:
        require(value in _CHOICES[key], f"{where} {show(value)} must be one of {', '.join(_CHOICES[key])}: correct it")
        return value
    if kind == "bool":
        require(isinstance(value, bool), f"{where} {show(value)} must be true or false: correct it in the file")
        return value
    if kind == "str":
        usable = isinstance(value, str) and value.isprintable() and not set(value) & set("/\\ ") and value[:1] != "."
        require(usable and value != "", f"{where} {show(value)} must be a text usable in a file name: correct it")
        return value
    if key == "moe_layer_freq" and isinstance(value, list):
        usable = len(value) <= MAX_LAYERS and all(type(item) is int and item in (0, 1) for item in value)
        require(usable, f"{where} {show(value)} must hold a 0 or 1 for each layer, or be a whole number: correct it")
        return tuple(value)
    least = 0 if field is None or field.default == 0 else 1
    return checked_integer(where, value, least, MAX_LAYERS if key == "num_layers" else MAX_SIZE)


def checked_integer(where: str, value: object, least: int = 1, most: int = MAX_SIZE) -> int:
    """Return `value` if it is an integer (no bool) from `least` to `most`. Raises UserError; `where`: file and key."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{where} {show(value)} must be a whole number from {least} to {most}: correct it in the file")
    return value


def show(value: object) -> str:
    """A value as a message shows it: in JSON's words, short, printable, on one line."""
    import json

    if isinstance(value, dict | list | tuple):
        return "(an object)" if isinstance(value, dict) else f"(a list of {len(value)})"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "(a huge number)"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def file_name(text: str) -> str:
    """The part of `text` that is safe in a file name on any system, at most 64 characters; may be empty."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-+") else "_" for c in text)
    return safe.lstrip("._-")[:64]


def export_toml(name: str) -> str:
    """Return the TOML of the preset `name`, every field with what it means. Raises UserError for an unknown preset."""
    import json  # true, numbers, quoted ASCII and lists are written alike in both languages

    from aicb.options import OPTIONS

    found = preset(name)
    model = make_model(found.fields, {})
    lines = [
        f"# The preset {name} ({found.source}): edit it and pass it back with `-m FILE.toml`.",
        "# Sizes are in elements. What is left out gets the default in brackets. Flags win over this file.",
        f"# A file has no default for --tp; this preset's users run it with --tp {found.tensor_model_parallel_size}.",
        "",
        f'name = "{model.name}"  # name in the file name and the summary',
    ]
    dense = model.dense_layers
    prefix = dense > 0 and model.moe_layer_freq == (0,) * dense + (1,) * (model.num_layers - dense)
    values = {field: getattr(model, field) for field in _FIELDS if field != "moe_layer_freq"}
    if prefix:
        values["n_dense_layers"] = dense  # lets the number of layers be edited, as a list would not
    else:
        values["moe_layer_freq"] = 1 if set(model.moe_layer_freq) <= {1} else list(model.moe_layer_freq)
    group = ""
    for option in OPTIONS:
        if option.name not in values or option.name == "name":
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"# {group}"]
        derived = model.multi_latent_attention and option.name in ("num_query_groups", "kv_channels")
        lines.append(f"{'# ' if derived else ''}{option.name} = {json.dumps(values[option.name])}  # {option.help}")
    return "\n".join(lines) + "\n"
