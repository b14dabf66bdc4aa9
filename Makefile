# A machine needs git, make and Python 3.10 or later; everything else is installed into .venv/ from here.
#
#   make run     install, generate the sample workload, print its summary
#   make test    install what developing needs, then lint, types and tests
#   make bench   the benchmarks
#   make format  let ruff mend what it can
#   make clean   remove the environment and the caches; results/ stays
#
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only.
PIP_INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install
# The stamp stands only where an install went through: without it, whatever a broken one left is cleared first.
MAKE_VENV = test -e .venv/.installed || $(PYTHON) -m venv --clear .venv

.PHONY: run install install-dev test lint types pytest bench format clean
.DEFAULT_GOAL := run
.NOTPARALLEL: # `test` runs its parts in the order written, quickest first, the tests last

run: install
	@$(BIN)/aicb generate -m 7 --world_size 4096 --tp 2 --global_batch 8192 --micro_batch 1 --seq_length 4096 \
		--swiglu --use_flash_attn --aiob_enable --comp_filepath workload/aiob_inputs/Example.txt

test: lint types pytest

install: .venv/.installed

install-dev: .venv/.installed-dev

.venv/.installed: pyproject.toml
	@echo "installing aicb into $(CURDIR)/.venv" >&2
	@$(MAKE_VENV)
	@$(PIP_INSTALL) --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt
	@echo "installing aicb and the development tools into $(CURDIR)/.venv (a minute or more)" >&2
	@$(MAKE_VENV)
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev,profiler]'
	@touch .venv/.installed $@

lint: install-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: install-dev
	$(BIN)/mypy

pytest: install-dev
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

bench: install-dev
	$(BIN)/python benchmarks/bench.py; status=$$?; PYTHONPATH=. $(BIN)/python benchmarks/layer_sum.py && exit $$status

format: install-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
