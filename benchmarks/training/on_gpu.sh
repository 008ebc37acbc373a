#!/usr/bin/env bash
# On a machine with a GPU and flash-attn: test both kernels of variable length, then train with each. At most 8 minutes.
# PYTHON names the interpreter; a step that fails does not stop the next one.
set -u
cd "$(dirname "$0")/../.." || exit
failed=0

step() {
  local limit=$1
  shift
  echo "== $*"
  timeout "$limit" "$@" || failed=1
}

step 200 "${PYTHON:-python}" -m pytest -rs tests/gpu
for backend in flash_attn torch; do
  step 140 "${PYTHON:-python}" benchmarks/training/train_gpu.py --backend "$backend" --rounds 1 --updates 20 --json
done
exit "$failed"
