"""Ctrl-C ends a profile even where Python drops it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from profiler.interrupts import heeded


class Dropping:
    """Its destructor is where the signal arrives."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_destructor_swallows_is_heeded() -> None:
    before = signal.getsignal(signal.SIGINT)
    with heeded() as check:
        check()
        del_me = Dropping()
        del del_me
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_elsewhere_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), heeded():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_thread_has_no_signals() -> None:
    failed = []

    def run() -> None:
        try:
            with heeded() as check:
                check()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
