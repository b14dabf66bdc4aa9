"""From the words a user typed, or pasted from a training script, to those of options.py.

Megatron-LM's flags (megatron.py) that say nothing about the workload are taken out and named in one warning; those that
no workload here can say are refused; lists in files (--args_file) are put in front, so that what is typed wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from aicb.errors import UserError, require
from aicb.megatron import NO_EFFECT, REFUSED, SWITCH, TRANSLATED, VALUES
from aicb.options import OPTIONS

ON, OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
ARGS_FILE = "args_file"
SWITCHES = frozenset(
    name for option in OPTIONS if option.type is bool for name in (option.name, *(a[2:] for a in option.aliases))
)


def known_flags() -> list[str]:
    """Return every Megatron-LM flag that options.py does not have, with its dashes."""
    return [f"--{name}" for name in (*NO_EFFECT, *REFUSED, *TRANSLATED, ARGS_FILE)]


def plain_name(word: str) -> str:
    """--sequence-parallel=on is sequence_parallel; empty for what is no long option."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") and len(word) > 2 else ""


def switches(words: Sequence[str]) -> list[str]:
    """Rewrite `--sp on|off` and `--sp=on|off` to --sp or --no-sp: scripts write switches with a value."""
    found: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if not equals and found:
            flag, value = found[-1], word
        if plain_name(flag) not in SWITCHES or "=" in flag or value.lower() not in ON + OFF:
            found.append(word)
            continue
        if not equals:
            found.pop()
        found.append(f"--no-{flag[2:]}" if value.lower() in OFF else flag)
    return found


def translate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of options.py, and the flags taken out since they have no effect, each once, as typed.

    Raises UserError for a flag that no workload here can say, by its name and value.
    """
    pending = _with_files(list(words))
    kept: list[str] = []
    silent: list[str] = []
    while pending:
        word = pending.pop(0)
        name = plain_name(word)
        follows = _follows(name)
        if follows is None:
            kept.append(word)
            continue
        values = _values(word, follows, pending)
        if name in REFUSED:
            _refuse(word, name, values)
        elif name in TRANSLATED:
            kept += TRANSLATED[name]
        else:
            silent.append(f"--{word[2:].partition('=')[0]}")
    return switches(kept), list(dict.fromkeys(silent))


def _follows(name: str) -> str | None:
    """Return what follows Megatron-LM's flag `name`; None for a word that is no such flag."""
    if name in REFUSED:
        return REFUSED[name][0]
    if name in TRANSLATED:
        return SWITCH
    positive = name.removeprefix("no_")
    return NO_EFFECT.get(name, SWITCH if NO_EFFECT.get(positive) == SWITCH else None)


def _values(word: str, follows: str, pending: list[str]) -> list[str]:
    """Take the values that follow `word` out of `pending`."""
    _, equals, given = word.partition("=")
    if equals:
        return [given]
    if follows == SWITCH:
        written = pending and pending[0].lower() in ON + OFF
        return [pending.pop(0)] if written else []
    values: list[str] = []
    while pending and not pending[0].startswith("--") and pending[0] != "-m" and (follows == VALUES or not values):
        values.append(pending.pop(0))
    require(bool(values), f"{word} needs a value")
    return values


def _refuse(word: str, name: str, values: list[str]) -> None:
    follows, neutral, assumed = REFUSED[name]
    if follows == SWITCH and values and values[0].lower() in OFF:
        return
    if follows != SWITCH and all(value.strip("'\"") in neutral for value in values):
        return
    shown = " ".join([f"--{word[2:].partition('=')[0]}", *values])
    raise UserError(f"{shown} changes what is computed or sent, and is not known here: {assumed}")


def _with_files(words: list[str]) -> list[str]:
    """Put the words of every --args_file in front."""
    read: list[str] = []
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if plain_name(word) != ARGS_FILE:
            kept.append(word)
            continue
        _, equals, path = word.partition("=")
        require(bool(equals or words), f"--{ARGS_FILE} needs a file")
        from aicb.argsfile import read_args  # only where there is one

        read += read_args(path if equals else words.pop(0))
    return read + kept


def unresolved(word: str) -> Iterator[str]:
    """Yield the shell variables in a word."""
    for found in re.finditer(r"\$(?:\{(\w+)[^}]*\}|(\w+)|\()", word):
        yield found[1] or found[2] or "("
