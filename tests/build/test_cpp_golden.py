"""What the C++ templates generate, word for word: a change of a template is read as a diff of these files."""

import pytest

from pagegen.catalog import variant
from pagegen.render import render
from pagegen.spec import Op, parse_slug
from pagegen.target import parse_target
from tests.conftest import Golden


@pytest.mark.parametrize(
    ("op", "slug", "target"),
    [
        (Op.ATTEND, "bf16-d64-h9x3-b16-NHD", "cpu:avx512"),  # token-major K and V in place
        (Op.ATTEND, "bf16-d64-h9x3-b16-NHD", "cpu:amx"),  # on a matrix unit
        (Op.ATTEND, "bf16-d64-h9x3-b16-NHD-kvfp8_e4m3", "cpu:avx512_bf16"),  # pairs of bf16, from a table
        (Op.ATTEND, "bf16-d128-h16x2-b24-HDN2", "cpu:avx2"),  # dim-major pairs in place
        (Op.ATTEND, "fp32-d40v24-h7x7-b3-HDN8_HDN-lse", "cpu:scalar"),  # both packed; log-sum-exp
        (Op.ATTEND, "bf16-d24v40-h4x2-b3-NHD-kvint4-w9-cap20-alibi-sinks-det", "cpu:avx2"),  # many options at once
        (Op.WRITE_KV, "fp16-d80v64-h8x1-b48-HDN8_HDN", "cpu:avx2"),
        (Op.WRITE_KV, "bf16-d64-h9x3-b16-NHD", "cpu:avx512"),
        (Op.COPY_BLOCKS, "fp32-d64-h9x3-b16-NHD", "cpu:scalar"),
        (Op.COPY_BLOCKS, "bf16-d64-h9x3-b16-HDN2", "cpu:avx512"),
        (Op.WRITE_KV, "bf16-d64-h9x3-b16-NHD-kvint8", "cpu:avx512"),
        (Op.GATHER_BLOCKS, "bf16-d64-h9x3-b16-NHD-kvint4", "cpu:avx2"),
        (Op.SCATTER_BLOCKS, "bf16-d64-h9x3-b16-HDN2", "cpu:scalar"),
        (Op.RELAYOUT, "bf16-d64-h9x3-b16-HDN8", "cpu:avx2"),
    ],
)
def test_golden_text(golden: Golden, op: Op, slug: str, target: str) -> None:
    text = render(variant(op, parse_slug(slug)[0], parse_target(target))).text
    golden(f"cpp/{op.value}-{slug}-{target.removeprefix('cpu:')}.cpp", text)
