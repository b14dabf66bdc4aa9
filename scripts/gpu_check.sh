#!/bin/sh
# Check the profiler on this machine's GPU, in 5 minutes: the GPU tests, then four profiles, each measured twice.
#   sh scripts/gpu_check.sh            profiles and log go to $OUT, or to results/gpu_check
# Made for a bare machine: it needs python3 (or $PYTHON) with torch, and a CUDA GPU; it installs nothing and needs no
# network. It calls the profiler itself, not the aicb command, so it runs without typer too.
set -u
repo=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$repo" || exit 2
python=${PYTHON:-python3}
out=${OUT:-results/gpu_check}
export PYTHONPATH="$repo" PYTHONUNBUFFERED=1
began=$(date +%s)
status=0

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "gpu_check: $python has no torch that finds a CUDA GPU; nothing was checked" >&2
    exit 2
}
mkdir -p "$out" || exit 2

if "$python" -c 'import pytest' 2>/dev/null; then
    timeout 120 "$python" -m pytest --import-mode=importlib -p no:cacheprovider -q -m gpu tests/gpu || status=1
else
    echo "gpu_check: pytest is not installed here: tests/gpu were NOT run"
    status=1
fi
"$python" -c 'import typer' 2>/dev/null ||
    echo "gpu_check: typer is not installed here: the aicb command was NOT run, only the profiler behind it"

"$python" -m profiler.gpu_check "$out" || status=1
echo "gpu_check: $(($(date +%s) - began)) s in all, exit code $status, profiles in $out"
exit $status
