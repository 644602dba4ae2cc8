#!/usr/bin/env bash
# All that needs a GPU, in at most 8 minutes: bash tests/cuda.sh [--rehearse] [FOLDER]. See on_device.py beside this file.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
exec "$PYTHON" tests/on_device.py "$@"
