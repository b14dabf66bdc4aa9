"""A model file, whatever its kind: our TOML (toml.py) or Hugging Face's config.json (huggingface.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from aicb import units
from aicb.config.model import make_model
from aicb.config.presets import PRESETS
from aicb.errors import UserError, require
from aicb.files import Refusals, printable_path, read_text
from aicb.models.values import CONFIG_JSON, show

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
        from aicb.models.toml import read_toml  # each only where there is one

        base = read_toml(_parse(text, shown, "TOML", _parse_toml), shown, file.stem)
    else:
        from aicb.models.huggingface import read_config

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
