"""What can be refused by looking at the command line alone is refused before anything heavy is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagegen.cli import bench
from tests.cli.helpers import run

ROOT = Path(__file__).parents[2]
SLUG, AUTO = "fp32-d8-h2x1-b4-NHD", "fp32-d8-h2x1-b4-auto"
HEAVY = ("torch", "optuna", "sqlalchemy", "jinja2")  # seconds to load, on a busy machine half a minute
REFUSED = (
    ("tune", "name one spec"),
    ("tune fp32-d7-h2x1-b4-NHD", "head_dim=7"),
    ("tune nowhere.yaml", "spec file nowhere.yaml cannot be read"),
    (f"tune {SLUG} --target nosuch", "target 'nosuch' is not known"),
    (f"tune {SLUG} --workload nosuch", "allowed: a file, batch-offline, chat, code, long-context, speculative, or decode, prefill, mixed: that"),
    (f"tune {SLUG} --workload {300 * 'x'}", "allowed: a file, batch-offline"),  # too long for a file
    (f"tune {SLUG} --trials x", "--trials"),
    (f"tune {SLUG} --budget 0", "--budget 0.0"),
    (f"tune {SLUG} --budget nan", "--budget nan"),
    (f"tune {SLUG} --workers 0", "--workers 0"),
    (f"tune {SLUG} --sampler luck", "allowed: tpe, gp, random, brute"),
    (f"tune {SLUG} --roofline-share 2", "--roofline-share 2"),
    (f"tune {SLUG} --patience -1", "--patience -1"),
    (f"tune {SLUG} --top 3", "--top would do nothing"),
    (f"tune {AUTO} --workload chat --block-sizes x", "--block-sizes 'x'"),
    (f"tune {AUTO} --workload chat --layouts XYZ", "KV layout 'XYZ'"),
    (f"tune {AUTO} --workload nosuch", "'nosuch' is no file"),
    (f"tune {AUTO} --workload chat --budget -1", "--budget -1"),
    (f"tune {SLUG} --static --budget 0", "--budget 0.0"),
    (f"tune {SLUG} --static --workers 0", "--workers 0"),
    (f"tune {SLUG} --static --trials 0", "--trials 0"),
    (f"tune {SLUG} --static --top 0", "--top 0"),
    (f"tune {SLUG} --static --workload nosuch", "'nosuch' is no file"),
    ("tune --join s", "name --storage"),
    ("tune --join s --storage nosuch.log", "there is no file nosuch.log"),
    ("tune --join s --storage sqlite:///nosuch.db", "there is no file nosuch.db"),
    ("tune --join s --storage postgresql://nobody@nowhere/x --budget 0", "--budget 0.0"),
    ("tune --join s --storage postgresql://nobody@nowhere/x --workers 0", "--workers 0"),
    ("bench kernel nowhere --against flex", "--against 'flex'"),
    ("bench kernel nowhere --phase idle", "--phase"),
    ("bench serve --url nosuch", "--url 'nosuch'"),
    ("simulate", "name one thing to run"),
    ("simulate --trace nosuch", "trace 'nosuch' is neither a file nor known"),
    ("simulate --trace code --policy nosuch", "policy 'nosuch' is not known"),
    ("simulate --replay nowhere", "log nowhere cannot be read"),
)
CHILD = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # importing one of them fails
from tests.cli.helpers import run
answers = [run(*words) for words in json.loads(sys.argv[2])]
print(json.dumps([(answer.status, answer.stderr) for answer in answers]))
"""


def test_a_wrong_request_is_refused_in_one_line_before_anything_heavy_is_loaded() -> None:
    words = json.dumps([line.split() for line, _ in REFUSED])
    child = subprocess.run([sys.executable, "-c", CHILD, json.dumps(HEAVY), words], check=False, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    for (line, said), (status, stderr) in zip(REFUSED, json.loads(child.stdout), strict=True):
        assert status == 2 and said in stderr and stderr.count("\n") == 1, (line, status, stderr)


def test_a_trace_that_is_none_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load", None)  # calling it fails
    for trace, said in (("nosuch", "trace 'nosuch' is neither a file nor known"), ("nowhere.jsonl", "nowhere.jsonl cannot be read")):
        result = run("bench", "engine", "dummy:tiny", "--trace", trace)
        assert result.status == 2 and said in result.stderr and result.stderr.count("\n") == 1
