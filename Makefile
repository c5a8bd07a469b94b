# Thin: every target calls `patchgen` or a test runner. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PATCHGEN := $(BIN)/patchgen
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# torch first and by exact version: a plain `torch` may bring a CUDA build of several gigabytes.
TORCH ?= torch==$(shell sed -n 's/^torch==//p' constraints.txt)
# The versions to install, but for torch's: TORCH names it, also where it is not the one of constraints.txt.
CONSTRAINTS := $(VENV)/constraints-without-torch.txt
# Built for CUDA only: beside torch for the CPU it lies where only the tests that know it look for it.
TORCHVISION ?= torchvision==0.28.0
# An older one fails late, in pip's resolver; an environment that was made with one is made again.
IS_NEW_ENOUGH := import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "patchgen needs Python 3.11 or newer, and \
	%s is %d.%d. Name another: make PYTHON=python3.12 TARGET" % (sys.executable, v[0], v[1]))
FROM = $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS))

.DEFAULT_GOAL := help
.PHONY: help setup setup-test regen regen-all check report verify verify-all verify-ranks sweep sweep-media sweep-heads sweep-ranks records \
	test test-models test-slow accounts test-gpu test-poisoned test-refusals test-parallel mutate mutate-generator \
	test-checkpoints test-kernels lint bench-generate bench-moe bench-loss bench-elementwise bench-data train clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-24s %s\n", $$1, $$2}'
	@echo "  MODEL=qwen3_moe picks a model, TRANSFORMERS=5.17.0 another upstream release"

$(VENV)/.setup: pyproject.toml constraints.txt
	@$(BIN)/python -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { $(PYTHON) -c '$(IS_NEW_ENOUGH)' && $(PYTHON) -m venv --clear $(VENV); }
	@echo "setting up $(VENV) (generator only)"
	@sed '/^torch==/d' constraints.txt > $(CONSTRAINTS)
	@$(PIP) install --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.setup-test: $(VENV)/.setup
	@echo "setting up $(VENV) (tests: torch and test tools)"
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install $(TORCH)
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[test]'
	@$(PIP) install --no-deps --upgrade --target $(VENV)/torchvision-for-tests $(TORCHVISION)
	@touch $@

$(VENV)/.setup-train: $(VENV)/.setup-test
	@echo "setting up $(VENV) (training)"
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[train]'
	@touch $@

setup: $(VENV)/.setup  ## install the generator into .venv
setup-test: $(VENV)/.setup-test  ## install what the tests need, torch included

regen: $(VENV)/.setup  ## write generated_models/$(MODEL) and show what changed
	@test -n "$(MODEL)" || { echo "Name a model: make regen MODEL=qwen3_moe"; exit 2; }
	@$(PATCHGEN) generate $(MODEL) $(FROM) $(ARGS)

regen-all: $(VENV)/.setup  ## write every committed model again
	@$(PATCHGEN) generate --all $(FROM) $(ARGS)

check: $(VENV)/.setup  ## are the committed models what generation gives now, and does every recorded proof hold?
	@$(PATCHGEN) check $(MODEL)

report: $(VENV)/.setup  ## write reports/index.html, and a page per model for its reviewer
	@$(PATCHGEN) report $(MODEL)

verify: $(VENV)/.setup-test  ## prove generated_models/$(MODEL) equal to upstream
	@test -n "$(MODEL)" || { echo "Name a model: make verify MODEL=qwen3_moe"; exit 2; }
	@$(PATCHGEN) verify $(MODEL)

verify-all: $(VENV)/.setup-test  ## prove the committed models whose recorded proof does not hold (minutes)
	@$(PATCHGEN) verify --all --outdated

verify-ranks: $(VENV)/.setup-test  ## the same on ranks, in six layouts (some two minutes each)
	@failed=0; for layout in "2 --sp 2" "2 --sp 2 --fsdp" "4 --sp 4" "4 --sp 4 --fsdp" "4 --sp 2 --fsdp" "4 --fsdp"; do \
		$(PATCHGEN) verify --all --outdated --ranks $$layout || failed=1; done; exit $$failed

sweep: $(VENV)/.setup-test  ## generate and prove every text model type into docs/coverage.md (minutes)
	@$(PATCHGEN) sweep --family text --jobs 2 $(FROM)

sweep-media: $(VENV)/.setup-test  ## the same for every type that takes images, video or audio
	@$(PATCHGEN) sweep --family media --jobs 2 $(FROM)

sweep-heads: $(VENV)/.setup-test  ## the same for classifiers, token classifiers, question answering and base models
	@OMP_NUM_THREADS=1 $(PATCHGEN) sweep --family heads --jobs 2 $(FROM)

sweep-ranks: $(VENV)/.setup-test  ## compare every type on two ranks: FSDP, shared experts, a shared sequence (minutes)
	@failed=0; for family in text media; do \
		OMP_NUM_THREADS=1 $(PATCHGEN) sweep --family $$family --world 2 || failed=1; done; exit $$failed

# One after the other: each step reads what the one before wrote. A sweep exits with 1 where a type is not proven.
records: $(VENV)/.setup-test  ## renew every recorded proof that does not hold
	-@$(MAKE) --no-print-directory sweep
	-@$(MAKE) --no-print-directory sweep-media
	-@$(MAKE) --no-print-directory sweep-heads
	-@$(MAKE) --no-print-directory sweep-ranks
	-@$(MAKE) --no-print-directory verify-all
	-@$(MAKE) --no-print-directory verify-ranks
	@$(MAKE) --no-print-directory check

test: $(VENV)/.setup-test  ## run the tests
	@$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 $(ARGS)

# What a run asks of the few models that have every kind of site (tests/chosen_models.py).
test-models: $(VENV)/.setup-test  ## generating, losses, experts, heads and checkpoints of every committed model (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 $(ARGS) tests/runtime/test_generate.py tests/runtime/test_implementations.py \
		tests/runtime/test_experts_interface.py tests/runtime/test_positions.py tests/runtime/parallel/test_absent_towers.py \
		tests/runtime/objectives/test_heads.py tests/distributed/test_checkpoints.py

test-slow: $(VENV)/.setup-test  ## the slow tests as well: every upstream file imports, every model is proven
	@$(BIN)/python -m pytest -m "not gpu" -n 2 $(ARGS)

# One process: the tests write into one file.
accounts: $(VENV)/.setup-test  ## record what generation gives, for the tests, and show what changed
	@PATCHGEN_RECORD=1 $(BIN)/python -m pytest tests/patchgen/test_accounts.py tests/patchgen/test_mutations.py -n 0 $(ARGS)
	@git diff --stat tests/patchgen/data

# One after another: some take most of a device's memory.
test-gpu: $(VENV)/.setup-test  ## the tests that need a GPU; some need two, and are skipped on one
	@$(BIN)/python -m pytest -m gpu -n 0 $(ARGS) tests/kernels tests/runtime tests/distributed

test-poisoned: $(VENV)/.setup-test  ## the tests with NaN in all memory that nobody has written
	@PYTHONPATH=$(CURDIR)/tests/poisoned $(BIN)/python -m pytest -m "not slow and not gpu" -n 2 $(ARGS)

test-refusals: $(VENV)/.setup-test  ## every type that the record does not call proven is refused by train (minutes)
	@$(BIN)/python -m pytest tests/patchgen/test_refusals.py -n 2 $(ARGS)

# Dense, experts, shared experts, linear attention, state spaces, images, audio, all of them at once.
MUTATED := llama olmo2 gemma2 qwen3_moe mixtral gpt_oss granitemoe deepseek_v3 qwen2_moe qwen3_next lfm2 mamba2 minimax smolvlm \
	gemma3 qwen2_vl qwen3_asr
MUTATED_LONG := qwen2_5_omni
MUTANTS ?= mutants.jsonl

mutate: $(VENV)/.setup-test  ## hold the generator to 5,000 changed upstream sources, into docs/mutations.md (hours; goes on where it stopped)
	@$(PATCHGEN) mutate $(MUTATED) --count 300 --ranks --jobs 2 --records $(MUTANTS) $(ARGS)
	@$(PATCHGEN) mutate $(MUTATED_LONG) --count 60 --ranks --jobs 2 --records $(MUTANTS) --output records/mutations.json $(ARGS)

mutate-generator: $(VENV)/.setup-test  ## change the generator's own modules and ask the tests (an hour)
	@PYTHONPATH=. $(BIN)/python benchmarks/mutate_generator.py $(ARGS)

lint: $(VENV)/.setup-test  ## ruff, format included; types; names of tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@twice=$$(find tests -name 'test_*.py' | sed 's|.*/||' | sort | uniq -d); test -z "$$twice" || \
		{ echo "Two files of tests have one name, and pytest takes neither: $$twice. Rename one."; exit 1; }

test-parallel: $(VENV)/.setup-test  ## the whole matrix of layouts on gloo ranks, eight ranks included (over half an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/distributed tests/runtime/parallel --ignore tests/distributed/test_checkpoints.py \
		-m "not gpu" $(ARGS)

train: $(VENV)/.setup-train  ## train the toy recipe on two CPU ranks that share the experts (minutes), load the export
	@OMP_NUM_THREADS=1 $(PATCHGEN) train recipes/qwen3_moe_toy.yaml --nproc 2 --set parallel.ep=2 --fresh $(ARGS)
	@$(BIN)/python -m patchgen.runtime.train.check_run runs/qwen3_moe_toy --below 0.6

test-checkpoints: $(VENV)/.setup-test  ## checkpoints of every model over ranks, runs killed thirty times (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/runtime/checkpoint tests/distributed/test_checkpoints.py -m "not gpu" $(ARGS)

bench-generate: $(VENV)/.setup-test  ## time generation as a whole process
	@$(BIN)/python benchmarks/bench_generate.py $(ARGS)

bench-moe:  ## check and time the experts' kernels; runs with the python that has CUDA: PYTHON=python3
	@PYTHONPATH=. $(PYTHON) benchmarks/bench_moe.py $(ARGS)

bench-loss:  ## check and time the language-model losses; with the python that has CUDA
	@PYTHONPATH=. $(PYTHON) benchmarks/bench_loss.py $(ARGS)

bench-elementwise:  ## check and time norm, rotary and SwiGLU; with the python that has CUDA
	@PYTHONPATH=. $(PYTHON) benchmarks/bench_elementwise.py $(ARGS)

test-kernels:  ## the kernels' tests alone; on a GPU with the python that has CUDA, else in the interpreter
	@PYTHONPATH=. $(PYTHON) -m pytest tests/kernels $(ARGS)

bench-data: $(VENV)/.setup-test  ## how full batches are, and how fast the loader feeds them
	@PYTHONPATH=. $(BIN)/python benchmarks/bench_data.py $(ARGS)

clean:  ## remove .venv
	rm -rf $(VENV)
