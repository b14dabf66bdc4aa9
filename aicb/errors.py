"""The errors that are for the person at the keyboard: one line each, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """Something the user asked for cannot be done; the message names flag, value and rule, in one line."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (nearest: a, b)"`, the known words most like `word`, or an empty string."""
    from difflib import get_close_matches  # only on the way to an error

    found = get_close_matches(word, list(known), n=3, cutoff=0.4)
    return f" (nearest: {', '.join(found)})" if found else ""


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)
