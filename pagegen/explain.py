"""A package's manifest in words. Vendored into every kernel package, for `python -m <package> explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .records import DispatchRow, DispatchTable
from .spec import PAGED_OPS, KernelSpec


def explain(manifest: Mapping[str, Any]) -> str:
    """What the package computes, where, with which configs for which batches, and on what evidence."""
    return "\n".join(_lines(manifest))


def _lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    spec, hardware = KernelSpec.from_dict(manifest["spec"]), manifest["fingerprint"]["hardware"]
    yield f"{manifest['name']} {manifest['version']}"
    yield f"Computes  {spec.slug}: {_spec_words(spec)}"
    yield f"Runs on   {manifest['target']}: {_pairs({k: v for k, v in hardware.items() if k != 'target'})}"
    yield f"Made      {manifest['created']} by pagegen {manifest['pagegen']} with {_pairs(manifest['fingerprint']['toolchain'])}"
    yield "Kernels"
    for name, entry in manifest["kernels"].items():
        config = " ".join(f"{knob}={value}" for knob, value in entry["config"].items())
        form = "binary and source" if entry["binary"] else "source"
        yield f"  {name}: {entry['op']} from {entry['template']} ({form}), {config or 'no knobs'}"
    for op in PAGED_OPS:
        table = DispatchTable.from_dict(manifest["dispatch"].get(op.value, {}))
        if table.rows:
            yield f"Dispatch of {op.value}, the first line that holds the batch"
            for row in table.rows:
                yield f"  {bucket_words(row)}: {row.kernel}{', the untuned default' if row.kernel == table.fallback else ''}"
            yield f"  everything else: {table.fallback}, the untuned default"
    if manifest["evidence"]:
        yield "Evidence"
        yield from (f"  {line}" for line in _tree(manifest["evidence"]))


def _spec_words(spec: KernelSpec) -> str:
    dims = f"head dim {spec.head_dim}" + (f" (V {spec.dim_v})" if spec.dim_v != spec.head_dim else "")
    words = [
        f"{spec.q_heads} query heads on {spec.kv_heads} KV heads",
        dims,
        f"q {spec.dtype.value}, KV {spec.cache_dtype.value} in blocks of {spec.block_size} tokens, layout {spec.kv_layout.name}",
        "causal" if spec.causal else "not causal",
        f"scale {spec.softmax_scale:.6g}",
    ]
    return ", ".join(words + (["with log-sum-exp"] if spec.lse else []))


def bucket_words(row: DispatchRow) -> str:
    """`decode, 1 to 8 sequences, up to 512 tokens of context`."""
    parts = [row.phase.value]
    for measure, (low, high) in row.bounds.items():
        if low is not None and high is not None:
            parts.append(f"{low} to {high} {measure}")
        elif low is not None:
            parts.append(f"{low} {measure} or more")
        elif high is not None:
            parts.append(f"up to {high} {measure}")
    return ", ".join(parts)


def _pairs(values: Mapping[str, Any]) -> str:
    """`cores 2, caches (L1d 49152, L2 1048576)`; what is None is left out."""
    shown = {name: value for name, value in values.items() if value is not None}
    return ", ".join(
        f"{name} ({_pairs(value)})" if isinstance(value, Mapping) else f"{name} {_value(value)}"
        for name, value in shown.items()
    )


def _tree(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
            yield f"{name}:"
            yield from (f"  {line}" for line in _tree(value))
        elif isinstance(value, Mapping):
            title = "carried over from an earlier run, with its trials" if name == "carried" else name
            yield f"{title}: {_pairs(value)}"
        elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
            contest = name == "contest" and all(map(_is_of_contest, value))
            yield "contest, time of the others over the first:" if contest else f"{name}:"
            yield from (f"  {line}" for line in _table(_batches(value) if contest else value))
        else:
            yield f"{name}: {_value(value)}"


def _is_of_contest(row: Mapping[str, Any]) -> bool:
    words, numbers = (row.get("point"), row.get("name")), (row.get("seconds"), row.get("ratio"))
    return all(isinstance(word, str) for word in words) and all(isinstance(number, float) for number in numbers)


def _batches(contest: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a batch: the microseconds of its first contender, then the ratios of the others."""
    batches: dict[str, dict[str, Any]] = {}
    for row in contest:
        if row["point"] in batches:
            batches[row["point"]][row["name"]] = f"{row['ratio']:.2f}"
        else:
            batches[row["point"]] = {"batch": row["point"], f"{row['name']} us": f"{row['seconds'] * 1e6:.1f}"}
    return list(batches.values())


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Aligned columns; what is itself a mapping (a config, say, which stands with its kernel) has none."""
    names = [name for name, value in rows[0].items() if not isinstance(value, Mapping)]
    cells = [names, *([_value(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    yield from (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    return str(value)
