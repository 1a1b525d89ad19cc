PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo-model
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-long check bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

$(DEMO)/config.json: | $(STAMP)
	$(BIN)/warmstate demo-model $(DEMO)

serve: $(STAMP) $(DEMO)/config.json
	$(BIN)/warmstate serve $(DEMO) --replicas 2

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/warmstate bench

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info
