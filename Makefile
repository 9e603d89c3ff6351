# make demo, make test: all set-up included. Everything lives in .venv; nothing outside this directory is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DATA := $(firstword $(PARSESHOT_DATA) $(wildcard ../shared/data))

.PHONY: demo test check bench results-check clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    recognise drawn birds, write demo/report.html"
	@echo "make test    the whole test suite, and make check"
	@echo "make check   ruff, codespell and mypy"
	@echo "make bench   the speed claims, each measured in one run"
	@echo "make results-check   the printed accuracies, from the shipped models again"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/parseshot demo --out demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell src tests benchmarks docs README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/mypy

test: check
	PARSESHOT_DATA="$(abspath $(DATA))" $(BIN)/python -m pytest --numprocesses 2

bench: $(READY)
	$(BIN)/python benchmarks/parse_head.py
	$(BIN)/python benchmarks/heads.py
	$(BIN)/python benchmarks/gallery.py
	$(BIN)/python benchmarks/stress.py
ifneq ($(DATA),)
	$(BIN)/python benchmarks/prepare.py --source $(DATA)/CUB_200_2011.tgz
	$(BIN)/parseshot data prepare cub --source $(DATA)/CUB_200_2011.tgz --out build/cub
	$(BIN)/python benchmarks/loading.py --pack build/cub --source $(DATA)/CUB_200_2011.tgz --photos $(DATA)/cub_raw_val.tgz
	$(BIN)/python benchmarks/allocator.py --data build/cub
	$(BIN)/python benchmarks/evaluation.py --data build/cub
	$(BIN)/python benchmarks/training.py --data build/cub
	$(BIN)/parseshot data prepare cub --source $(DATA)/CUB_200_2011.tgz --size 224 --out build/cub-224
	$(BIN)/python benchmarks/features.py --data build/cub-224
	$(BIN)/python benchmarks/first_answer.py --source $(DATA)/stanford_cars.tgz
	$(BIN)/python benchmarks/recognise.py --source $(DATA)/stanford_cars.tgz
	$(BIN)/python benchmarks/whole_photos.py --photos $(DATA)/cub_raw_val.tgz --crops $(DATA)/CUB_200_2011.tgz --cars $(DATA)/stanford_cars.tgz
	$(BIN)/python benchmarks/deletion.py --data build/cub-224
	$(BIN)/python benchmarks/doctor.py --source $(DATA)/CUB_200_2011.tgz
endif

results-check: $(READY)
	PARSESHOT_DATA="$(abspath $(DATA))" $(BIN)/python benchmarks/results_check.py

clean:
	rm -rf $(VENV) demo build dist
