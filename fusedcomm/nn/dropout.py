"""Dropout without a generator: whether an element is kept is a function of what the element is.

A hash of (seed, step, sample, layer, site, position, feature) decides, so that the decision is the same for
every layout of the model over ranks and micro-batches, for a recomputed layer and for a resumed run, and no
state has to be saved. Ranks that hold different rows of the sequence draw different numbers, ranks that hold
the same rows equal ones.

The hash is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014, with the constants of Stafford's mix 13), applied once per coordinate. int64 arithmetic
wraps around in torch.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

# SplitMix64's constants as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class DropoutSite(IntEnum):
    """Where in a layer the dropout stands."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2


def dropout_keys(seed: int, step: Tensor, sample_ids: Tensor) -> Tensor:
    """One int64 key per row of the batch, from step [B] and global sample ids [B], both int64."""
    for name, ids in (("step", step), ("sample_ids", sample_ids)):
        if ids.dtype != torch.int64 or ids.dim() != 1 or ids.shape != step.shape:
            raise ValueError(
                f"dropout_keys: {name} has shape {list(ids.shape)} and dtype {ids.dtype}; "
                "step and sample_ids must be int64 and hold one entry for each row of the batch"
            )
    key = _mix_(torch.full_like(step, seed))
    return _mix_(_mix_(key ^ step) ^ sample_ids)


def stateless_dropout(
    x: Tensor,
    p: float,
    keys: Tensor,
    *,
    layer: int,
    site: DropoutSite,
    first_position: int = 0,
    first_feature: int = 0,
) -> Tensor:
    """Zero a share `p` of x [S_local, B, H_local] and divide the rest by `1 - p`.

    `keys` [B] come from `dropout_keys`; `first_position` and `first_feature` say where this rank's rows and
    features start in the whole. Nothing travels; one byte per element is kept for backward.
    """
    if not 0 <= p < 1:
        raise ValueError(f"stateless_dropout: p={p}; the share of zeroed elements must be in [0, 1)")
    if x.dim() != 3 or keys.shape != x.shape[1:2]:
        raise ValueError(
            f"stateless_dropout: x has shape {list(x.shape)} and keys {list(keys.shape)}; "
            "x must be [S, B, H] and keys [B]"
        )
    if p == 0:
        return x
    # One word holds position (32 bits), site and layer; xor with a key and the hash are one-to-one, so
    # nothing collides.
    place = (layer * len(DropoutSite) + site) << 32
    positions = torch.arange(first_position, first_position + x.shape[0], device=x.device) + place
    features = torch.arange(first_feature, first_feature + x.shape[2], device=x.device)
    row_keys = _mix_(positions[:, None] ^ keys)
    bits = _mix_(row_keys[..., None] ^ features)
    # The bits are uniform over the signed 64-bit numbers.
    keep = bits >= int(p * 2.0**64) - (1 << 63)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's next output after state `x`, in place; a bijection of the 64-bit numbers."""
    x += _GOLDEN
    x ^= _shift_right(x, 30)
    x *= _MIX_1
    x ^= _shift_right(x, 27)
    x *= _MIX_2
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # `>>` copies the sign of an int64; a logical shift fills with zeros.
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
