# make demo | test | lint | gate | bench | clean
#
# Everything runs in .venv, with the versions in constraints.txt. Where `python3` already has a torch that sees a GPU,
# that torch and its triton are kept: .venv then sees python3's packages (python3 may itself live in a virtual
# environment, so their folder is named in a .pth file), and torch and triton are pinned to what is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt

HAS_CUDA_TORCH := import torch, sys; sys.exit(not torch.cuda.is_available())
INSTALLED_PINS := import importlib.metadata as m; print(*(f"{d.name}=={d.version}" for d in m.distributions() if d.name in ("torch", "triton")), sep="\n")
SITE_PACKAGES := import site; print(*site.getsitepackages(), sep="\n")

.PHONY: demo test lint gate bench clean

demo: $(VENV)/installed
	$(BIN)/octavo generate --model smollm2-135m --stats \
		"The capital of France is" \
		"A paged KV cache is" \
		"Once upon a time, a printer folded a sheet into eight leaves and"

test: $(VENV)/installed-test
	$(BIN)/pytest -n 2

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

gate: $(VENV)/installed-test
	$(BIN)/python bench/gate.py

bench: $(VENV)/installed-test
	$(BIN)/pytest bench

clean:
	rm -rf $(VENV) build dist octavo.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: $(VENV)/constraints.txt pyproject.toml
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP_INSTALL) --editable ".[test]"
	touch $@

$(VENV)/constraints.txt: constraints.txt
	rm -rf $(VENV)
	if $(PYTHON) -c '$(HAS_CUDA_TORCH)' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && \
		grep -v -E '^(torch|triton)==' $< >$@.part && \
		$(PYTHON) -c '$(INSTALLED_PINS)' >>$@.part && \
		$(PYTHON) -c '$(SITE_PACKAGES)' >"$$($(BIN)/python -c '$(SITE_PACKAGES)' | head -n 1)/python3.pth"; \
	else \
		$(PYTHON) -m venv $(VENV) && cp $< $@.part; \
	fi
	mv $@.part $@
