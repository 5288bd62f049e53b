# Every target sets itself up: `make train` and `make test` work on a fresh machine with Python >= 3.10.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test gpu lint clean

train: $(READY)
	$(BIN)/fusedcomm train examples/quickstart.yaml --fit

# The interpreter's kernels, the compiled ones and everything else run in processes of their own: Triton binds its mode
# when it is imported. The GPU's cases run small here, interpreted, so that none meets a GPU with a slip in it.
test: $(READY)
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest tests/kernels_compile
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/gpu

# On a GPU machine, with the python3 that holds its torch: the compiled kernels checked, then timed. Needs no network.
gpu:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e .
	$(PYTHON) -m pytest tests/gpu
	$(PYTHON) -m fusedcomm.bench.gpu

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
