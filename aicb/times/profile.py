"""The compute profile: measured times of every kernel of one model slice on one kind of GPU; read, write, match.

    train_iter:10
    # format_version: 2
    Emb:
        time_gpu_max: 857
        time_gpu_min: 782
        time_gpu_avg: 799
        weight_grad_avg: 812.5

Times are microseconds. The first generation of the file (AICB, github.com/aliyun/aicb) has neither comment lines nor
keys beyond the three `time_gpu_*`; its reader skips `#` lines and unknown keys, so it reads ours too.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aicb.errors import UserError
from aicb.files import Refusals, atomic_write, printable_path, read_text

_TRAIN_ITER = re.compile(r"train_iter:\s*([0-9]{1,18})\s*")
_COMMENT = re.compile(r"\s*#+\s*([A-Za-z_]\w*):(?!//)(.*)")  # `# key: value`, but not `# http://...`
_SECTION = re.compile(r"(\w+):\s*")
_KEY = re.compile(r"\s+(\w+):(.*)")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_UNWRITABLE = re.compile(r"[\0\n\r\v\f\x1c-\x1e\x85\u2028\u2029\ud800-\udfff]")  # ends a line, or is not UTF-8
_LINE_END = re.compile(r"\r\n|\r|\n")

_EXPECT_TIME = "expected a finite number of microseconds, 0 or more"
_EXPECT_LINE = "expected a section such as 'Emb:' or an indented key such as '    time_gpu_avg: 799'"
_EXPECT_FIRST = "expected the first line 'train_iter:N' with a whole number N >= 1"


class ProfileError(UserError):
    """A profile that cannot be read or written; one line: file, line number, what was found, what was expected."""


_REFUSALS = Refusals(
    ProfileError,
    unreadable=": cannot be read ({reason}), expected a compute profile",
    irregular=": found {what}, expected a compute profile (a text file)",
    too_large=": found {size} bytes, expected a compute profile of at most {most} bytes",
    no_text=":{line}: found the byte {byte}, expected UTF-8 text",
)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Times of one kernel, one section of the file, all in microseconds."""

    avg: float
    """`time_gpu_avg`: mean forward time over all kept samples of all ranks, us."""
    min: float | None = None
    """`time_gpu_min`: shortest forward sample, us; None when the file does not say."""
    max: float | None = None
    """`time_gpu_max`: longest forward sample, us; None when the file does not say."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Further keys in file order, us: `forward_median`, `input_grad_avg`, `weight_grad_p80`, ...; and `samples`."""
    line: int = field(default=0, compare=False)
    """Line of the file on which the section starts, from 1; 0 when it was not read from a file."""

    @property
    def forward(self) -> float:
        """Median forward time, us, which one hiccup does not move; the mean where the file has no other."""
        return self.more.get("forward_median", self.avg)

    @property
    def input_grad(self) -> float | None:
        """Median time of the input gradient, us, or its mean; None when it was not measured."""
        return self.more.get("input_grad_median", self.more.get("input_grad_avg"))

    @property
    def weight_grad(self) -> float | None:
        """Median time of the weight gradient, us, or its mean; None when it was not measured."""
        return self.more.get("weight_grad_median", self.more.get("weight_grad_avg"))


@dataclass(frozen=True, slots=True)
class Profile:
    """One compute profile."""

    path: str = field(compare=False)
    """Where it was read from; appears in error messages."""
    train_iter: int
    """How many iterations were averaged, >= 1; about the measurement, not about the workload."""
    origin: Mapping[str, str]
    """The `# key: value` lines in file order: how it was measured and for which slice of which model."""
    sections: Mapping[str, KernelTime]
    """Section name to its times, in file order."""

    @property
    def generation(self) -> int:
        """2 when the file states a `format_version`, else 1."""
        return 2 if "format_version" in self.origin else 1


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile of either generation; times in us. Nothing but a regular file of at most 16 MiB is opened.

    Raises ProfileError: missing, unreadable, not a regular file, too large, not UTF-8 text, or any rule of
    `parse_profile` broken.
    """
    return parse_profile(read_text(path, printable_path(path), _REFUSALS), os.fspath(path))


def parse_profile(text: str, path: str) -> Profile:
    """Parse the text of a profile; times in us; `path` is only for messages. A BOM and any line end are accepted.

    Raises ProfileError: no `train_iter` first, no section, a section without `time_gpu_avg`, a repeated section, key or
    comment key, a time that is not a finite number >= 0, or a line that is none of these.
    """
    reader = _Reader(path)
    for number, line in enumerate(_LINE_END.split(text.removeprefix("\ufeff")), start=1):
        reader.line = number
        reader.take(line)
    return reader.finish()


class _Reader:
    """The state between two lines of a profile."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 0
        self.train_iter = 0  # 0: the first line has not been seen
        self.origin: dict[str, str] = {}
        self.sections: dict[str, KernelTime] = {}
        self.name = ""  # the open section, "" before the first
        self.start = 0  # and its line
        self.times: dict[str, float] = {}  # and its keys so far

    def error(self, message: str, line: int | None = None) -> ProfileError:
        return ProfileError(f"{printable_path(self.path)}:{self.line if line is None else line}: {message}")

    def take(self, line: str) -> None:
        if "\0" in line:
            raise self.error("found a NUL byte, expected text; is this a binary file?")
        if not line.strip():
            return
        if line.lstrip().startswith("#"):
            if match := _COMMENT.fullmatch(line):
                self.take_comment(match[1], match[2].strip())
        elif not self.train_iter:
            match = _TRAIN_ITER.fullmatch(line)
            if match is None or int(match[1]) < 1:
                raise self.error(f"found {_quote(line)}, {_EXPECT_FIRST}")
            self.train_iter = int(match[1])
        elif match := _SECTION.fullmatch(line):
            self.open_section(match[1])
        elif match := _KEY.fullmatch(line):
            self.take_key(match[1], match[2].strip())
        else:
            raise self.error(f"found {_quote(line)}, {_EXPECT_LINE}")

    def take_comment(self, key: str, value: str) -> None:
        if key in self.origin:
            raise self.error(f"found the comment key {_quote(key)} a second time, expected it once")
        self.origin[key] = value

    def open_section(self, name: str) -> None:
        self.close_section()
        if name in self.sections:
            before = self.sections[name].line
            raise self.error(f"found a second section {_quote(name)} (first on line {before}), expected it once")
        self.name, self.start, self.times = name, self.line, {}

    def take_key(self, key: str, value: str) -> None:
        if not self.name:
            raise self.error(f"found the key {_quote(key)} before any section, expected a section such as 'Emb:' first")
        if key in self.times:
            raise self.error(f"found {_quote(key)} a second time in section {_quote(self.name)}, expected it once")
        if _NUMBER.fullmatch(value) is None or not _is_time(float(value)):
            raise self.error(f"found {_quote(value)} for {_quote(key)} of section {_quote(self.name)}, {_EXPECT_TIME}")
        self.times[key] = float(value)

    def close_section(self) -> None:
        if not self.name:
            return
        if "time_gpu_avg" not in (times := self.times):
            message = f"found section {_quote(self.name)} without 'time_gpu_avg', expected that key in every section"
            raise self.error(f"{message}; is the file cut off?", self.start)
        avg, low, high = times.pop("time_gpu_avg"), times.pop("time_gpu_min", None), times.pop("time_gpu_max", None)
        self.sections[self.name] = KernelTime(avg, low, high, times, self.start)

    def finish(self) -> Profile:
        if not self.train_iter:
            raise self.error(f"found an empty file, {_EXPECT_FIRST}")
        self.close_section()
        if not self.sections:
            raise self.error("found no section, expected at least one such as 'Emb:' with 'time_gpu_avg'")
        return Profile(self.path, self.train_iter, self.origin, self.sections)


def format_profile(profile: Profile) -> str:
    """Return the text of a profile: `train_iter`, the origin as comments (none: first generation), the sections.

    Times are us with at most 3 decimals (1 ns) and no exponent. Raises ProfileError for whatever either generation's
    reader would refuse or misread: names, numbers, a comment value of several lines, a further key ending in
    `time_gpu_avg` or `time_gpu_min`.
    """
    where = printable_path(profile.path)
    if profile.train_iter < 1 or not profile.sections:
        found = f"train_iter {profile.train_iter} and {len(profile.sections)} sections"
        raise ProfileError(f"{where}: {found} to write, expected at least 1 of each")
    lines = [f"train_iter:{profile.train_iter}"]
    lines.extend(_comment_line(key, value, where) for key, value in profile.origin.items())
    for name, times in profile.sections.items():
        lines.extend(_section_lines(name, times, where))
    return "\n".join(lines) + "\n"


def _comment_line(key: str, value: str, where: str) -> str:
    line = f"# {key}: {value.strip()}".rstrip()
    match = _COMMENT.fullmatch(line)
    if match is None or match[1] != key or _UNWRITABLE.search(line):
        raise ProfileError(f"{where}: origin {_quote(key)} is {_quote(value)}, expected a word and one line of text")
    return line


def _section_lines(name: str, times: KernelTime, where: str) -> list[str]:
    if not re.fullmatch(r"\w+", name):
        raise ProfileError(f"{where}: section name {_quote(name)} to write, expected letters, digits and '_'")
    for key in times.more:
        # The first generation searches for these names anywhere in a line, so they may not end a longer key either.
        if not re.fullmatch(r"\w+", key) or key.endswith(("time_gpu_avg", "time_gpu_min")) or key == "time_gpu_max":
            expected = "expected letters, digits and '_', not ending in time_gpu_avg or time_gpu_min"
            raise ProfileError(f"{where}: key {_quote(key)} of section {_quote(name)} to write, {expected}")
    own = {"time_gpu_max": times.max, "time_gpu_min": times.min, "time_gpu_avg": times.avg}
    lines = [f"{name}:"]
    for key, value in {**own, **times.more}.items():
        if value is None:
            continue
        if not _is_time(value):
            raise ProfileError(f"{where}: {_quote(key)} of section {_quote(name)} is {value}, {_EXPECT_TIME}")
        lines.append(f"    {key}: {_fixed(value)}")
    return lines


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write `format_profile` to `path`, whole or not at all.

    Raises ProfileError (before touching any file) as `format_profile` does, OSError as `atomic_write` does.
    """
    data = format_profile(profile).encode("utf-8")
    with atomic_write(path) as file:
        file.write(data)


def mismatches(profile: Profile, expected: Mapping[str, str]) -> list[str]:
    """Return a line for each key of `expected` that the profile's origin states with another value, in that order.

    A key that the profile does not state is no mismatch. Case does not count, and numbers compare as numbers.
    """
    differing = [(key, profile.origin[key], asked) for key, asked in expected.items() if key in profile.origin]
    return [f"{key}: profile {has}, asked {asked}" for key, has, asked in differing if not _same(has, asked)]


def _same(one: str, other: str) -> bool:
    if one.strip().casefold() == other.strip().casefold():
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def _is_time(value: float) -> bool:
    return 0 <= value < float("inf")  # False for nan too


def _fixed(value: float) -> str:
    return f"{value + 0.0:.3f}".rstrip("0").rstrip(".")  # + 0.0 turns -0.0 into 0.0


def _quote(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
