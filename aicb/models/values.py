"""What the readers of model files share: limits, checked values, and values as a message shows them."""

from __future__ import annotations

from aicb.errors import UserError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 100_000
CONFIG_JSON = "config.json"


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
