"""Write a file whole or not at all: a temporary in the same folder, then one rename."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, cast

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # raised by write() without a file name


@contextmanager
def atomic_write(
    path: str | os.PathLike[str], mode: Literal["wb"] = "wb", *, replace: bool = True
) -> Iterator[BinaryIO]:
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
        with os.fdopen(descriptor, mode) as file:
            if permissions is not None:
                temporary.chmod(permissions)
            yield cast(BinaryIO, file)
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
