# make demo    train the small demo on this machine's CPU (3 minutes), check its ledger, write its report
# make demo-emoji  train the second demo, in colour: draw, read and edit emoji (at most 20 minutes on 2 cores)
# make test    lint, types and the tests, but for the slow ones
# make slow    the tests that make test leaves out (25 minutes)
# make check-report  a report in headless Chromium, 1280 and 390 pixels, light and dark (REPORT=FILE; the demo's)
# make check-app  the page of tools/app.py in headless Chromium, with the models of the demos, or of shorter trainings
# make docs    the tables of docs/configs/, from the settings and the docstrings of components
# make site    docs/ as a site with search, build/site; a broken link or anchor is an error
# make lint    ruff and mypy alone
# make matrix  every engine, process count, precision and load, as a dated table (make test runs a pairwise part; half an hour)
# make mixtures  of the matrix the data alone: each engine, killed and resumed with other numbers of processes and workers
# make robustness  10,000 damaged data sets of every format: read, skipped and counted, or named (CASES=N SEED=S, or ONLY=K)
# make crash-states  10,000 states of the disk after a power cut within saves, deletions, merges and resumes of each engine
#                (N=COUNT SEED=S): what a resume then finds (make test has 500)
# make kills   runs under every engine are killed N times at random moments (N=1000 SEED=S, or ONLY=K: one run; MINUTES=M)
#              and must end bit-equal to those that were not (make test: 22 kills)
# make worker-kills  a data worker is killed 200 times at random moments, of runs too (make test: fewer)
# make mutations  small edits of the source, each with the test that must then fail; PART=K/N: a part, MINUTES=M: a limit;
#                SAMPLE=N SEED=S: random edits instead, and the share that the modules' own tests detect
# make bench   the benchmarks; results go to benchmarks/results/, and summary.md there has them all
#
# Everything is installed into .venv at the versions of constraints.txt; the stamp files keep that from being repeated.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
TOOLS := $(wildcard tools/*.py)
DEMO_DIR := work_dirs/unified_digits
EMOJI_DIR := work_dirs/unified_emoji

.PHONY: help demo demo-emoji check-report check-app docs site test slow matrix mixtures robustness crash-states kills
.PHONY: worker-kills mutations lint bench clean
.DEFAULT_GOAL := test

help:
	@sed -n '/^#/!q; s/^# \?//p' Makefile

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

$(VENV)/.stamp-demo-emoji: setup.py constraints.txt $(VENV)/.stamp-torch $(TOOLS)
	$(PIP) -e '.[demo-emoji]'
	touch $@

$(VENV)/.stamp-test: setup.py constraints.txt $(VENV)/.stamp-torch $(TOOLS)
	$(PIP) -e '.[test]'
	touch $@

# $(call train_and_report,CONFIG,FOLDER): with --resume a stopped demo continues, and a finished one only draws its
# pictures again.
define train_and_report
	$(BIN)/python tools/train.py $(1) --work-dir $(2) --resume
	@echo
	@$(BIN)/python tools/inspect_data.py $(1) --ledger $(2)/ledger.jsonl
	@echo
	@echo "Reached:"
	@grep _accuracy $(2)/results.json
	@printf "Report:   "; $(BIN)/python tools/report.py $(2)
	@echo "Pictures: $(2)/samples.png"
	@echo "Numbers:  $(2)/results.json  $(2)/metrics.jsonl"
	@echo "Resume:   $(BIN)/python tools/train.py $(1) --work-dir $(2) --resume"
endef

demo: $(VENV)/.stamp-demo
	$(call train_and_report,unified_digits,$(DEMO_DIR))

demo-emoji: $(VENV)/.stamp-demo-emoji
	$(call train_and_report,unified_emoji,$(EMOJI_DIR))

# Tests start hundreds of interpreters, each of which would compile the package where Python may not keep its bytecode.
test slow: export PYTHONDONTWRITEBYTECODE =
test: lint
	$(BIN)/python -m pytest

slow: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m slow --durations=0 --durations-min=5

matrix: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/matrix.py

mixtures: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/matrix.py --groups mixture

CASES ?= 10000
SEED ?= 0
robustness: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/robustness.py --seed $(SEED) $(if $(ONLY),--only $(ONLY),--num $(CASES))

crash-states: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/crash_states.py --seed $(SEED) --num $(or $(N),10000)

kills: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/kills.py --seed $(SEED) $(if $(ONLY),--only $(ONLY),--num $(or $(N),1000)) \
		$(if $(MINUTES),--minutes $(MINUTES))

worker-kills: $(VENV)/.stamp-test
	KILLS=200 $(BIN)/python -m pytest --timeout 1200 tests/system/test_workers.py tests/end_to_end/resume/ended_processes/test_lost_data.py -k killed

PART ?= 1/1
mutations: $(VENV)/.stamp-test
	$(BIN)/python -m tests.mutate --part $(PART) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(SAMPLE),--sample $(SAMPLE) --seed $(SEED)) $(MUTATE)

# The tables of docs/configs/, from the settings and the docstrings of components.
docs: $(VENV)/.stamp-test
	$(BIN)/python docs/generate.py

$(VENV)/.stamp-site: setup.py constraints.txt $(VENV)/.stamp-torch
	$(PIP) -e '.[site]'
	touch $@

# The variable leaves out an advertisement of MkDocs Material.
site: $(VENV)/.stamp-site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy unigen_ds tools

# Needs a Chromium: the system's, or `playwright install chromium`. Pictures go to a temporary folder.
REPORT ?= $(DEMO_DIR)/report.html
check-report: $(VENV)/.stamp-test
	$(PIP) -e '.[browser]'
	$(BIN)/python -m tests.browser.check_report $(REPORT)

# Needs a Chromium, too.
check-app: $(VENV)/.stamp-app
	$(VENV)/app/bin/python -m pytest tests/browser/check_app.py

# Gradio accepts no Pillow 13, whose pixels the tests know: an environment of its own, which sees all other packages.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(VENV)/.stamp-app: $(VENV)/.stamp-test
	$(BIN)/python -m venv $(VENV)/app
	$(BIN)/python $(PURELIB) > "$$($(VENV)/app/bin/python $(PURELIB))/project.pth"
	$(VENV)/app/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e '.[app,browser]'
	touch $@

# Campaigns need hours, root or a second tree: they are run by themselves. Without a CUDA device gpu.py ends with 3: nothing is measured.
CAMPAIGNS := crash_states kills matrix robustness same_numbers two_machines
OVERHEADS := $(foreach engine,single fsdp zero2,"overhead.py --threads 1 --backend $(engine)") \
	$(foreach engine,fsdp zero2,"overhead.py --threads 1 --backend $(engine) --processes 2")

bench: $(VENV)/.stamp-test
	@for script in $(filter-out $(CAMPAIGNS:=.py) gpu.py overhead.py summary.py,$(notdir $(wildcard benchmarks/*.py))) \
		$(OVERHEADS); do \
		echo "== $$script"; $(BIN)/python benchmarks/$$script || missed="$$missed $$script;"; \
	done; \
	$(BIN)/python benchmarks/gpu.py || [ $$? = 3 ] || missed="$$missed gpu.py;"; \
	$(BIN)/python benchmarks/summary.py; \
	[ -z "$$missed" ] || { echo "Exit status not 0:$$missed"; exit 1; }

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
