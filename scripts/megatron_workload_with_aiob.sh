#!/bin/sh
# Generate a Megatron workload for SimAI: every argument goes to `aicb generate` as it is (`--help` lists them).
# Run it from any folder: paths and results/workload/ are relative to where you are.
#   sh scripts/megatron_workload_with_aiob.sh -m 7 --world_size 4096 --tp 2 --global_batch 8192 \
#       --swiglu --use_flash_attn --aiob_enable --comp_filepath workload/aiob_inputs/Example.txt
set -eu
script=$0
[ -L "$script" ] && script=$(readlink -f -- "$script")
repo=$(CDPATH='' cd -- "$(dirname -- "$script")/.." && pwd -P)

# This checkout's environment first, then an installed aicb, then a Python that has what aicb needs.
[ -x "$repo/.venv/bin/aicb" ] && exec "$repo/.venv/bin/aicb" generate "$@"
command -v aicb >/dev/null && exec aicb generate "$@"

# In place of the folder you are in, where a file of yours, say typing.py, would be taken for a module.
load='import sys; sys.path[0] = sys.argv.pop(1); from aicb.cli import main'
python3 -c "$load" "$repo" 2>/dev/null && exec python3 -c "$load; sys.exit(main(sys.argv[1:]))" "$repo" generate "$@"

# A fresh checkout. make says on stderr what it installs.
make -C "$repo" -s install >&2
exec "$repo/.venv/bin/aicb" generate "$@"
