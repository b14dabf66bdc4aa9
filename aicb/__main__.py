"""`python -m aicb` is the `aicb` command."""

from aicb.cli import run

run()
