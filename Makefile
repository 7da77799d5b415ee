# Everything that a fresh machine needs: 'make demo' trains a model, 'make test' runs the tests.
# Both make the environment in .venv first; only Python 3.11 to 3.13 has to be there.

VENV := .venv
RUN := runs/demo

# The first interpreter of a version that weft is tested on.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$p; break; }; done)

# One more index of packages, for a torch that the driver supports (docs/gpu-node.md):
# make gpu TORCH_INDEX=https://download.pytorch.org/whl/cu126
TORCH_INDEX :=
INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check \
	--constraint $(VENV)/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: install demo test test-all test-versions mutation-score test-unit test-ranks test-system check format schema docs gpu wheels clean

install: $(VENV)/installed

# The environment, and the versions to install: a torch that is already there stays as it is.
$(VENV)/constraints.txt: constraints.txt
	@test -n "$(PYTHON)" || { echo "weft needs Python 3.11, 3.12 or 3.13; name one with make PYTHON=/path/to/python"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "$(PYTHON) cannot make environments; on Debian: apt install python3-venv"; exit 1; }
	@there=$$($(VENV)/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null); \
	pinned=$$(sed -n 's/^torch==//p' constraints.txt); \
	case "$$there" in "" | "$$pinned" | "$$pinned"+*) ;; \
		*) echo "Keeping torch $$there of $(VENV); constraints.txt has $$pinned, which 'make clean' makes room for." ;; esac; \
	sed "s/^torch==.*/torch==$${there:-$$pinned}/" constraints.txt > $@

# What weft itself needs; the tools of development come on top.
$(VENV)/base: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing weft and PyTorch into $(VENV): about 1 GB for CPUs, 6 GB with CUDA; a few minutes."
	$(INSTALL) --editable .
	@touch $@

$(VENV)/installed: $(VENV)/base
	$(INSTALL) --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/base
	$(VENV)/bin/weft train demo --run.dir $(RUN)
	$(VENV)/bin/weft generate $(RUN) --prompt 'The fox and the lost key'

# Three tests at a time, since many wait; a worker that has done its part takes tests from others.
PYTEST := $(VENV)/bin/python -m pytest --numprocesses 3 --dist worksteal \
	--record-durations=build/test-durations.json

test: install
	$(PYTEST) -m 'not slow'

test-all: install
	$(PYTEST)

# Other versions of PyTorch and Python, each in an environment of its own, 15 minutes for each pair;
# make test-versions VERSIONS=2.15.0/3.13 tests one.
test-versions:
	$(PYTHON) scripts/test_versions.py $(VERSIONS)

# Plants all faults of tests/mutation in all precisions: an hour and a half on two cores.
mutation-score: install
	WEFT_MUTATION_SCORE=1 $(PYTEST) tests/mutation/test_mutation.py -k "score or catalogue"

# One tier of the default suite (tests/tiers.py): no process, forked ranks, other processes.
test-unit test-ranks test-system: test-%: install
	$(PYTEST) -m '$* and not slow'

check: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

schema: install
	$(VENV)/bin/weft schema > weft/recipes/recipe.schema.json

# -E -a: every page again, because code makes some of them.
docs: install
	$(VENV)/bin/python -m sphinx -q -W --keep-going -E -a docs build/docs

# Up to 20 minutes of short runs on this machine's GPUs, and one page of the results.
gpu: install
	$(VENV)/bin/python -m benchmarks.gpu_check

# What weft, its GPU tests and TorchTitan need beside torch, for a machine without a network.
wheels: install
	$(VENV)/bin/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest build/wheels -r benchmarks/gpu-wheels.txt

clean:
	rm -rf $(VENV) runs build dist
