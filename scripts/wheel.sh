#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel that hosts install without a compiler, into $1 (dist/ without it). What is compiled
# stays in the folder $2, if it is given, for later builds. auditwheel finds the oldest glibc that
# all libraries load on, and refuses any other dependency. No file in it is tied to one Python
# version: they are data to pip, loaded by cffi, LD_PRELOAD or exec.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=$(realpath -m "${VENV:-.venv}")
out=$(realpath -m "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build=$(realpath -m "${2:-$work/build}")
export PATH="$VENV/bin:$PATH"

python -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings "build-dir=$build" --wheel-dir "$work/plain" .
auditwheel repair --wheel-dir "$work/repaired" "$work"/plain/*.whl >/dev/null 2>&1 \
    || auditwheel show "$work"/plain/*.whl >&2
python -m wheel tags --remove --python-tag py3 --abi-tag none "$work"/repaired/*.whl >/dev/null
mkdir -p "$out"
mv "$work"/repaired/*.whl "$out"/
ls "$out"/*.whl
