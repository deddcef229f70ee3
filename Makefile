# Each target sets up what it needs. Python 3.11 or newer and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GOLDEN := golden/gguf
DEMO := demo-run

.DEFAULT_GOAL := help
.PHONY: help install demo demo-fault test lint faults bench golden clean

help:
	@echo "make demo        verify the shipped Q8_0 file against its BF16 source: a table and a verdict"
	@echo "make demo-fault  the same on a file with one negated tensor: FAIL, exit code 4"
	@echo "make test        lint, types and all tests"
	@echo "make faults      every planted fault: caught, localised, named; and clean files of every type"
	@echo "make bench       speed and memory, as ratios to peers measured in the same run"
	@echo "make golden      make the shipped model again (golden/README.md says what that needs)"

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[teacher,dev]'
	@touch $@

install: $(VENV)/installed

# The model is so small that threads would spend their time waiting for each other.
demo: install
	@rm -rf $(DEMO)
	$(BIN)/teacher verify golden/qwen35-tiny $(GOLDEN)/qwen35-tiny-Q8_0.gguf --policy q8_0 --threads 1 --out $(DEMO)

demo-fault: install
	@rm -rf $(DEMO)-fault $(DEMO)-fault.gguf
	$(BIN)/python ci/negate_tensor.py $(GOLDEN)/qwen35-tiny-Q8_0.gguf blk.2.ssm_a $(DEMO)-fault.gguf
	$(BIN)/teacher verify golden/qwen35-tiny $(DEMO)-fault.gguf --policy q8_0 --threads 1 --out $(DEMO)-fault

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q

faults: install
	$(BIN)/python ci/faults.py

bench: install
	$(BIN)/python ci/bench/prefill.py
	$(BIN)/python ci/bench/verify_memory.py
	$(BIN)/python ci/bench/audit.py

golden: install
	$(MAKE) -C golden PYTHON=$(abspath $(BIN)/python)

clean:
	rm -rf $(VENV) $(DEMO) $(DEMO)-fault $(DEMO)-fault.gguf
