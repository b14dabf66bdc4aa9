"""Hugging Face's config.json, by the table of architectures.py.

What changes the computation or the parameters and cannot be described is an error or a warning, never dropped in
silence; keys that nobody here knows are named in a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aicb.errors import UserError, nearest
from aicb.models.architectures import ARCHITECTURES, BY_FLAGS, REFUSED, Architecture, Config, Rule
from aicb.models.values import CONFIG_JSON, file_name, show

# Keys that change neither the parameters nor the work: tokens, initialization, dropout (what is fine-tuned has
# none; --hidden_dropout and --attention_dropout say otherwise), numbers inside a norm or a
# rotary table, weights of a loss, scores of routing, and how a program loads, prints or samples.
HARMLESS = {
    "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size",
    "eos_token_id", "ep_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_decoder",
    "keys_to_ignore_at_inference", "label2id", "layer_norm_eps", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "norm_topk_prob", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "rms_norm_eps", "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta",
    "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise", "scoring_func", "sep_token_id", "seq_aux",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p",
    "use_bfloat16", "use_cache", "classifier_dropout", "layer_norm_epsilon", "gradient_checkpointing",
}  # fmt: skip

_DECODER_ONLY = "only decoders can be described"
# Keys that any architecture may have.
RULES = (
    Rule("quantization_config", (None,), "the workload computes in --dtype, without quantization"),
    Rule("partial_rotary_factor", (1, 1.0, None), "generated with rotary positions on the whole head"),
    Rule("pruned_heads", ({}, None), "pruned heads cannot be described", refused=True),
    Rule("add_cross_attention", (False, None), _DECODER_ONLY, refused=True),
    Rule("is_encoder_decoder", (False, None), _DECODER_ONLY, refused=True),
)


def read_config(values: Mapping[str, Any], shown: str, file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the base fields for make_model, and warnings of one line each.

    `shown`: the path for messages. Raises UserError: an architecture, a field or a value that cannot be described.
    """
    config = Config(values, shown)
    architecture = _architecture(config)
    config.values = {**architecture.absent, **values}
    model = {"name": _name(config, file), **architecture.read(config)}
    for rule in (*RULES, *architecture.rules):
        if rule.key not in architecture.harmless:
            config.apply(rule)
    kinds = config.of_type("layer_types", list, "a list") or []
    if other := sorted({show(kind) for kind in kinds} - {'"full_attention"'}):
        config.warn("layer_types", f"with {', '.join(other[:3])}: generated with full causal attention")
    known = config.used | HARMLESS | {*architecture.harmless}
    unknown = [show(key)[1:-1] for key in values if key not in known and not key.startswith("_")]
    if unknown:
        more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
        config.warnings.append(f"{shown}: not understood, ignored: {', '.join(unknown[:20])}{more}")
    return model, config.warnings


def _architecture(config: Config) -> Architecture:
    """The entry that `model_type`, or else `architectures`, names."""
    kind = config.of_type("model_type", str, "a text")
    listed = config.of_type("architectures", list, "a list of texts") or []
    if kind in REFUSED:
        raise UserError(f"{config.at('model_type')}: {REFUSED[kind]}; {BY_FLAGS}, without those")
    classes = {entry.causal.lower(): name for name, entry in ARCHITECTURES.items()}
    alike = [classes[item.lower()] for item in listed if isinstance(item, str) and item.lower() in classes]
    found = kind if kind in ARCHITECTURES else next(iter(alike), None)
    if found is None:
        what = f"{config.at('model_type')} with architectures {', '.join(map(show, listed[:3])) or 'null'}"
        hint = nearest(kind or "", ARCHITECTURES)
        raise UserError(f"{what}: not known here{hint}: known are {', '.join(ARCHITECTURES)}; or {BY_FLAGS}")
    entry = ARCHITECTURES[found]
    if found != kind:
        config.warn("model_type", f"read as {found}, going by architectures")
    elif listed and found not in alike:
        config.warn("architectures", f"with {show(listed[0])}: generated as {entry.causal}, with its head")
    return entry


def _name(config: Config, file: Path) -> str:
    """The model's name, safe in a file name: _name_or_path, else the folder's or file's, else model_type."""
    given = config.of_type("_name_or_path", str, "a text") or ""
    folder = file.parent.resolve()
    if folder.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/HASH/config.json
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    place = folder.name if file.name == CONFIG_JSON else file.stem
    last = given.replace("\\", "/").rstrip("/").rpartition("/")[2]
    candidates = (last, place, config.get("model_type") or "")
    return next(filter(None, map(file_name, candidates)), "custom")
