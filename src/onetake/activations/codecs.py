"""FP8 E4M3 with one scale per row: half the bytes of bfloat16, at a stated error.

For Gaussian rows of 500 values and more the relative L2 error is 2.65 % (64 values: 2.5 %), whatever their scale. A value is
off by at most 1/17 of itself while it stays above 2⁻¹⁴ of its row's largest; smaller ones may vanish
(`tests/test_codecs.py` measures both).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_LARGEST = 448.0  # of float8_e4m3fn
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK = 2**22  # elements looked up at once: the lookup's 32-bit indices would take four times the codes' memory


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """A tensor (…, n) as FP8 codes (…, n) and scales (…, 1) in float32: value = code · scale."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def decode(self) -> Tensor:
        """The tensor in its own dtype again, contiguous."""
        if self.codes.device.type != "cpu":
            return (self.codes.float() * self.scales).to(self.dtype)
        rows = self.codes.reshape(-1, self.codes.shape[-1]).view(torch.uint8)
        scales = self.scales.reshape(-1, 1)
        decoded = torch.empty(rows.shape, dtype=self.dtype)
        step = max(_CHUNK // rows.shape[1], 1)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            values = _values().index_select(0, part.reshape(-1).int()).view_as(part)
            decoded[first : first + step] = values * scales[first : first + step]
        return decoded.view(self.codes.shape)


def encode(x: Tensor) -> Fp8 | None:
    """Codes of `x` (…, n), or None if a value is not finite: E4M3 has no infinity, and a cast would saturate silently."""
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    if not largest.isfinite().all():
        return None
    scales = (largest / _LARGEST).clamp_(min=_LEAST_SCALE)
    return Fp8(codes=(x / scales).to(torch.float8_e4m3fn), scales=scales, dtype=x.dtype)


@cache
def _values() -> Tensor:
    """(256,) what each code stands for. Torch's own CPU cast is three times slower than looking it up."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
