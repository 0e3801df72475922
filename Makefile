# `make` alone lists the targets. Each sets up what it needs first (scripts/setup), and quickly when
# nothing changed.
.DEFAULT_GOAL := help
.PHONY: help setup run stop test check fast clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything that run and test need
	@scripts/setup main passthrough vllm lmcache cluster tiers

run: ## mount kvfs, let vLLM answer a prompt from files, show what is cached
	@scripts/setup main passthrough vllm
	@.venv/bin/python scripts/demo.py $(ARGS)

stop: ## unmount what `make run` left mounted
	@[ ! -x .venv/bin/python ] || .venv/bin/python scripts/demo.py --stop

test: ## run every test, with real mounts, vLLM and LMCache (ARGS="-k name" selects)
	@scripts/setup main passthrough vllm lmcache cluster tiers
	@.venv/bin/python -m pytest $(ARGS)

check: ## format, lint, types, import arrows and the fast tests
	@scripts/setup main
	@scripts/check

fast: ## the fast tests only
	@scripts/setup main
	@.venv/bin/python -m pytest tests/unit tests/contract tests/property $(ARGS)

clean: stop ## remove environments, caches and the demo's files
	rm -rf .venv .envs .deps .demo .setup.log .setup.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
