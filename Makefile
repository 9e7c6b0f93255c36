# Everything runs from .venv, which is made when missing; no activated environment or locale is relied on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
PYTEST := $(BIN)/python -m pytest

export LC_ALL := C.UTF-8
export PYTHONUTF8 := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: install demo model test test-all lint format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python >= 3.11 needed, found {v.major}.{v.minor}: set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

model: $(MODEL)/source.json

$(MODEL)/source.json: | install
	$(BIN)/python scripts/fetch_smollm2.py --out $(MODEL)

demo: install
	$(BIN)/python scripts/demo.py

test: install
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not gpu"

# the slow tests ask what the demo promises, so they need its drafter
test-all: demo
	OMP_NUM_THREADS=1 $(PYTEST) -m "not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/typecheck.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
