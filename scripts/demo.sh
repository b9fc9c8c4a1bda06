#!/usr/bin/env bash
# Tunes kernels for this machine and SmolLM2-135M, then answers with the winner. `make demo` runs it after installing.
set -euo pipefail
pagegen=${PAGEGEN:-.venv/bin/pagegen}
trials=${TRIALS:-40}
budget=${BUDGET:-240}

echo "== 1. tune: $trials trials, each proven against the reference before it is timed"
"$pagegen" tune --model smollm2-135m --trials "$trials" --budget "$budget" --out results
package=$(dirname "$(find results -path '*/package/*/manifest.json' -newer scripts/demo.sh -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)")

echo; echo "== 2. generate with the winning package: $package"
"$pagegen" generate smollm2-135m --kernels "$package" --chat "Why is the sky blue? Answer in three sentences." --max-tokens 96 --temperature 0

echo; echo "== 3. tuned against the untuned default and torch's scaled_dot_product_attention, interleaved in one run"
"$pagegen" bench kernel "$package" --against default,sdpa
