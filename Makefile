# The targets that a user needs. Everything is set up in .venv from this checkout's own files; nothing else is touched.
#   make demo        set up, then show the main job (no GPU, no cluster, no Redis)
#   make demo-envoy  the same behind Envoy: simulated engines, kvsync extproc, the real Envoy, streaming clients
#   make test        set up, then run every test
#   make test-vllm   install real vLLM for CPU (2 GB) and prove the gateway on it: docs/testing-with-vllm.md
#   make test-kube   build a real kube-apiserver with etcd (Go 1.26, 8 minutes and more, once) and run tests/kube on it (deploy/, too)
#   make fuzz        ten thousand examples of what make test tries a hundred of: bad events, requests, configuration, histories;
#                    then libFuzzer on the native core, FUZZ_SECONDS (300) for each target
#   make soak        run for 25 minutes what must not grow: memory, sockets, threads, metric series (SOAK_SCALE=0.1: less)
#   make lint        formatters, linters, type checkers
#   make bench       benchmarks beside the peers, half an hour: docs/performance.md (ROWS='events-*': some; QUICK=1: a look)
#   make bench-micro times of small parts: the core in Rust (criterion), its Python face and a choice (pytest-benchmark)
#   make instructions  instructions of the core's hot paths, counted (valgrind) and compared with bench/instructions.json; ACCEPT=1: kept
#   make protocol    make the modules of Envoy's messages after a change of their .proto
#   make build       sdist and wheels into dist/
#   make manifests   renew what deploy/ has of the chart and of the settings: manifests, the schema of the values
#   make lock        renew the requirement files after a change of pyproject.toml
SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport VIRTUAL_ENV CONDA_PREFIX
# A `cargo` that is there and works: rustup without a toolchain puts one on the path that only fails.
RUST := cargo --version >/dev/null 2>&1
TEST_ARGS ?=
FUZZ_SECONDS ?= 300
CORE_SOURCES := $(shell find core -name '*.rs' -o -name 'Cargo.*' -o -name '*.pyi' -o -name 'pyproject.toml' 2>/dev/null | grep -v -e /target/ -e core/benches/ -e core/fuzz/)

.PHONY: demo demo-envoy test soak test-vllm test-kube fuzz lint bench bench-micro instructions protocol build manifests lock
demo: .make/run
	$(BIN)/kvsync demo $(DEMO_ARGS)

demo-envoy: .make/dev
	$(BIN)/python scripts/envoy/demo.py $(DEMO_ARGS)

test: .make/dev .make/helm/pin
	$(BIN)/pytest -n 2 --dist loadfile $(TEST_ARGS)
	@if $(RUST); then cd core && cargo test --locked --quiet; fi

test-vllm: .make/dev
	nice scripts/vllm/install.sh .make/vllm-venv
	nice $(BIN)/pytest -s tests/e2e/vllm/scenarios.py $(TEST_ARGS)

test-kube: .make/dev .make/helm/pin
	scripts/kube/build.sh .make/kube/kubetest
	KVSYNC_KUBETEST=.make/kube/kubetest nice $(BIN)/pytest -v -s tests/kube $(TEST_ARGS)

fuzz: .make/dev
	KVSYNC_FUZZ=1 $(BIN)/pytest --timeout 7200 tests/fuzz tests/unit/events/test_stream_model.py $(TEST_ARGS)
	@if $(RUST); then nice core/fuzz/run.sh $(FUZZ_SECONDS); fi

soak: .make/dev
	nice $(BIN)/python -m tests.soak

lint: .make/dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@if $(RUST); then cd core && cargo fmt --check && cargo clippy --locked --all-targets --quiet -- -D warnings \
	&& cd benches && cargo fmt --check && cargo clippy --locked --quiet -- -D warnings; fi

bench: .make/dev
	nice $(BIN)/python -m bench $(if $(QUICK),--quick) $(ROWS)

bench-micro: .make/dev
	@if $(RUST); then cd core/benches && nice cargo bench --locked --quiet --bench core; fi
	nice $(BIN)/pytest -q bench/micro --benchmark-columns=min,median,iqr,rounds

instructions: .make/dev
	nice $(BIN)/python -m bench.micro.instructions $(if $(ACCEPT),--accept)

protocol: .make/dev
	cd src/kvsync/extproc/protocol && ../../../../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. extproc.proto

build: .make/run
	$(BIN)/uv build --quiet --out-dir dist .
	@if $(RUST); then $(BIN)/maturin build --release --locked --quiet -m core/python/Cargo.toml --out dist; \
	else echo "No Rust here: the wheel of kvsync-core is left out."; fi

manifests: .make/dev .make/helm/pin
	$(BIN)/python -m scripts.deploy.render

lock: .make/run
	$(BIN)/uv pip compile pyproject.toml --extra sim --group build --generate-hashes --no-header --no-annotate --python-version 3.11 -q -o requirements.txt
	$(BIN)/uv pip compile pyproject.toml --extra sim --extra redis --extra envoy --group dev --generate-hashes --no-header --no-annotate --python-version 3.11 -q -o requirements-dev.txt

# What `kvsync serve`, `sim` and `demo` need: the locked requirements, the package, and the native core where Rust is there.
.make/run: requirements.txt pyproject.toml .make/venv $(CORE_SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-uv.txt
	$(BIN)/uv pip install -q --require-hashes -r requirements.txt -p .venv
	$(BIN)/uv pip install -q --no-deps -e . -p .venv
	@if ! $(RUST); then echo "No Rust here: the pure-Python index serves (slower, same answers)."; \
	elif echo "Building the native core (about half a minute) ..."; $(BIN)/uv pip install -q --no-deps --no-build-isolation ./core -p .venv 2>.make/core.log; then echo "Native core built."; \
	else tail -5 .make/core.log; echo "The native core could not be built (.make/core.log): the pure-Python index serves."; fi
	@touch $@

.make/dev: requirements-dev.txt .make/run
	$(BIN)/uv pip install -q --require-hashes -r requirements-dev.txt -p .venv
	@touch $@

# helm and kubectl, for the tests of deploy/.
.make/helm/pin: scripts/deploy/helm.txt scripts/deploy/helm.py .make/venv
	@$(BIN)/python scripts/deploy/helm.py .make/helm && mkdir -p .make/helm && touch $@

.make/venv:
	@$(PYTHON) -c 'import sys; sys.exit("kvsync needs Python 3.11 or newer, this is " + sys.version.split()[0] + " (set PYTHON=)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@mkdir -p .make && touch $@
