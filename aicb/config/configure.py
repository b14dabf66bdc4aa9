"""From what the user typed to a Job: presets and files below, typed values on top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple, NoReturn

from aicb.config.job import Job
from aicb.config.model import ESSENTIAL, LAYERS_MAX, ModelConfig, make_model
from aicb.config.parallel import ParallelConfig
from aicb.config.presets import DEFAULT_PRESET, PRESETS, preset
from aicb.config.training import ATTENTION_BACKENDS, TrainingConfig
from aicb.errors import UserError, require
from aicb.units import whole_number

DEFAULT_TP = 8
MODEL_OPTIONS = {field.name for field in fields(ModelConfig)} - {"name"} | {
    "group_query_attention",
    "moe_aux_loss_coeff",
    "moe_enable",
    "n_dense_layers",
    "n_shared_expert",
}


class Configured(NamedTuple):
    """A job, and what the user should know about how it came about."""

    job: Job
    notes: tuple[str, ...]
    """What was derived or changed on the user's behalf."""
    warnings: tuple[str, ...]
    apart: Mapping[str, Any]
    """The fewest typed options that make this model of its preset or file; empty for one of the user's own name."""
    of_preset: bool
    """Whether the model carries a preset's name, not one of a file or the user's own."""


def configure(typed: Mapping[str, Any]) -> Configured:
    """Build the job that the typed options describe, seen from stage 0.

    `typed` holds option names (see options.py) and only what was typed. Raises UserError.
    """
    base, tp, warnings = _base(typed)
    wanted = {name: value for name, value in typed.items() if name in MODEL_OPTIONS}
    if "moe_layer_freq" in wanted:
        wanted["moe_layer_freq"] = layer_freq(wanted["moe_layer_freq"])
    notes = []
    seq_length = typed.get("seq_length", TrainingConfig().seq_length)
    model = _model(base, {**wanted, **_name(typed)}, typed)
    if _grows(model, wanted, seq_length):
        model = replace(model, max_position_embeddings=seq_length)
        notes.append(f"learned positions grown to --seq_length {seq_length}")
    if base:
        notes += _changes(make_model(base, {}), model)
    notes += _idle(typed, model)
    _check_frame(typed.get("frame", "Megatron"), model)
    parallel = _pick(ParallelConfig, {"tensor_model_parallel_size": tp, **typed})
    tp_of_experts = typed.get("expert_tensor_parallel_size", parallel.tensor_model_parallel_size)
    require(
        tp_of_experts == parallel.tensor_model_parallel_size,
        f"--expert_tensor_parallel_size {tp_of_experts} must be --tensor_model_parallel_size "
        f"{parallel.tensor_model_parallel_size}: experts are split over TP as the rest is, for now",
    )
    if parallel.enable_sequence_parallel and not parallel.sequence_parallel:
        notes.append("--enable_sequence_parallel has no effect with one TP rank")
    training = _training(typed)
    try:
        job = Job(model=model, parallel=parallel, training=training)
    except UserError as error:
        if "tensor_model_parallel_size" in typed or "tensor_model_parallel_size" not in str(error):
            raise
        raise UserError(f"{error} (--tp is not typed: {tp} is the default here)") from error
    of_preset = bool(base) and typed.get("model_size", DEFAULT_PRESET) in PRESETS and "model_name" not in typed
    apart = _fewest(base, wanted) if base or "model_name" not in typed else {}
    return Configured(job, tuple(notes), tuple(warnings), apart, of_preset)


def _base(typed: Mapping[str, Any]) -> tuple[dict[str, Any], int, list[str]]:
    """Fields of the preset or file that -m names, its default TP, and warnings."""
    name = typed.get("model_size")
    if name is None:
        if all(field in typed for field in ESSENTIAL):
            return {}, DEFAULT_TP, []
        name = DEFAULT_PRESET
    if name not in PRESETS:
        from aicb.models.load import load, looks_like_path  # only where it may be a file

        if looks_like_path(name):
            loaded, warnings = load(name)
            return loaded, DEFAULT_TP, warnings
    found = preset(name)
    return dict(found.fields), found.tensor_model_parallel_size, []


def _model(base: Mapping[str, Any], wanted: Mapping[str, Any], typed: Mapping[str, Any]) -> ModelConfig:
    """Build the model; where the default preset gave what was not typed, an error says so."""
    try:
        return make_model(base, wanted)
    except UserError as error:
        if "model_size" in typed or not base:
            raise
        hint = f"what is not typed is that of the preset {DEFAULT_PRESET}; name another with -m"
        raise UserError(f"{error} ({hint}, or type {', '.join('--' + name for name in ESSENTIAL)})") from error


def _fewest(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of `wanted` what changes nothing, and --swiglu, which this format's users type with every model."""
    meant, kept = make_model(base, wanted), dict(wanted)
    for name in wanted:
        fewer = {other: value for other, value in kept.items() if other != name}
        with suppress(UserError):  # needed
            if make_model(base, fewer) == meant:
                kept = fewer
    kept.pop("swiglu", None)
    return kept


def _grows(model: ModelConfig, wanted: Mapping[str, Any], seq_length: int) -> bool:
    """Learned positions grow with the sequence, unless typed."""
    learned = model.position_embedding_type == "learned_absolute"
    return learned and "max_position_embeddings" not in wanted and seq_length > model.max_position_embeddings


def _name(typed: Mapping[str, Any]) -> dict[str, str]:
    name = typed.get("model_name")
    if name is None:
        return {}
    require(
        bool(name) and name.isprintable() and not set(name) & set("/\\ ") and not name.startswith("."),
        f"--model_name {name!r} must be usable in a file name: no blanks, slashes or control characters",
    )
    return {"name": name}


def _changes(plain: ModelConfig, model: ModelConfig) -> list[str]:
    """Name where the model departs from the preset or file, so that nobody takes it for the original."""
    names = [field.name for field in fields(ModelConfig) if field.name not in ("name", "max_position_embeddings")]
    changed = [f"{name} {getattr(model, name)}" for name in names if getattr(model, name) != getattr(plain, name)]
    return [f"{plain.name} with {', '.join(changed)}"] if changed else []


def _idle(typed: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Name typed options that the model has no use for, though its users' scripts give them."""
    idle = {
        "max_position_embeddings": (model.position_embedding_type != "learned_absolute", "without learned positions"),
        "ffn_hidden_size": (
            model.dense_layers == 0 and model.ffn_hidden_size != model.moe_ffn_hidden_size,
            f"where every layer has experts (--moe_ffn_hidden_size {model.moe_ffn_hidden_size})",
        ),
    }
    return [f"--{name} has no effect {why}" for name, (is_idle, why) in idle.items() if is_idle and name in typed]


def _check_frame(frame: str, model: ModelConfig) -> None:
    if frame == "DeepSeek":
        require(
            model.multi_latent_attention,
            f"--frame DeepSeek is for models with latent attention, and {model.name} has none: use --frame Megatron",
        )
    elif frame != "Megatron":
        raise UserError(f"--frame {frame}: only Megatron, or DeepSeek for models with latent attention")


def _pick(config: type[Any], values: Mapping[str, Any]) -> Any:
    """Build a configuration from those values that are its fields."""
    return config(**{field.name: values[field.name] for field in fields(config) if field.name in values})


def _training(typed: Mapping[str, Any]) -> TrainingConfig:
    values = dict(typed)
    granularity = values.get("recompute_granularity", "none")
    require(
        values.get("recompute_activations", True) or granularity == "none",
        f"--no-recompute_activations and --recompute_granularity {granularity} exclude each other: choose one",
    )
    if values.get("recompute_activations"):
        require(
            values.get("recompute_granularity", "selective") == "selective",
            f"--recompute_activations and --recompute_granularity {values.get('recompute_granularity')} exclude each "
            "other: choose one",
        )
        values["recompute_granularity"] = "selective"
    values |= _flash_by_backend(values)
    if "use_flash_attn" not in values and values.get("dtype") == "float32":
        values["use_flash_attn"] = False
    training: TrainingConfig = _pick(TrainingConfig, values)
    return training


def attention_backend(typed: Mapping[str, Any]) -> str:
    """Return --attention_backend as it is meant. Raises UserError."""
    word: str = typed.get("attention_backend", "auto")
    backend = word.strip("'\"").removeprefix("AttnBackend.")
    require(
        backend in ATTENTION_BACKENDS,
        f"--attention_backend {word} must be one of {', '.join(ATTENTION_BACKENDS)}",
    )
    return backend


def _flash_by_backend(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return what --attention_backend says of --use_flash_attn: that core attention is no one kernel, or nothing."""
    backend, flash = attention_backend(values), values.get("use_flash_attn")
    if backend == "auto":
        return {}
    if backend in ("unfused", "local"):
        require(not flash, f"--attention_backend {backend} and --use_flash_attn exclude each other: choose one")
        return {"use_flash_attn": False}
    require(flash is not False, f"--attention_backend {backend} and --no-use_flash_attn exclude each other: choose one")
    require(
        values.get("dtype") != "float32",
        f"--attention_backend {backend} needs --dtype bfloat16 or float16: it has no float32 kernels",
    )
    return {}


def layer_freq(text: str) -> int | tuple[int, ...]:
    """Read --moe_layer_freq as Megatron-LM takes it: an integer, or a list such as [0,1,1] or ([1]*3+[0])*2.

    Quotes that scripts leave around it do not matter. Raises UserError; nothing is evaluated.
    """
    compact = re.sub(r"[\s'\"]", "", text)
    number = whole_number(compact.strip("()"))
    if number is not None:
        return number
    pattern, rest = _sum(compact, text)
    if rest:
        _no_list(text)
    return tuple(pattern)


def _sum(rest: str, text: str) -> tuple[list[int], str]:
    """Read `part+part...`, each `[0,1]` or `(sum)`, times whole numbers; return the list and what is left."""
    total: list[int] = []
    while True:
        listed = re.match(r"\[([01](?:,[01])*),?\]|([01](?:,[01])+)$", rest)
        if listed:
            part, rest = [int(item) for item in (listed[1] or listed[2]).split(",")], rest[listed.end() :]
        elif rest.startswith("("):
            part, rest = _sum(rest[1:], text)
            if not rest.startswith(")"):
                _no_list(text)
            rest = rest[1:]
        else:
            _no_list(text)
        while times := re.match(r"\*(\d{1,6})", rest):
            rest = rest[times.end() :]
            require(len(part) * int(times[1]) <= LAYERS_MAX, f"--moe_layer_freq: more than {LAYERS_MAX} layers")
            part = part * int(times[1])
        total += part
        require(len(total) <= LAYERS_MAX, f"--moe_layer_freq: more than {LAYERS_MAX} layers")
        if not rest.startswith("+"):
            return total, rest
        rest = rest[1:]


def _no_list(text: str) -> NoReturn:
    raise UserError(f"--moe_layer_freq {text[:60]} must be an integer or a list of 0 and 1: [0,1,1] or [0]*1+[1]*26")
