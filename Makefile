# Every target sets itself up: `make train` and `make test` work on a fresh machine with Python >= 3.10.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test lint clean

train: $(READY)
	$(BIN)/fusedcomm train examples/quickstart.yaml --fit

# The interpreter's kernels, the compiled ones and everything else run in processes of their own:
# Triton binds its mode when it is imported.
test: $(READY)
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest tests/kernels_compile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

clean:
	rm -rf $(VENV) build *.egg-info runs

# `pip install -e` from the constraints; again whenever one of them changes.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools -e '.[test,plots,tensorboard,lint]'
	touch $@
