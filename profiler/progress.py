"""What the user sees while it measures: a bar on a terminal that has rich, else one plain line a kernel; on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str], None]
"""Called with the name of what is measured next."""


@contextmanager
def progress(total: int, show: bool) -> Iterator[Step]:
    """Yield what to call before each of `total` steps."""
    if not show:
        yield lambda _: None
    elif sys.stderr.isatty() and _has_rich():
        with _bar(total) as step:
            yield step
    else:
        yield _lines(total)


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401 (comes with typer, but nothing here depends on it)
    except ImportError:
        return False
    return True


@contextmanager
def _bar(total: int) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("profiling", total=total)
        done = -1

        def step(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=f"profiling {name}")

        yield step


def _lines(total: int) -> Step:
    done = 0

    def step(name: str) -> None:
        nonlocal done
        done += 1
        sys.stderr.write(f"profiling {done}/{total} {name}\n")
        sys.stderr.flush()

    return step
