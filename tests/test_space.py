"""Claims about config spaces: what they admit, how they refuse, and that every template's default is one of theirs."""

from __future__ import annotations

import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.catalog import TEMPLATES, template_for
from pagegen.errors import ConfigError
from pagegen.space import ConfigSpace, Constraint, Knob, power_of_two
from pagegen.spec import FLOATS, DType, KernelSpec, Op
from pagegen.target import TARGETS, Target

TILES = Constraint(lambda v: int(v["rows"]) * int(v["cols"]) <= 512, "rows * cols exceeds 512")
ROWS = [(row.op, target) for row in TEMPLATES for target in TARGETS if (target.kind == "cpu") == (row.language == "cpp")]
SPACE = ConfigSpace(
    (
        power_of_two("rows", 4, 64, 16, "rows of a tile"),
        power_of_two("cols", 8, 100, 32),
        Knob("order", ("row", "column"), "row"),
        Knob("unroll", (True, False), True),
    ),
    (TILES,),
)


def test_powers_of_two_stop_at_the_bound() -> None:
    assert power_of_two("x", 3, 25, 6).values == (3, 6, 12, 24)
    assert power_of_two("x", 8, 8, 8).values == (8,)


def test_changes_apply_to_the_default_in_the_spaces_order() -> None:
    config = SPACE.config({"unroll": False, "rows": 8})
    assert config.slug == "rows=8 cols=32 order=row unroll=False"
    assert config.to_dict() == {"rows": 8, "cols": 32, "order": "row", "unroll": False}
    assert config == SPACE.config({"rows": 8, "unroll": False}) and len({config, SPACE.config(config.to_dict())}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": 8}, r"knob 'row' is not known; allowed: rows \(default 16\), cols \(default 32\), order \(default row\), unroll \(default True\)$"),
        ({"rows": 12}, r"knob rows=12 is not allowed \(rows of a tile\); allowed: 4, 8, 16, 32, 64$"),
        ({"rows": "16"}, "knob rows='16' is not allowed"),
        ({"unroll": 1}, "knob unroll=1 is not allowed"),  # 1 == True, and is not what was meant
        ({"rows": 64}, r"rows=64 cols=32 order=row unroll=True: rows \* cols exceeds 512"),
    ],
)
def test_what_is_not_in_the_space_is_refused_by_name(changes: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SPACE.config(changes)


def test_words_are_read_as_the_knobs_values() -> None:
    assert SPACE.parse({"rows": "8", "order": "COLUMN", "unroll": "false"}) == SPACE.config(
        {"rows": 8, "order": "column", "unroll": False}
    )
    with pytest.raises(ConfigError, match="rows='eight'"):
        SPACE.parse({"rows": "eight"})
    with pytest.raises(ConfigError, match="'x' is not known"):
        SPACE.parse({"x": "1"})


def test_a_space_without_knobs_has_one_config() -> None:
    empty = ConfigSpace(())
    assert list(empty) == [empty.default] and empty.default.slug == ""
    with pytest.raises(ConfigError, match="allowed: none for this template"):
        empty.config({"rows": 1})


def test_a_default_outside_its_own_space_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="default 5 is not among"):
        Knob("x", (1, 2), 5)
    with pytest.raises(ConfigError, match="exceeds 512"):
        ConfigSpace((power_of_two("rows", 4, 64, 64), power_of_two("cols", 8, 64, 64)), (TILES,))


def test_iteration_gives_every_config_that_breaks_nothing_once() -> None:
    configs = list(SPACE)
    assert len(configs) == len(set(configs))
    assert len(configs) == 4 * sum(r * c <= 512 for r in (4, 8, 16, 32, 64) for c in (8, 16, 32, 64))
    assert SPACE.default in configs


@given(st.data())
def test_a_config_survives_its_dict_and_its_words(data: st.DataObject) -> None:
    values = {knob.name: data.draw(st.sampled_from(knob.values)) for knob in SPACE.knobs}
    if SPACE.broken(values):
        with pytest.raises(ConfigError):
            SPACE.config(values)
        return
    config = SPACE.config(values)
    assert SPACE.config(config.to_dict()) == config
    assert SPACE.parse({name: str(value) for name, value in config.to_dict().items()}) == config


@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 32),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    head_dim_v=st.integers(1, 32).map(lambda n: 8 * n),
    dtype=st.sampled_from(FLOATS),
    block_size=st.integers(1, 1024),
    row_and_target=st.sampled_from(ROWS),
)
def test_every_supported_spec_has_a_default_on_every_target(
    kv_heads: int, group: int, head_dim: int, head_dim_v: int, dtype: DType, block_size: int, row_and_target: tuple[Op, Target]
) -> None:
    spec = KernelSpec(kv_heads * group, kv_heads, head_dim, dtype, head_dim_v=head_dim_v, block_size=block_size)
    op, target = row_and_target
    space = template_for(op, spec, target).space(spec, target)  # a default that breaks a constraint would be refused here
    assert space.broken(space.default.to_dict()) is None
    assert all(space.broken(config.to_dict()) is None for config in islice(space, 20))
    assert math.prod(len(knob.values) for knob in space.knobs) >= 1
