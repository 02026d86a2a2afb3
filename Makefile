# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs through `install`, from a fresh clone on.

PYTHON ?= python3
FORK_BUILD = PYTHONPATH=tools $(PYTHON) -m fork_build
BIN := .venv/bin
DURATION ?= 1200
OUTPUT ?= results/multiturn
REPETITIONS ?= 5

.PHONY: help install lint test test-full soak bench-multiturn bench-compare \
  bench-micro bench-sweep demo rebase-base rebase-check clean check-python

help:
	@echo 'make install             .venv with the fork installed editable'
	@echo 'make demo                push, pull and a single engine on a small real model'
	@echo 'make test                all tests that take part in every change'
	@echo 'make test-full           these and the slow ones'
	@echo 'make soak DURATION=1200  so many seconds of traffic with random faults'
	@echo 'make bench-multiturn     conversations with and without reading KV back from D'
	@echo 'make bench-compare       the base and ours under the same loads, in turn'
	@echo 'make bench-micro         what a hand-off costs the host, without a model'
	@echo 'make bench-sweep         the reproduction kit on this machine: push, pull, single'
	@echo 'make lint                linters, types, licence headers'
	@echo 'make rebase-check BASE=0.33.0     what another base version would ask of us'
	@echo 'make rebase-base VERSION=0.33.0   pin another base version'
	@echo 'make clean               remove .venv, the unpacked base and build products'

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ...' >&2; \
	  exit 1; }

install: check-python
	@$(FORK_BUILD) install --extras dev

lint: install
	@$(BIN)/pre-commit run --all-files --show-diff-on-failure

test: install
	@$(BIN)/python -m pytest

test-full: install
	@$(BIN)/python -m pytest -m 'full or not full'

soak: install
	@$(BIN)/python benchmarks/disagg/soak.py --duration '$(DURATION)'

bench-multiturn: install
	@$(BIN)/python benchmarks/disagg/multiturn.py --output '$(OUTPUT)' \
	  --repetitions '$(REPETITIONS)'

bench-compare: install
	@$(BIN)/python benchmarks/disagg/compare_base.py --output results/compare_base \
	  --rounds '$(REPETITIONS)'

bench-micro: install
	@$(BIN)/python benchmarks/disagg/microbench.py --output results/microbench

bench-sweep: install
	@DEVICE=cpu MODE=three-way benchmarks/disagg/run_sweep.sh

demo: install
	@$(BIN)/python examples/disaggregated/disaggregated_serving/demo.py

rebase-base: check-python
	@test -n '$(VERSION)' || { \
	  echo 'say which version: make rebase-base VERSION=0.33.0' >&2; exit 1; }
	@$(FORK_BUILD) rebase '$(VERSION)'

rebase-check: install
	@test -n '$(BASE)' || { \
	  echo 'say which version: make rebase-check BASE=0.33.0' >&2; exit 1; }
	@PYTHONPATH=tools $(BIN)/python -m rebase_check '$(BASE)'

clean: check-python
	@$(FORK_BUILD) remove
	@rm -rf .venv build dist vllm.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis
