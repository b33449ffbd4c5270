"""Batched augmentation against a slow loop over samples and pixels, with the same draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from augmentation import Augmentation, Draws, apply, draw
from expunge.errors import InputError


def crop_and_flip_slowly(images: torch.Tensor, padding: int, draws: Draws) -> torch.Tensor:
    n, channels, height, width = images.shape
    out = torch.zeros_like(images)
    for i in range(n):
        down, right = draws.offsets[i].tolist()
        frame = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=images.dtype)
        frame[:, padding : padding + height, padding : padding + width] = images[i]
        cropped = frame[:, down : down + height, right : right + width]
        out[i] = cropped.flip(2) if draws.flips[i] else cropped
    return out


def rotate_slowly(image: np.ndarray, angle: float) -> np.ndarray:
    """Bilinear, zero outside: out(p) = in(R p), p in pixels from the centre of the image."""
    height, width = image.shape
    cy, cx = (height - 1) / 2, (width - 1) / 2
    out = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            x, y = column - cx, row - cy
            u = math.cos(angle) * x - math.sin(angle) * y + cx
            v = math.sin(angle) * x + math.cos(angle) * y + cy
            for i in (math.floor(v), math.floor(v) + 1):
                for j in (math.floor(u), math.floor(u) + 1):
                    if 0 <= i < height and 0 <= j < width:
                        out[row, column] += image[i, j] * (1 - abs(v - i)) * (1 - abs(u - j))
    return out


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (9, 1, 28, 28), (7, 2, 5, 9), (0, 3, 8, 8)])
@pytest.mark.parametrize("padding", [0, 2, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_are_exact(shape, padding: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, shape, generator=generator).to(dtype)
    plan = Augmentation(padding=padding)
    draws = draw(plan, len(images), generator)
    kept = images.clone()
    out = apply(plan, images, draws)
    assert out.dtype == dtype
    assert torch.equal(out, crop_and_flip_slowly(images, padding, draws))
    assert torch.equal(images, kept)


def test_channels_last_images_give_the_same() -> None:
    images = torch.randint(0, 256, (6, 3, 8, 8), generator=torch.Generator()).to(torch.uint8)
    plan = Augmentation(padding=2)
    draws = draw(plan, 6, torch.Generator().manual_seed(1))
    strided = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(apply(plan, strided, draws), apply(plan, images, draws))


@pytest.mark.parametrize("size", [(8, 8), (7, 7), (6, 11)])
def test_rotation_is_bilinear_interpolation(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    images = torch.rand((4, 2, *size), generator=generator)
    plan = Augmentation(padding=0, flip=False, degrees=30.0)
    draws = draw(plan, 4, generator)
    out = apply(plan, images, draws)
    for i in range(4):
        for channel in range(2):
            wanted = rotate_slowly(images[i, channel].double().numpy(), draws.angles[i].item())
            np.testing.assert_allclose(out[i, channel].numpy(), wanted, atol=2e-5)


def test_a_quarter_turn_is_anticlockwise() -> None:
    images = torch.randint(0, 256, (1, 1, 6, 6), generator=torch.Generator()).to(torch.uint8)
    draws = Draws(torch.zeros(1, 2).long(), torch.tensor([False]), torch.tensor([math.pi / 2]))
    out = apply(Augmentation(padding=0, degrees=90.0), images, draws)
    assert out.dtype == torch.uint8
    assert torch.equal(out, torch.rot90(images, 1, (2, 3)))


def test_nothing_to_do_changes_nothing() -> None:
    images = torch.rand(5, 3, 9, 9, generator=torch.Generator())
    plan = Augmentation(padding=0, flip=False, degrees=0.0)
    assert torch.equal(plan(images, torch.Generator()), images)


def test_draws_cover_their_ranges_evenly() -> None:
    n = 40_000
    draws = draw(Augmentation(4, True, 10.0), n, torch.Generator().manual_seed(0))
    for axis in range(2):
        counts = draws.offsets[:, axis].bincount(minlength=9)
        assert len(counts) == 9
        assert (counts - n / 9).abs().max() < 4.5 * math.sqrt(n / 9)
    assert abs(draws.flips.float().mean().item() - 0.5) < 4.5 * 0.5 / math.sqrt(n)
    limit = math.radians(10.0)
    assert draws.angles.abs().max() <= limit
    assert draws.angles.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)
    assert abs(torch.corrcoef(draws.offsets.T.float())[0, 1]) < 4.5 / math.sqrt(n)
    assert not draw(Augmentation(flip=False), 50, torch.Generator()).flips.any()


def test_the_generator_alone_decides() -> None:
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator())
    plan = Augmentation(padding=2, degrees=15.0)
    before = torch.get_rng_state()
    first, second = (plan(images, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, plan(images, torch.Generator().manual_seed(5)))


def test_bad_values_are_one_sentence() -> None:
    with pytest.raises(InputError, match="padding is -1; it must be"):
        Augmentation(padding=-1)
    with pytest.raises(InputError, match="degrees is 181"):
        Augmentation(degrees=181.0)
    with pytest.raises(InputError, match=r"shape of images is \(3, 4\)"):
        Augmentation()(torch.zeros(3, 4), torch.Generator())
