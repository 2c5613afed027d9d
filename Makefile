# `make help` lists the commands. Arguments: make train ARGS="model=gpt2_124m data=mock"
VENV ?= .venv
ARGS ?=
PYTHON_IN_VENV := $(VENV)/bin/python
# The installation writes it last, so that an interrupted one never looks complete.
INSTALLED := $(VENV)/.installed

.PHONY: help install train test lint docs clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh
	@scripts/install.sh "$(VENV)"

install: $(INSTALLED) ## create .venv and install (PYTHON=… names the interpreter)

train: $(INSTALLED) ## train; without ARGS a small GPT on Python's own sources, in minutes on a CPU
	@$(PYTHON_IN_VENV) -m gpt_pretrain $(ARGS)

# Bytecode is kept whatever the environment says: pytest and each interpreter that a test starts would otherwise spend
# seconds compiling.
test: $(INSTALLED) ## all tests that need no GPU and are not marked slow
	@env -u PYTHONDONTWRITEBYTECODE $(PYTHON_IN_VENV) -m pytest -m "not gpu and not slow and not soak" -n 2 --dist worksteal $(ARGS)

lint: $(INSTALLED) ## ruff (rules and format), mypy (strict) and shellcheck
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m mypy
	$(VENV)/bin/shellcheck --external-sources .ci/run scripts/install.sh scripts/slurm/* tests/slurm/start.sh

# Without the variable the theme advertises its successor.
docs: $(INSTALLED) ## build the manual as a site into site/; a broken link fails it
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --quiet
	@echo "built: site/index.html"

clean: ## remove .venv, caches and builds; outputs/ stays
	@scripts/install.sh --check "$(VENV)"
	rm -rf "$(VENV)" .mypy_cache .pytest_cache .ruff_cache build dist site
	find gpt_pretrain tests -type d -name __pycache__ -prune -exec rm -rf {} +
