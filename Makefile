# make demo    train the small demo on this machine's CPU and say where its picture is
# make test    lint, types and all tests
# make lint    ruff and mypy alone
# make bench   the benchmarks; results go to benchmarks/results/
#
# Everything is installed into .venv at the versions of constraints.txt; the stamp files keep that from being repeated.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
TOOLS := $(wildcard tools/*.py)
DEMO_DIR := work_dirs/unified_digits

.PHONY: demo test lint bench clean
.DEFAULT_GOAL := test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# PyTorch first: DeepSpeed's build looks for it.
$(VENV)/.stamp-torch: constraints.txt | $(BIN)/python
	$(PIP) setuptools
	$(PIP) $(TORCH)
	touch $@

# The commands are made from the names in tools/, so a new tool re-installs.
$(VENV)/.stamp-demo: setup.py constraints.txt $(VENV)/.stamp-torch $(TOOLS)
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.stamp-test: setup.py constraints.txt $(VENV)/.stamp-torch $(TOOLS)
	$(PIP) -e '.[test]'
	touch $@

demo: $(VENV)/.stamp-demo
	$(BIN)/python tools/train.py unified_digits
	@echo
	@echo "Picture:  $$(find $(DEMO_DIR) -name '*.png' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)"
	@echo "Metrics:  $(DEMO_DIR)/metrics.jsonl"
	@echo "Resume:   $(BIN)/python tools/train.py unified_digits --resume"

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy unigen_ds tools

bench: $(VENV)/.stamp-test
	@for script in benchmarks/*.py; do \
		if [ -e "$$script" ]; then echo "== $$script"; $(BIN)/python "$$script" || exit 1; fi; \
	done

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
