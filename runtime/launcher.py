"""From the words of a command line to an engine: the model, and the kernels that fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pagegen.build import build_kernels
from pagegen.errors import PackageError
from pagegen.kernel import PagedKernels
from pagegen.package import KernelPackage, find_package, load_package
from pagegen.runtime.engine import Engine, EngineConfig
from pagegen.runtime.models import build_model
from pagegen.runtime.scheduling.events import SchedulerEvent
from pagegen.runtime.tokenizer import Tokenizer
from pagegen.runtime.weights.resolve import resolve_model
from pagegen.spec import KernelSpec
from pagegen.target import best_cpu

BLOCK_SIZE = 16  # of the default kernels, unless another is asked for

@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A model that is ready to serve; `message` says in one line which kernels it runs on."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    message: str


def launch(
    model: str,
    kernels: PagedKernels | Path | None,
    config: EngineConfig,
    block_size: int | None = None,
    *,
    recorder: Callable[[SchedulerEvent], None] | None = None,
) -> Launched:
    """Loads the model that a MODEL word names, on `kernels`, a package's folder, or what `find_kernels` finds.

    A `block_size` of None is that of what is found, else BLOCK_SIZE. Kernels come first: what does not fit is refused before
    any weight is read. `recorder` is the engine's. Raises ModelError, PackageError, BuildError or ConfigError.
    """
    source = resolve_model(model)
    if kernels is None or isinstance(kernels, Path):
        wanted = config.kernel_spec(source.config, block_size or BLOCK_SIZE)
        kernels, message = find_kernels(wanted, kernels, any_block_size=block_size is None)
    else:
        message = f"kernels of the caller, {kernels.spec.slug}"
    tokenizer = source.tokenizer()
    network = build_model(source.config, source.weights(), config.dtype, config.deterministic, config.weight_dtype)
    engine = Engine(network, kernels, tokenizer, config, recorder)
    return Launched(source.name, engine, tokenizer, message)


def find_kernels(
    spec: KernelSpec, package: Path | None = None, *, any_block_size: bool = False
) -> tuple[PagedKernels, str]:
    """The kernels to run `spec` with, and one line that says which they are.

    A named package is taken or refused; without one, the newest of the user's package cache that fits the spec and this
    machine, else the default config, built. The layout of a package is its own choice, and so is the block size of a named
    one, or with `any_block_size` of any: the runtime follows `kernels.spec`. A deterministic package serves a spec that does
    not ask for it. Raises PackageError, BuildError, SpecError or ConfigError.
    """
    if package is not None:
        named = load_package(package)
        _require_fit(named, spec)
        return named, f"package {package}, {named.spec.slug} on {named.target.name}"
    found = find_package(spec.replace(layout=None), best_cpu(), any_block_size=any_block_size)
    why = "looks for faster ones"
    if found is not None:
        try:
            cached = load_package(found)
            return cached, f"package {found.name} of the cache, {cached.spec.slug} on {cached.target.name}"
        except PackageError as error:  # nobody asked for this one: it must not be in the way
            why = f"makes them anew (the cached ones are of no use: {error})"
    return default_kernels(spec), f"default config, {spec.slug} on {best_cpu().name}; `pagegen tune {spec.slug}` {why}"


def default_kernels(spec: KernelSpec) -> PagedKernels:
    """The kernels of `spec` in their templates' default configs, built for this CPU. Raises BuildError, SpecError."""
    return build_kernels(spec, best_cpu())


def _require_fit(package: KernelPackage, wanted: KernelSpec) -> None:
    remedy = f"`pagegen tune {wanted.slug} --target cpu` makes the right one, or leave out --kernels"
    if package.target.kind != "cpu":
        raise PackageError(f"package {package.path} is for {package.target.name}, the runtime is on the CPU; {remedy}")
    found = package.spec
    same = wanted if wanted.deterministic else wanted.replace(deterministic=found.deterministic)
    if found.replace(layout=wanted.layout, block_size=wanted.block_size) != same:
        raise PackageError(f"package {package.path} computes {found.slug}, the model needs {wanted.slug}; {remedy}")
