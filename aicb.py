"""The torchrun entry: `torchrun aicb.py --aiob_enable -m 7 ...` is `aicb profile --aiob_enable -m 7 ...`.

Python puts this file's folder first on its path, where the package `aicb/` wins over this module of the same name.
"""

from aicb.__main__ import run

if __name__ == "__main__":
    run("profile")
