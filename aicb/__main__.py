"""Where the process of `aicb`, `python -m aicb` and `torchrun aicb.py` starts and ends."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def run(*command: str) -> NoReturn:
    """Run the command line of this process, after the words of `command`, and end the process with its exit code.

    SIGTERM and SIGHUP clean up as Ctrl-C does. A rank of torchrun ends at once, without unloading: one that had done
    its work was seen to abort (exit code -6) in C++ threads of torch and gloo, and torchrun takes that for a failed
    run.
    """
    rank = "RANK" in os.environ
    try:
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            # A rank that waits for the others inside torch would never get to run the handler.
            if signal.getsignal(number) == signal.SIG_DFL and not rank:
                signal.signal(number, _end)
        from aicb.cli import main  # here, so that a signal that comes meanwhile is handled too

        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        code = main([*command, *sys.argv[1:]])
    except KeyboardInterrupt:
        code = 130
    if rank:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run()
