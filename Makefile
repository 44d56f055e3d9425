# Everything a person or CI does with the project. `make` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Else each test worker and each program that a test starts compiles all modules again; `make clean` removes what is written.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo notebook test test-all gpu recipes check format docs dist dist-check clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

install: ## make .venv with the package, its demo, tests and tools (about 7.1 GB); FRESH=1 deletes an old one first
	$(if $(FRESH),rm -rf $(VENV))
	@$(MAKE) --no-print-directory $(STAMP)

# torch, torchvision and open_clip_torch must be resolved in one go: torchvision's wheels need the torch of their release.
$(STAMP): pyproject.toml
	@if [ -e $(VENV) ] && [ ! -e $(VENV)/.zerovl ]; then \
		echo "$(VENV) was not made by make install and is left alone: VENV=DIR installs elsewhere, make install FRESH=1 replaces it"; \
		exit 1; fi
	@echo "Setting up $(VENV) (torch and its libraries, about 7.1 GB; once) ..."
	test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && touch $(VENV)/.zerovl; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch torchvision open_clip_torch --editable '.[demo,test,app,trainers,dev,docs,notebook]'
	@touch $@

demo: $(STAMP) ## train on four emoji sources with debiased and random sampling, compare, export (about 5 minutes; ARGS="--epochs 40": training flags)
	$(BIN)/python -m scripts.demo $(if $(ARGS),-- $(ARGS))

notebook: $(STAMP) ## execute docs/first_hour.ipynb as a reader does, and keep its outputs (3 to 5 minutes)
	TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python -m scripts.notebook

test: $(STAMP) ## run the tests (4 minutes on 2 cores; OPEN_CLIP_SOURCE=DIR: on a checkout of open_clip)
	$(BIN)/python -m pytest -n 4 --dist worksteal

test-all: $(STAMP) ## run the slow tests too (long kills, full runs)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" --timeout 1800

# Installs nothing: .venv where it is there, else the machine's own Python, with wheels unpacked beside it. It is called again behind what broke CUDA's context
# or hung (75), and behind what ended the process (134, 139), within one limit.
gpu: ## what only a GPU can show, into docs/results/gpu-NAME.md (8 minutes, a second call 3; WHEELS=DIR, LIMIT=SECONDS, REHEARSE=1: on the CPU)
	$(if $(WHEELS),$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu/site $(call quoted,$(WHEELS))/*.whl)
	@end=$$(($$(date +%s) + $(or $(LIMIT),$(if $(REHEARSE),3600,480)))); status=75; \
	while [ $$status = 75 ] || [ $$status = 134 ] || [ $$status = 139 ]; do \
		$(or $(wildcard $(BIN)/python),$(PYTHON)) -m scripts.gpu --seconds $$((end - $$(date +%s))) \
			$(if $(REHEARSE),--rehearse --out build/gpu) $(ARGS); status=$$?; \
	done; exit $$status

# The paper's runs: make train-14m DATA=DIR [DRY_RUN=1] [ARGS="--set lr=5e-5"]; make plan-14m DATA=DIR
RECIPE = $(BIN)/python -m scripts.paper.recipes
quoted = '$(subst ','\'',$(1))'
GIVEN  = $(if $(DATA),--data $(call quoted,$(DATA))) $(if $(DRY_RUN),--dry-run) $(ARGS)

train-%: $(STAMP)
	$(strip $(RECIPE) train-$* $(GIVEN))

finetune-%: $(STAMP)
	$(strip $(RECIPE) finetune-$* $(GIVEN))

plan-%: $(STAMP)
	$(strip $(RECIPE) train-$* --plan $(GIVEN))

recipes: $(STAMP) ## list the paper's runs: make train-14m (finetune-coco ...) DATA=DIR [DRY_RUN=1] starts one, make plan-14m says what it takes
	$(RECIPE) --list

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell src scripts tests docs *.md
	$(BIN)/mypy

format: $(STAMP) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the documentation site into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html (with search: $(BIN)/python -m http.server --directory build/site)"

dist: $(STAMP) ## build dist/: wheel and sdist
	$(BIN)/python -m build --outdir dist .

dist-check: $(STAMP) ## build the wheel, install it into an environment of its own and use it from another folder (2 minutes)
	$(BIN)/python -m scripts.dist_check --out build/dist

clean: ## remove the environment and everything the demo and tests wrote
	rm -rf $(VENV) build dist data/emoji demo .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		src/*.egg-info
	find src tests scripts -name __pycache__ -prune -exec rm -rf {} +
