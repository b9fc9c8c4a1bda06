"""What decoders are made of, on a flattened batch of T tokens: no layer knows where one sequence ends.

Hidden states stay in float32 between layers, so that a reduced-precision model rounds only what enters a matrix
product; norms and rotary embedding are computed in float32. With `deterministic` a token's row has the same bits in
every batch, see `batch_invariance`; what does not have the option keeps rows apart as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from pagegen.errors import ModelError
from pagegen.runtime import batch_invariance
from pagegen.runtime.quantised import Int4Linear, Int8Linear
from pagegen.spec import DType


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """y = x W^T + b; W [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.deterministic:  # probes now, not in the first step
            batch_invariance.row_counts(*self.weight.shape, self.weight.dtype, torch.get_num_threads())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.deterministic:
            return F.linear(x, self.weight, self.bias)
        y = batch_invariance.product(x, self.weight)
        return y if self.bias is None else y + self.bias


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight in float32, stored as `dtype` (Zhang and Sennrich 2019)."""

    weight: torch.Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RotaryEmbedding:
    """Rotate-half rotary embedding (Su et al. 2021): dim i turns with dim i + head_dim / 2, at inv_freq[i]."""

    inv_freq: torch.Tensor  # [head_dim / 2], float32

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [T, 1, 1, head_dim / 2] and signed sin [T, 1, 2, head_dim / 2], once for all layers of a batch."""
        angle = positions[:, None].float() * self.inv_freq
        sin = angle.sin()
        return angle.cos()[:, None, None, :], torch.stack((-sin, sin), dim=1)[:, None]

    @staticmethod
    def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x [T, heads, head_dim] rotated in float32, in x's dtype."""
        cos, sin = angles
        halves = x.view(*x.shape[:-1], 2, -1)
        return torch.addcmul(halves * cos, halves.flip(-2), sin).to(x.dtype).flatten(-2)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LMHead:
    """Logits x W^T in float32, [R, vocab_size] for x [R, hidden_size].

    A bf16 product keeps 8 bits: logits between 16 and 32 land on multiples of 1/8, where the best two often tie. So the
    likeliest RESCORED tokens of each row are computed again from the same inputs in float32.
    """

    linear: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x).float()
        if x.dtype == torch.float32:
            return logits
        likeliest = logits.topk(min(RESCORED, logits.shape[-1]), sorted=False).indices
        exact = (self.linear.weight[likeliest].float() * x.float()[:, None]).sum(-1)  # bmm's bits depend on the rows
        return logits.scatter_(-1, likeliest, exact)


RESCORED = 32  # more than any request can ask logprobs of


def silu_and_mul(gate_up: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """silu(gate) * up for [T, 2 * n] that holds gate, then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (batch_invariance.silu(gate) if deterministic else F.silu(gate)) * up


class Checkpoint:
    """Named weights, checked against the expected names and shapes once, then taken in the model's dtype; `deterministic`
    is that of the linears, whose weights are kept in `weight_dtype` where that is given.

    Raises ModelError naming the first weight that is missing, misshapen or unknown: a checkpoint is never half used.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        deterministic: bool = False,
        weight_dtype: DType | None = None,
    ) -> None:
        for name, shape in shapes.items():
            if name not in weights:
                raise ModelError(f"weight {name} is missing; the checkpoint does not match its config")
            if (found := tuple(weights[name].shape)) != shape:
                raise ModelError(f"weight {name} has shape {found}, its config says {shape}")
        unknown = [name for name in weights if name not in shapes and not name.endswith(_REDUNDANT)]
        if unknown:
            raise ModelError(
                f"weight {unknown[0]} has no place in this architecture; the checkpoint does not match its config"
            )
        self._weights = weights
        self.dtype = dtype
        self.deterministic = deterministic
        self.weight_dtype = weight_dtype

    def linear(self, *names: str) -> Linear | Int8Linear | Int4Linear:
        """One linear whose outputs are those of the named ones in turn; `names` without `.weight`."""
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._weights]
        bias = self._join(biases) if biases else None
        weight = self._join([f"{name}.weight" for name in names])
        match self.weight_dtype:
            case DType.INT8:
                return Int8Linear.of(weight, bias, self.deterministic)
            case DType.INT4:
                return Int4Linear.of(weight, bias, self.deterministic)
            case _:
                return Linear(weight, bias, self.deterministic)

    def norm(self, name: str, eps: float) -> RMSNorm:
        """An RMSNorm; its weight stays in float32."""
        return RMSNorm(self._weights[f"{name}.weight"].float(), eps, self.dtype)

    def tensor(self, name: str) -> torch.Tensor:
        return self._weights[name].to(self.dtype)

    def _join(self, names: Sequence[str]) -> torch.Tensor:
        return torch.cat([self.tensor(name) for name in names]) if len(names) > 1 else self.tensor(names[0])


_REDUNDANT = (
    "rotary_emb.inv_freq",
    "lm_head.weight",
)  # old files store the former; the latter is a copy where it is tied
