# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Each stamp below .venv says that a step of scripts/setup.sh was
# done after the files that it depends on were last changed; without changes setup does nothing.

VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
FOLDERS := criu_glue cuda_snapshot interposer launcher runtime
SOURCES := $(wildcard *.py) py.typed meson.build pyproject.toml \
	$(shell find $(FOLDERS) -type f -not -name '*.pyc')
C_FILES = $(shell find $(FOLDERS) tests integration -name '*.[ch]')
BESIDE = --dist loadfile --no-loadscope-reorder --numprocesses
# Tests wait more than they compute: two at a time leave half of two cores idle, in labs a third.
TESTS_AT_ONCE ?= 4
LABS_AT_ONCE ?= 3
LABS = integration -m 'not long and not alone' $(BESIDE) $(LABS_AT_ONCE) $(ARGS) -- integration -m 'not long and alone' $(ARGS)
ALONE = scripts/alone.sh "make $@"
WHOLE_RUN = $(BIN)/python scripts/whole_run.py
# The programs of integration/ import modules of both harnesses by their bare names.
PROGRAM = PYTHONPATH=integration:integration/support:tests/support $(BIN)/python -m
export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-lab test-long coverage gate-simulation fault-matrix load soak fuzz mutation sanitize compat nightly bench-gate bench-move bench-failure bench-engine gpu-suite wheel lint format docs clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 16

setup: $(STAMPS)/package $(STAMPS)/criu ## Make .venv with everything in it, and find or fetch CRIU
	@:

demo: ## Empty a virtual host while a job trains on it, compare with an untouched run; build/demo/
	@$(ALONE) setup -- $(BIN)/python -m liveshift.launcher.demo

# Without what is marked as long: further cases of what shorter tests show too. Some files at a time;
# what measures times (marked as alone) comes last, one after the other. One such run, or demo, on a
# machine at a time, which is refused before its setup; a test that is skipped is one that failed.
test: ## Run tests/ and, in the lab, integration/ (root)
	@$(ALONE) setup $(STAMPS)/test-requirements -- $(WHOLE_RUN) "make $@" -- \
		tests -m 'not long' $(BESIDE) $(TESTS_AT_ONCE) $(ARGS) -- $(LABS)

test-fast: $(STAMPS)/package $(STAMPS)/test-requirements ## Run tests/ only, without those that need the lab
	@$(BIN)/python -m pytest tests -m 'not lab and not long' $(BESIDE) $(TESTS_AT_ONCE) $(ARGS)

test-lab: ## Run integration/ only: whole-system scenarios in the lab (root)
	@$(ALONE) setup -- $(WHOLE_RUN) "make $@" -- $(LABS)

# With LAB=1 also what the lab's daemons run, but for those that a test kills. Tests that fail do not
# keep the table from being written.
coverage: export COVERAGE_DATA = $(CURDIR)/build/coverage/data
coverage: $(STAMPS)/package $(STAMPS)/test-requirements ## Which lines test-fast runs, by folder, LAB=1 the lab too (root); build/coverage/
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(if $(LAB),COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(ALONE) setup --) \
		$(BIN)/python -m pytest tests $(if $(LAB),integration) -m 'not long$(if $(LAB),, and not lab)' \
		--cov --cov-report= $(if $(LAB),,$(BESIDE) $(TESTS_AT_ONCE)) $(ARGS); tests=$$?; \
	if ls build/coverage/data.* >/dev/null 2>&1; then $(BIN)/coverage combine -q --append build/coverage; fi; \
	$(BIN)/coverage html -q -d build/coverage && \
	$(BIN)/coverage json -q -o build/coverage/coverage.json && \
	$(BIN)/python scripts/coverage_table.py build/coverage/coverage.json && exit $$tests

# STATES is how many the deep run of the protocol's model may visit.
test-long: ## Run what `make test` leaves out: further cases, deeper explorations (root)
	@LIVESHIFT_MODEL_STATES=$(or $(STATES),200000) $(ALONE) setup -- $(WHOLE_RUN) "make $@" -- tests integration -m long $(ARGS)

gate-simulation: $(STAMPS)/package ## Stop PROGRAMS=3000 random programs by the gate, from SEED=0 on
	@PYTHONPATH=tests:tests/support $(BIN)/python tests/support/interposer/gate_simulation.py $(if $(PROGRAMS),--programs $(PROGRAMS)) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

# CELLS picks some, such as CELLS=power-lost or CELLS='source.*/dump-killed,suspended/'; STALL is how
# many seconds a stalled daemon does nothing.
fault-matrix: setup ## Do every harm at every boundary of moves and snapshots (root); build/fault-matrix.json
	@$(PROGRAM) fault_matrix \
		$(if $(CELLS),--cells '$(CELLS)') $(if $(STALL),--stall $(STALL)) $(ARGS)

load: $(STAMPS)/package ## One orchestrator, 10 to 1,000 simulated hosts (HOSTS=10,100); build/load.json
	@$(PROGRAM) load $(HOSTS) $(ARGS)

# KILLS=60: a host loses its power every 60 s on average, from SEED=1.
soak: setup ## Move a job round three hosts for SECONDS=60, JOBS=100 idle ones beside (root); build/soak.json
	@$(PROGRAM) soak --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),0) \
		$(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(STAMPS)/package $(STAMPS)/fuzz-requirements ## Fuzz every parser, RUNS=100000 or SECONDS=600 in all, from SEED=1; build/fuzz/
	@$(BIN)/python tests/fuzz $(if $(RUNS),--runs $(RUNS)) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

# FILES picks some, such as FILES=runtime/journal/journal.py,gate.c; JOBS is how many are tried at once.
mutation: $(STAMPS)/package ## Change the protocol's files; do tests notice (root)? build/mutation.json
	@$(BIN)/python tests/mutation $(if $(FILES),--files $(FILES)) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

sanitize: $(STAMPS)/package ## All tests of the NCCL adapter under the address and thread sanitizers
	@for each in address thread; do LIVESHIFT_SANITIZER=$$each $(BIN)/python -m pytest \
		tests/interposer/nccl/test_nccl_adapter.py tests/interposer/nccl/test_nccl_teardown.py $(ARGS) || exit 1; done

# PYTHONS names more interpreters, such as those of environments with torch.
compat: $(STAMPS)/package ## The interposer on other glibcs and Pythons (root; FETCH=1 fetches); build/compat.json
	@$(PROGRAM) compat $(if $(FETCH),--fetch) \
		$(foreach python,$(PYTHONS),--python $(python)) $(ARGS)

# PARTS picks some of long, coverage, fault-matrix, soak, losses, fuzz and compat; SHORT=1 tries each
# for a minute or so, but for coverage.
# A part that fails does not keep the others from running. A later call runs only what has not passed
# with this code; FRESH=1 runs all parts again, and those that PARTS names are always run.
nightly: ## All that takes hours, one after the other (root), and one page; build/nightly/
	@$(ALONE) setup $(STAMPS)/test-requirements -- $(BIN)/python scripts/nightly.py \
		$(if $(PARTS),--parts '$(PARTS)') $(if $(SHORT),--short) $(if $(FRESH),--fresh) $(ARGS)

# PARTS picks some of cost, device-cost, step-time and quiesce. To be run on a machine that does nothing else.
bench-gate: $(STAMPS)/package ## What the interposer costs, its gate open, and a boundary takes; build/bench-gate.json
	@$(PROGRAM) gate_bench $(PARTS) $(ARGS)

# SIZES=0.25,1 (GB), JOBS=hot,cold, LINKS=unlimited,10g,1g and WAYS=auto,stop,round,rounds pick cases;
# MOVES, HANDS (by hand) and RESTARTS say how often; LIST=1 lists the cases and how long they would
# take. A run that was interrupted goes on where it was; FRESH=1 starts from the beginning, MORE=1
# adds cases to one that is complete. To be run on a machine that does nothing else.
bench-move: setup ## What a move costs a job, against three other ways (root); build/bench-move.json
	@$(PROGRAM) move_bench $(if $(SIZES),--sizes $(SIZES)) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(LINKS),--links $(LINKS)) \
		$(if $(WAYS),--ways $(WAYS)) $(if $(MOVES),--moves $(MOVES)) \
		$(if $(HANDS),--hands $(HANDS)) $(if $(RESTARTS),--restarts $(RESTARTS)) \
		$(if $(THREADS),--threads $(THREADS)) $(if $(DRAINS),--drains $(DRAINS)) \
		$(if $(FRESH),--fresh) $(if $(MORE),--more) \
		$(if $(LIST),--list) $(ARGS)

# SIZES=0.25,0.5 (GB), RANKS=2,4 and WAYS=rewind,checkpoint-restart,torchft pick cases; KILLS says how often each
# loses a host, EVERY how many seconds lie between two snapshots, STEADY how many steps tell the speed,
# STEPS how many the job has that meets a failure every MEAN seconds (STEPS=0: there is no such job),
# ALARMS how often a host of liveshift's only falls silent.
# LIST=1, FRESH=1 and MORE=1 as above. FETCH=1 fetches torchft. To be run on a machine that does
# nothing else.
bench-failure: setup ## What the loss of a host costs a job, by three ways (root; FETCH=1 fetches torchft); build/bench-failure.json
	@$(if $(FETCH),$(BIN)/python -m pip install -qq --disable-pip-version-check --root-user-action ignore \
		--no-deps --upgrade --target build/torchft --requirement integration/failure_bench/torchft.txt)
	@$(PROGRAM) failure_bench $(if $(SIZES),--sizes $(SIZES)) $(if $(RANKS),--ranks $(RANKS)) $(if $(WAYS),--ways $(WAYS)) \
		$(if $(KILLS),--kills $(KILLS)) $(if $(EVERY),--every $(EVERY)) \
		$(if $(STEADY),--steady $(STEADY)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(MEAN),--mean $(MEAN)) $(if $(ALARMS),--alarms $(ALARMS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(FRESH),--fresh) $(if $(MORE),--more) $(if $(LIST),--list) $(ARGS)

# GB and THREADS=1,2,4,8; on a machine that does nothing else.
bench-engine: $(STAMPS)/package ## How fast memory goes by itself, by threads (root); build/bench-engine.json
	@$(PROGRAM) engine_bench $(if $(GB),--gb $(GB)) \
		$(if $(THREADS),--threads $(THREADS)) $(ARGS)

# STEPS picks some of E1 … E10. Without a GPU it runs on the simulated driver, and says so.
gpu-suite: setup ## What a move of GPU state takes on this machine's GPU (root); integration/gpu/results/
	@integration/gpu/run $(STEPS) $(ARGS)

wheel: $(STAMPS)/requirements ## Build a wheel that hosts install without a compiler; dist/
	@scripts/wheel.sh

lint: $(STAMPS)/package ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@$(BIN)/mypy -p liveshift
	@$(BIN)/mypy tests scripts
	@$(BIN)/mypy integration
	@$(BIN)/mypy integration/gpu/gather

format: $(STAMPS)/requirements ## Format all sources
	@$(BIN)/ruff check --fix --select I .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_FILES)

docs: $(STAMPS)/package ## Write docs/json.md again, from the types that commands print
	@$(BIN)/python scripts/json_fields.py

clean: ## Remove what was built (.venv stays)
	@rm -rf build dist .mypy_cache .ruff_cache $(STAMPS)/package
	@find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(STAMPS)/system: scripts/setup.sh
	@scripts/setup.sh system
	@mkdir -p $(@D) && touch $@

$(STAMPS)/venv: | $(STAMPS)/system
	@scripts/setup.sh venv
	@mkdir -p $(@D) && touch $@

$(STAMPS)/requirements: requirements.lock $(STAMPS)/venv
	@scripts/setup.sh requirements
	@touch $@

$(STAMPS)/test-requirements: requirements-test.lock $(STAMPS)/venv
	@scripts/setup.sh test-requirements
	@touch $@

$(STAMPS)/fuzz-requirements: requirements-fuzz.lock $(STAMPS)/venv
	@scripts/setup.sh fuzz-requirements
	@touch $@

$(STAMPS)/package: $(SOURCES) $(STAMPS)/requirements
	@scripts/setup.sh package
	@touch $@

$(STAMPS)/criu: criu_glue/fetch.py criu_glue/criu/apt.py | $(STAMPS)/package
	@scripts/setup.sh criu
	@touch $@
