# Two commands matter: `make demo` and `make test`. Each does its own set-up, and is quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WHEEL  := .venv-wheel
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Most tests wait for processes, so there is one worker more than there are cores. A test that hangs ends its worker,
# and with it the run: a new worker would repeat the test.
XDIST  := --numprocesses $(shell expr $$(nproc) + 1) --dist loadfile --max-worker-restart 0
PYTEST := $(BIN)/python -m pytest $(XDIST)

.PHONY: demo test test-all lint types unit test-lowest test-vllm test-vllm-serve test-ray test-deployment \
        test-dashboards coverage model chaos fuzz soak bench bench-quick bench-serving bench-vllm bench-vllm-serve \
        bench-tracing bench-peers docs docs-serve dist clean help

help:
	@echo "make demo    upload real videos to a server, hand them to an engine process, show the answers"
	@echo "make test    lint, types, and the test suite: 5 minutes on two cores"
	@echo "make test-all   the same with all loops, links and modes, the built wheel, deployment, and random faults: 25 minutes"
	@echo "make dist    build the wheel, the source distribution and the list of dependencies (SBOM) into dist/"
	@echo "make test-lowest   the test suite with the lowest supported version of each dependency"
	@echo "make test-vllm   install vLLM without its CUDA libraries, and test the integration in its own code"
	@echo "make test-vllm-serve   set up a vLLM that serves on CPUs, and test the integration in its processes: 10 minutes"
	@echo "make docs    build the documentation site in site/, and fail on warnings and broken links"
	@echo "make docs-serve   show the site at http://127.0.0.1:8000, and follow changes of its pages"
	@echo "make test-ray   install Ray and the wheel, and test the examples for Ray"
	@echo "make test-deployment   test deploy/: as root, also in containers made of namespaces and control groups"
	@echo "make test-dashboards   scrape running examples with Prometheus, and test the dashboard and the alerts"
	@echo "make coverage   the suite again, measured: which branches no test has taken"
	@echo "make model   run random sequences of operations and compare them with a model, for SECONDS=600 from SEED="
	@echo "make chaos   kill, stop and starve processes while tensors travel, for SECONDS=600 from SEED="
	@echo "make fuzz    send valid and invalid messages to every kind of peer, for SECONDS=600 from SEED="
	@echo "make soak    start and end processes for SECONDS=60, or for hours, and check that no resource grows"
	@echo "make bench   compare the speed of aiotensor with its alternatives and its goals: up to an hour"
	@echo "make bench-quick   the same within a minute, with fewer measurements and alternatives"
	@echo "make bench-serving   only API servers that send videos to an engine, and write the result into the README"
	@echo "make bench-vllm   compare the tensor transport and the broadcast with those of vLLM"
	@echo "make bench-vllm-serve   compare real vLLM servers with and without the integration"
	@echo "make bench-tracing   measure the cost of tracing with OpenTelemetry"
	@echo "make bench-peers   install iceoryx2, an alternative that is not installed by default"
	@echo "make clean   remove the files that the other targets created"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1' # knows dependency groups since then

# The pinned torch is installed first and separately, so that later version ranges are already satisfied.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable . --group demo
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable . --group test --group lint
	@touch $@

demo: $(VENV)/.demo
	@PYTHONPATH=examples $(BIN)/python -m demo $(ARGS)

test: lint types unit

test-all: lint types $(WHEEL)/.programs $(VENV)/.fuzz
	AIOTENSOR_TESTS=all AIOTENSOR_TEST_PYTHON=$(abspath $(WHEEL))/bin/python $(PYTEST) $(ARGS)
	@$(MAKE) --no-print-directory model chaos fuzz SECONDS=60 ARGS=

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python docs/check.py

types: $(VENV)/.test
	$(BIN)/mypy

# The packages are built in an environment with nothing but the tools for it, and with the pinned hatchling: the same
# files give the same bytes. They are built each time, and replaced only if they differ.
BUILD := .venv-build
$(BUILD)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(BUILD)
	$(BUILD)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BUILD)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group dist
	@touch $@

DIST := dist
$(DIST)/.built: $(BUILD)/.ready FORCE
	@rm -rf $(DIST)/.new
	$(BUILD)/bin/python -m build --no-isolation --outdir $(DIST)/.new
	@cd $(DIST) && if cmp -s .new/*.whl *.whl && cmp -s .new/*.gz *.gz; then rm -r .new; \
	else rm -f *.whl *.gz *.json && mv .new/* . && rmdir .new && touch .built; fi

FORCE:

# An empty environment with the wheel and its extras, from which the list of dependencies is written. Then come the
# packages that the programs of the README, the tutorial and the guide need: tests run them there, without the checkout.
INTO_WHEEL = $(BUILD)/bin/python -m pip --python $(WHEEL)/bin/python install --quiet --disable-pip-version-check -c constraints.txt
$(WHEEL)/.programs: $(DIST)/.built
	$(PYTHON) -m venv --clear --without-pip $(WHEEL)
	$(INTO_WHEEL) "$$(grep '^torch==' constraints.txt)"
	$(INTO_WHEEL) "aiotensor[aiohttp,cli,fastapi,opentelemetry,prometheus,uvloop] @ file://$$(echo $(abspath $(DIST))/*.whl)"
	rm $(WHEEL)/lib/python*/site-packages/aiotensor-*/direct_url.json # the SBOM would contain this path
	$(BUILD)/bin/cyclonedx-py environment $(WHEEL) --output-reproducible --output-file $(WHEEL)/sbom.json
	$(INTO_WHEEL) av httpx pytest pytest-asyncio uvicorn
	@touch $@

dist: $(DIST)/.built $(WHEEL)/.programs
	$(BUILD)/bin/twine check --strict $(DIST)/*.whl $(DIST)/*.tar.gz
	cp $(WHEEL)/sbom.json $(DIST)/aiotensor.cdx.json

unit: $(VENV)/.test
	$(PYTEST) $(ARGS)

# vLLM and its imports lie in a folder of their own, which only this target adds to the path: `make test` runs without
# them. Its modules take 15 seconds to import, in each process of a test.
$(VENV)/.vllm: tests/vllm/requirements.txt $(VENV)/.test
	rm -rf $(VENV)/vllm
	$(PIP) --no-deps --target $(VENV)/vllm --requirement $<
	@touch $@

# The lowest supported version of each dependency and extra, in an environment of its own: each lower bound in
# pyproject.toml becomes an exact version. Lint and types are checked with the newest versions only.
LOWEST := .venv-lowest
$(LOWEST)/.test: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	grep -oE '"[a-z0-9-]+>=[0-9.]+(b[0-9]+)?' pyproject.toml | sed 's/"//; s/>=/==/' > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt --editable . --group test
	@touch $@

test-lowest: $(LOWEST)/.test
	AIOTENSOR_TESTS=all $(LOWEST)/bin/python -m pytest $(XDIST) $(ARGS)

test-vllm: $(VENV)/.vllm
	AIOTENSOR_TESTS=all PYTHONPATH=$(abspath $(VENV))/vllm $(BIN)/python -m pytest tests/vllm $(ARGS)

# A vLLM that serves on CPUs, with a small model: 3 GB, 5 minutes for the set-up, and as many for the tests.
SERVE := .venv-vllm
INTO_SERVE = $(subst pip install,pip --python $(SERVE)/venv/bin/python install,$(PIP))
$(SERVE)/.ready: $(addprefix bench/vllm_serve/,requirements.txt setup.sh inputs.py) $(wildcard bench/vllm_serve/model/*)
	PYTHON=$(PYTHON) bash bench/vllm_serve/setup.sh $(SERVE)
	@touch $@

test-vllm-serve: $(SERVE)/.ready $(DIST)/.built $(VENV)/.test
	$(INTO_SERVE) --no-deps --force-reinstall $(DIST)/*.whl
	VLLM_SERVE_FOLDER=$(SERVE) $(BIN)/python -m pytest tests/vllm_serve $(ARGS)

# Ray has many dependencies, so it has an environment of its own, with the wheel: the programs that the tests start use
# it instead of this checkout.
RAY := .venv-ray
INTO_RAY = $(subst pip install,pip --python $(RAY)/bin/python install,$(PIP))
$(RAY)/.test: tests/ray/requirements.txt pyproject.toml constraints.txt $(VENV)/.test
	$(PYTHON) -m venv --clear --without-pip $(RAY)
	$(INTO_RAY) "$$(grep '^torch==' constraints.txt)"
	$(INTO_RAY) . --group test --requirement $<
	@touch $@

test-ray: $(RAY)/.test $(DIST)/.built
	$(INTO_RAY) --no-deps --force-reinstall $(DIST)/*.whl
	$(RAY)/bin/python -m pytest tests/ray $(ARGS)

# `make test-all` includes these tests, but skips the schemas of Kubernetes, which are large.
test-deployment: $(VENV)/.test
	$(PIP) --group deployment
	AIOTENSOR_TESTS=all $(BIN)/python -m pytest tests/deployment $(ARGS)

# `make test-all` skips these tests where Prometheus is not installed.
test-dashboards: $(VENV)/.test
	@command -v prometheus > /dev/null && command -v promtool > /dev/null || { echo "install Prometheus: the Debian package prometheus"; exit 1; }
	AIOTENSOR_TESTS=all $(BIN)/python -m pytest tests/dashboards tests/integrations/test_dashboard.py $(ARGS)

# The package need not be installed: the reference is made from its sources.
$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) --group docs
	@touch $@

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Not part of `test`: it takes three times as long.
coverage: $(VENV)/.test
	$(BIN)/coverage erase
	AIOTENSOR_TESTS=all $(BIN)/coverage run -m pytest $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

# The duration of these in seconds, and the seed of their random choices: SECONDS=60 SEED=7.
model chaos fuzz: SECONDS ?= 600
soak: SECONDS ?= 60
FOR = --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

$(VENV)/.fuzz: $(VENV)/.test
	$(PIP) --editable . --group fuzz
	@touch $@

model: $(VENV)/.test
	@$(BIN)/python -m verification.model $(FOR)

chaos: $(VENV)/.test
	@$(BIN)/python -m verification.chaos $(FOR)

fuzz: $(VENV)/.fuzz
	@$(BIN)/python -m verification.fuzz $(FOR)

soak: $(VENV)/.test
	@$(BIN)/python -m verification.soak $(FOR)

$(VENV)/.bench: $(VENV)/.demo
	$(PIP) --editable . --group bench
	@touch $@

bench: $(VENV)/.bench
	@$(BIN)/python -m bench $(ARGS)

bench-quick: $(VENV)/.bench
	@$(BIN)/python -m bench --quick $(ARGS)

bench-serving: $(VENV)/.bench
	@$(BIN)/python -m bench --workload serving-decoding --workload serving-transfer --results bench/results/serving $(ARGS)
	@$(BIN)/python -m bench.pages

# Separate, because it needs vLLM.
bench-vllm: $(VENV)/.bench $(VENV)/.vllm
	@PYTHONPATH=$(abspath $(VENV))/vllm $(BIN)/python -m bench.vllm_hooks $(ARGS)
	@PYTHONPATH=$(abspath $(VENV))/vllm $(BIN)/python -m bench.vllm_broadcast $(ARGS)

# Separate, because it needs a vLLM that serves: 20 minutes.
bench-vllm-serve: $(SERVE)/.ready $(DIST)/.built $(VENV)/.bench
	$(INTO_SERVE) --no-deps --force-reinstall $(DIST)/*.whl
	@VLLM_SERVE_FOLDER=$(SERVE) $(BIN)/python -m bench.vllm_serving $(ARGS)

# Separate, because its ways need no processes of their own: half a minute.
bench-tracing: $(VENV)/.bench
	@$(BIN)/python -m bench.tracing $(ARGS)

bench-peers: $(VENV)/.bench
	$(PIP) --editable . --group bench-peers

clean:
	rm -rf $(VENV) $(LOWEST) $(RAY) $(SERVE) $(WHEEL) $(BUILD) $(DIST) site .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
