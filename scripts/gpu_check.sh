#!/usr/bin/env bash
# Checks the Triton kernels on a machine with an NVIDIA GPU: numbers against the reference; resources; timings beside torch
# SDPA, FlexAttention and, if they are installed, FlashInfer and vLLM; a decode step as a CUDA graph; tuning from a shortlist.
# Keeps DIR/gpu_check.json up to date all the time; ends within 9 minutes; needs no network.
#   scripts/gpu_check.sh --out DIR [--wheels DIR] [--dry-run]
# --wheels: a folder with wheels of what python3 lacks of torch, triton, jinja2, numpy, optuna and PyYAML (kept out of its
# installation).
# --dry-run: without a GPU, on the interpreter and by cross-compiling. PYTHON chooses the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python

fail() { echo "gpu_check: $*" >&2; exit 2; }
usage="usage: scripts/gpu_check.sh --out DIR [--wheels DIR] [--dry-run]"
out='' wheels='' options=()
while [ $# -gt 0 ]; do
  case $1 in
    --out | --wheels) [ $# -gt 1 ] || fail "$1 needs a folder; $usage" ;;&
    --out) out=$2; shift 2 ;;
    --wheels) wheels=$2; shift 2 ;;
    --dry-run) options+=(--dry-run); shift ;;
    *) fail "unknown argument $1; $usage" ;;
  esac
done
[ -n "$out" ] || fail "$usage"
mkdir -p "$out"

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
missing=()
for package in torch triton jinja2 numpy optuna PyYAML:yaml; do
  module=${package#*:}
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" || missing+=("${package%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then
  [ -n "$wheels" ] || fail "$python lacks ${missing[*]}; name a folder of wheels with --wheels"
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --find-links "$wheels" --target "$site" "${missing[@]}" ||
    fail "the wheels of ${missing[*]} in $wheels do not install; see above"
  export PYTHONPATH="$site:$PYTHONPATH"
fi
timeout --kill-after=5 535 "$python" "$root/scripts/gpu_check.py" --out "$out" "${options[@]}"
