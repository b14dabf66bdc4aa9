"""Read a small text file whatever lies at its path; write a file whole or not at all, by one rename."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_BYTES = 16 * 2**20  # what is read here is a few KiB; anything larger is some other file
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # raised by write() without a file name


class Refusals(NamedTuple):
    """The error that `read_text` raises, and what follows the path in its message, these fields filled in."""

    error: type[Exception]
    unreadable: str
    """`{reason}`"""
    irregular: str
    """`{what}`: a folder, or not a regular file."""
    too_large: str
    """`{size}`, `{most}`: bytes."""
    no_text: str
    """`{byte}` in hexadecimal, `{at}` from 0, `{line}` from 1: the first that is not UTF-8."""


def read_text(path: str | os.PathLike[str], shown: str, refusals: Refusals) -> str:
    """Return the UTF-8 text of a regular file of at most 16 MiB; nothing else is opened. A BOM is left out.

    Raises `refusals.error`, a message that starts with `shown`: missing, unreadable, not regular, too large, no text.
    """
    try:
        found = Path(path).stat()
        data = b""
        if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_BYTES:  # a FIFO would block, /dev/zero never end
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise refusals.error(shown + refusals.unreadable.format(reason=reason)) from error
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise refusals.error(shown + refusals.irregular.format(what=what))
    size = max(found.st_size, len(data))  # it may have grown meanwhile
    if size > MAX_BYTES:
        raise refusals.error(shown + refusals.too_large.format(size=size, most=MAX_BYTES))
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        place = {"byte": f"0x{data[error.start]:02x}", "at": error.start, "line": data.count(b"\n", 0, error.start) + 1}
        raise refusals.error(shown + refusals.no_text.format(**place)) from error


def printable_path(path: str | os.PathLike[str]) -> str:
    """A path as a message shows it: as it is, or quoted and escaped where a terminal could not show it on one line."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[BinaryIO]:
    """Yield a binary file that takes the place of `path` when the block ends without an exception.

    Without `replace`, a file that has come to be at `path` meanwhile stays: FileExistsError.

    Missing parent folders are created. A symbolic link stays and the file it names is replaced. A new file gets the
    permissions the umask gives, a replaced one keeps its own. On any exception, Ctrl-C included, the temporary is
    removed and an earlier file is untouched; a killed process leaves at most a hidden `.aicb-*.tmp`. There is no fsync:
    safe against a dying process, not against a power cut.

    Raises OSError naming `path`: not writable, a full disk, or something there that is not a regular file.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError on a loop of links before Python 3.13
    permissions = _permissions(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not made from the target's name, which may already be as long as a name can be.
    temporary = target.parent / f".aicb-{os.getpid()}-{os.urandom(8).hex()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if permissions is not None:
                temporary.chmod(permissions)
            yield file
        if replace:
            temporary.replace(target)
        else:
            _move_to_new(temporary, target)
    except OSError as error:
        _remove(temporary)
        if error.filename == os.fspath(temporary) or (error.filename is None and error.errno in _DISK_FULL):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # name what the user asked for
        raise
    except BaseException:
        _remove(temporary)
        raise


def _move_to_new(temporary: Path, target: Path) -> None:
    """Give `temporary` its name unless another process took it first."""
    try:
        target.hardlink_to(temporary)  # fails, and atomically so, where the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        temporary.replace(target)
    else:
        _remove(temporary)


def _permissions(target: Path) -> int | None:
    """Permission bits of the file that will be replaced, None where there is none; OSError where it must not be."""
    try:
        found = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(target))
    if not stat.S_ISREG(found):  # a rename onto /dev/null would delete the device
        raise OSError(errno.EINVAL, "Not a regular file, refusing to replace it", os.fspath(target))
    os.close(os.open(target, os.O_WRONLY))  # a rename would succeed on a write-protected file
    return stat.S_IMODE(found) & 0o777


def _remove(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink()
