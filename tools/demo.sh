#!/usr/bin/env bash
# Sets up, builds, and runs a small Qwen3.5 model on a real text with flash_qla in place of its torch functions.
# Arguments go to the example.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh
exec .venv/bin/python examples/python/qwen_prefill.py "$@"
