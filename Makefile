PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo-model
# What bench_nki_peers.py is given: checkouts of the kernels to compare with; ours alone without.
NKI_PEERS ?=
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-long soak check bench bench-long clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing torch and warmstate into $(VENV); this takes a few minutes the first time"
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

$(DEMO)/config.json: | $(STAMP)
	$(BIN)/warmstate demo-model $(DEMO)

serve: $(STAMP) $(DEMO)/config.json
	$(BIN)/warmstate serve $(DEMO) --replicas 2 --dtype float32 --served-model-name demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

soak: $(STAMP)
	PYTHONPATH=.types $(BIN)/python -m warmstate.tests.soak.soak

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/warmstate bench nki
	$(BIN)/python tests/bench/bench_nki_peers.py $(NKI_PEERS)
	$(BIN)/python -m pytest -rP -k bfloat16 tests/models/torch_backend/test_torch_backend.py tests/replicas/test_bfloat16_hits.py
	$(BIN)/python tests/bench/bench_torch_backend.py --rounds 1
	$(BIN)/python tests/bench/bench_torch_backend.py --dtype float32 --only decode --layers 6 --rounds 2
	$(BIN)/python tests/bench/bench_http.py
	$(BIN)/python tests/bench/bench_long_prompt.py
	$(BIN)/python tests/bench/bench_store.py
	$(BIN)/python tests/bench/bench_ttft.py --lengths 2048 8192
	$(BIN)/python tests/bench/bench_publish.py
	$(BIN)/python tests/bench/bench_host_tier.py
	$(BIN)/python tests/bench/bench_index.py

bench-long: $(STAMP)
	$(BIN)/python tests/bench/bench_ttft.py --lengths 32768

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info
