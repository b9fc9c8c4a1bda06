"""The whole thing as a user runs it, in processes of their own that may reach nothing but this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]

# Audit hooks see every socket call of the process, whoever makes it, and cannot be removed.
GUARDED = """
import sys
LOCAL = {"127.0.0.1", "::1", "localhost", "", None, b"127.0.0.1"}
def guard(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None  # else: a path of this machine
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if host not in LOCAL:
        print(f"outside connection: {event} {arguments}", file=sys.stderr)
        raise PermissionError(f"{event} to {host}")
sys.addaudithook(guard)
from pagegen.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.compiler
def test_generate_and_serve_reach_nothing_outside(tmp_path: Path) -> None:
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)
    environment = {
        **os.environ,
        "PAGEGEN_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    model = ("dummy:tiny", "--dtype", "fp32", "--kv-blocks", "64")

    words = [
        sys.executable,
        str(script),
        "generate",
        *model,
        "--prompt",
        "abc",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--json",
    ]
    generated = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert generated.returncode == 0, generated.stderr
    text = json.loads(generated.stdout)["outputs"][0]["text"]

    words = [sys.executable, str(script), "serve", *model, "--port", "0"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(match[1] for line in lines if (match := re.search(r"on (http://[\d.:]+/v1)", line)))
            body = {"model": "dummy:tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            response = httpx.post(f"{url}/completions", json=body, timeout=60, trust_env=False)
            assert response.json()["choices"][0]["text"] == text  # the same weights, kernels and sampler

            with httpx.stream(
                "POST", f"{url}/completions", json={**body, "stream": True}, timeout=60, trust_env=False
            ) as stream:
                pieces = stream.iter_lines()
                first = next(pieces)
                process.send_signal(signal.SIGTERM)
                assert [first, *(line for line in pieces if line)][-1] == "data: [DONE]"
            rest: list[str] = []
            reader = threading.Thread(target=lambda: rest.extend(lines))
            reader.start()
            assert process.wait(60) == 0
            reader.join()
            assert not [line for line in rest if "outside" in line or "Traceback" in line]
        finally:
            process.kill()
