"""Read the arguments of a training script (`--args_file FILE`): a shell script, or YAML of names and values.

Of a shell script, the words from each list of flags on (MODEL_ARGS=( ... ), ARGS="...", a command line): comments,
assignments and other statements are skipped, variables assigned in the file are put in. No shell runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from aicb.errors import UserError, require
from aicb.files import Refusals, printable_path, read_text
from aicb.megatron import NO_EFFECT

_REFUSALS = Refusals(
    UserError,
    unreadable=": cannot be read ({reason})",
    irregular=": {what}, expected a script or a YAML file",
    too_large=": {size} bytes, and a script has at most {most}: is it another file?",
    no_text=":{line}: the byte {byte} is no text: expected a script or a YAML file",
)
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|declare\s+(?:-\w\s+)?)?([A-Za-z_]\w*)\+?=(?!=)(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_COMMAND = re.compile(r"^\s*--|\b(?:torchrun|python\d?|srun|pretrain_\w+|deepspeed|\$\w+)\b")
_WHOLE_LIST = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")


def read_args(path: str) -> list[str]:
    """Return the flags and values of the file. Raises UserError naming the file, and the variable that is unknown."""
    shown = printable_path(path)
    text = read_text(path, shown, _REFUSALS)
    words = list(_yaml(text, shown) if Path(path).suffix.lower() in (".yaml", ".yml") else _shell(text, shown))
    require(bool(words), f"{shown}: no flag in it, such as --num-layers 32")
    return words


def _yaml(text: str, shown: str) -> Iterator[str]:
    """Names and values, whatever the sections they stand in: true is a switch, null and false are left out."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.fullmatch(r"\s*(?:-\s+)?(?:--)?([A-Za-z][\w-]*)\s*:(?:\s+(.*?))?\s*", _without_comment(line))
        if found is None:
            bare = re.fullmatch(r"\s*-\s+(--[\w-]+)(?:[ =](.+?))?\s*", _without_comment(line))
            require(
                bare is not None or not _without_comment(line).strip(" -.") or _is_text(line),
                f"{shown}:{number}: neither a name and a value nor a flag",
            )
            if bare:
                yield from (part for part in bare.groups() if part)
            continue
        name, value = found[1], (found[2] or "").strip().strip("'\"")
        if value.lower() in ("", "null", "~", "none", "false"):
            continue
        yield f"--{name}"
        if value.lower() != "true":
            yield value


def _is_text(line: str) -> bool:
    return line.lstrip().startswith(("- ", "%", "---")) and "--" not in line.lstrip()[2:]


def _without_comment(line: str) -> str:
    """Cut a comment: from a # that starts a word, outside quotes."""
    quote = ""
    for i, c in enumerate(line):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _shell(text: str, shown: str) -> Iterator[str]:
    variables: dict[str, str] = {}
    lists: set[str] = set()
    for number, statement in _statements(text):
        assigned = _ASSIGNMENT.fullmatch(statement)
        value = assigned[2].strip() if assigned else ""
        if assigned and "--" not in value:
            if not value.startswith("("):
                variables[assigned[1]] = _filled(value.strip("'\""), variables)
            continue
        if assigned:
            lists.add(assigned[1])
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            value = value[1:-1] if quoted else value.strip("()")
        elif not _COMMAND.search(statement):
            continue
        words = _split(value if assigned else statement, f"{shown}:{number}")
        yield from _flags(words, variables, lists, f"{shown}:{number}")


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each statement: lines ending in a backslash, open quotes and brackets go on."""
    lines = [_without_comment(line) for line in text.splitlines()]
    number = 0
    while number < len(lines):
        start, statement = number, lines[number]
        number += 1
        while number < len(lines) and _goes_on(statement):
            statement = re.sub(r"\\\s*$", " ", statement) + "\n" + lines[number]
            number += 1
        yield start + 1, re.sub(r"\\\s*$", " ", statement)


def _goes_on(statement: str) -> bool:
    if re.search(r"\\\s*$", statement):
        return True
    assigned = _ASSIGNMENT.fullmatch(statement)
    if assigned is None:
        return False
    value = assigned[2].strip()
    if value.startswith("("):
        return not value.endswith(")") or value.count("(") > value.count(")")
    return value[:1] in ("'", '"') and value.count(value[0]) % 2 == 1


def _split(text: str, where: str) -> list[str]:
    """Split as a shell does; $(( )) stays one word."""
    whole = _SUM.sub(lambda found: "$((" + re.sub(r"\s", "", found[1]) + "))", text)
    try:
        return shlex.split(whole)
    except ValueError as error:
        raise UserError(f"{where}: {error}: the quotes are not in pairs") from error


def _flags(words: list[str], variables: dict[str, str], lists: set[str], where: str) -> Iterator[str]:
    """Yield the words from the first flag on, variables put in; lists named here were read where they stand."""
    flag = ""
    for word in (part for each in words for part in (each.split() if each.startswith("--") else [each])):
        if re.fullmatch(r"&&?|\|\|?|;|\d?>.*", word):  # the end of the command
            return
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flag = "" if equals else name
            yield name + equals + _resolved(value, variables, name, where) if equals else word
        elif (found := _WHOLE_LIST.fullmatch(word)) and (found[1] in lists or "[" in word or not flag):
            known = found[1] in lists or found[1] in variables
            require(known, f"{where}: the variable {word} is not assigned in this file: put its value in its place")
        elif word.endswith(".py"):  # what a launcher runs
            flag = ""
        elif flag:
            yield _resolved(word, variables, flag, where)


def _resolved(word: str, variables: dict[str, str], flag: str, where: str) -> str:
    filled = _filled(word, variables)
    if "$" not in filled and "`" not in filled:
        return filled
    name = flag.removeprefix("--").replace("-", "_")
    require(
        name in NO_EFFECT,
        f"{where}: {flag} {word}: the variable is not assigned in this file: put its value in its place",
    )
    return "-"  # whatever it is, it has no effect


def _filled(word: str, variables: dict[str, str]) -> str:
    """Put in what is known: variables, and sums and products of whole numbers."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return variables.get(name, found[0] if default is None else default)

    filled = _SUM.sub(lambda found: _arithmetic(found, variables), word)
    return _VARIABLE.sub(value, filled)


def _arithmetic(found: re.Match[str], variables: dict[str, str]) -> str:
    """$((A + 2 * B)), of whole numbers."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1].replace("$", ""))
    text = text.replace("{", "").replace("}", "").replace(" ", "")
    if not re.fullmatch(r"\d{1,9}(?:[-+*]\d{1,9})*", text):
        return found[0]
    total = 0
    for sign, product in re.findall(r"([-+]?)([\d*]+)", text):
        factor = 1
        for number in product.split("*"):
            factor *= int(number)
        total += -factor if sign == "-" else factor
    return str(total)
