"""Our model files in TOML: ModelConfig's fields.

`aicb models --export NAME` writes a preset as TOML; edited or not, `-m FILE.toml` takes it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from aicb.config.model import (
    ESSENTIAL,
    LOAD_BALANCING,
    MLA_FIELDS,
    MOE_FIELDS,
    NORMALIZATIONS,
    POSITION_EMBEDDINGS,
    ROUTER_BYTES,
    ModelConfig,
    make_model,
)
from aicb.config.presets import preset
from aicb.errors import UserError, nearest, require
from aicb.models.values import MAX_LAYERS, MAX_SIZE, checked_integer, file_name, show

_EXTRA = ("n_dense_layers", "n_shared_expert")  # keys that make_model understands besides ModelConfig's fields
_CHOICES = {
    "position_embedding_type": POSITION_EMBEDDINGS,
    "normalization": NORMALIZATIONS,
    "moe_router_load_balancing_type": LOAD_BALANCING,
    "moe_router_dtype": tuple(ROUTER_BYTES),
}
_FIELDS: dict[str, Field[Any]] = {field.name: field for field in fields(ModelConfig)}


def read_toml(values: Mapping[str, Any], shown: str, stem: str) -> dict[str, Any]:
    """Return the base fields for make_model. `shown`: the path for messages; `stem`: a name where none is given.

    Raises UserError, one line: a key or a value that no model has, or one that this model cannot use.
    """
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
    if kind == "float":
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
        if key.endswith("dropout"):
            inside, said = 0 <= number < 1, "at least 0 and less than 1"
        else:
            inside, said = 0 < number <= 1, "above 0 and at most 1"
        require(inside, f"{where} {show(value)} must be a number {said}: correct it in the file")
        return value
    least = 0 if field is None or field.default == 0 else 1
    return checked_integer(where, value, least, MAX_LAYERS if key == "num_layers" else MAX_SIZE)


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
