"""FP8 codes: their stated error, their range, and the table lookup against torch's own cast."""

from __future__ import annotations

import pytest
import torch

from onetake.activations.codecs import encode

GAUSSIAN_ERROR = 0.0265  # what the module's docstring states


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(x: torch.Tensor) -> torch.Tensor:
    codes = encode(x)
    assert codes is not None
    return codes.decode()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 300.0, 1e30])
@pytest.mark.parametrize("width", [576, 1536])
def test_gaussian_error_is_the_stated_one(scale, width):
    x = gaussian(256, width) * scale
    error = float((decoded(x) - x).double().norm() / x.double().norm())
    assert error == pytest.approx(GAUSSIAN_ERROR, rel=0.02)


def test_rows_have_their_own_scale():
    """A row a million times smaller than its neighbour keeps its digits."""
    x = gaussian(2, 256)
    x[1] *= 1e-6
    assert float((decoded(x)[1] - x[1]).norm() / x[1].norm()) < 1.1 * GAUSSIAN_ERROR


def test_error_of_a_single_value():
    """At most 1/17 above 2⁻¹⁴ of the row's largest; below, absolute: half of the step 2⁻⁹, over 448."""
    x = torch.cat([torch.ones(1), torch.logspace(0, -24, 4096, base=2)])[None]
    error = (decoded(x) - x).abs()
    large = x >= 2.0**-14
    assert (error[large] / x[large]).max() <= 1 / 17 + 1e-6
    assert error[~large].max() <= 2.0**-10 / 448 * 1.0001
    assert decoded(x)[0, -1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lookup_is_torchs_cast(dtype):
    x = gaussian(3, 5, 96).to(dtype)
    codes = encode(x)
    assert codes is not None
    expected = (codes.codes.float() * codes.scales).to(dtype)
    assert codes.decode().dtype == dtype
    assert torch.equal(codes.decode(), expected)


def test_bytes_are_one_per_value_and_four_per_row():
    codes = encode(gaussian(7, 96).bfloat16())
    assert codes is not None
    assert codes.nbytes == 7 * 96 + 7 * 4


def test_largest_and_zero_rows_survive():
    x = torch.tensor([[0.0, 0.0], [1e4, -1e4], [3e38, 1.0]])
    assert torch.equal(decoded(x)[:2], x[:2])
    assert decoded(x)[2, 0] == pytest.approx(3e38)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_has_no_code_is_refused(bad):
    """A cast would turn infinity into 448 without a word."""
    x = gaussian(4, 8)
    x[2, 3] = bad
    assert encode(x) is None
