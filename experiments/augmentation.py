"""Batched augmentation of images on their device: random crop, horizontal flip, small rotation.

Drawing the random numbers and applying them are two functions, so that what was drawn is data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from expunge.errors import InputError


@dataclass(frozen=True)
class Augmentation:
    """Which changes are drawn; called as ``augmentation(images, generator)`` it draws and applies.

    ``padding``: crop at a random place of the image with a black frame of so many pixels.
    ``flip``: mirror left and right with probability 1/2.
    ``degrees``: rotate by an angle uniform on [-degrees, degrees], bilinear, black outside.

    >>> images = torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4)
    >>> Augmentation(padding=1)(images, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 4, 4])
    """

    padding: int = 4
    flip: bool = True
    degrees: float = 0.0

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise InputError.of("padding", self.padding, "a number of pixels >= 0")
        if not 0 <= self.degrees <= 180:
            raise InputError.of("degrees", self.degrees, "from 0 to 180")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return apply(self, images, draw(self, len(images), generator))


@dataclass(frozen=True, eq=False)
class Draws:
    """What was drawn for n images: crop ``offsets`` [n, 2] (down, right), ``flips`` [n] and
    ``angles`` [n] in radians, anticlockwise as seen on the screen."""

    offsets: Tensor
    flips: Tensor
    angles: Tensor


def draw(augmentation: Augmentation, count: int, generator: torch.Generator) -> Draws:
    """The random numbers for ``count`` images, from ``generator`` and on its device.

    >>> draw(Augmentation(), 3, torch.Generator().manual_seed(0)).offsets.shape
    torch.Size([3, 2])
    """
    device = generator.device
    offsets = torch.randint(
        0, 2 * augmentation.padding + 1, (count, 2), generator=generator, device=device
    )
    flips = torch.rand(count, generator=generator, device=device) < 0.5
    turns = torch.rand(count, generator=generator, device=device) * 2 - 1
    return Draws(offsets, flips & augmentation.flip, turns * math.radians(augmentation.degrees))


def apply(augmentation: Augmentation, images: Tensor, draws: Draws) -> Tensor:
    """The images [n, C, H, W] cropped, flipped and rotated as drawn, in their own dtype.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> moved = Draws(torch.tensor([[2, 1]]), torch.tensor([True]), torch.zeros(1))
    >>> apply(Augmentation(padding=1), image, moved).tolist()
    [[[[4, 3], [0, 0]]]]
    """
    if images.ndim != 4 or len(images) != len(draws.flips):
        raise InputError.of("shape of images", tuple(images.shape), "(n, C, H, W), n as drawn")
    moved = _crop_and_flip(images, augmentation.padding, draws)
    return moved if augmentation.degrees == 0 else _rotate(moved, draws.angles)


def _crop_and_flip(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """out[n, c, y, x] = padded[n, c, y + down_n, right_n + (W-1-x if flip_n else x)].

    Once an image has been mirrored and framed, each row of its crop is one run of W pixels in
    memory, so that all runs are copied by one ``index_select``. In a mirrored image the runs start
    at 2·padding - right_n.
    """
    n, channels, height, width = images.shape
    device = images.device
    (down, right), flips = draws.offsets.to(device).T, draws.flips.to(device)
    numbers = torch.arange(n, device=device)
    turned = torch.cat((images, images.flip(3))).index_select(0, numbers + n * flips)
    framed = functional.pad(turned, (padding,) * 4).contiguous()
    line = width + 2 * padding
    plane = line * (height + 2 * padding)
    right = torch.where(flips, 2 * padding - right, right)
    corners = numbers * (channels * plane) + down * line + right
    planes = torch.arange(channels, device=device) * plane
    lines = torch.arange(height, device=device) * line
    starts = corners[:, None, None] + planes[:, None] + lines
    runs = framed.as_strided((max(framed.numel() - width + 1, 0), width), (1, 1))
    return runs.index_select(0, starts.flatten()).view(images.shape)


def _rotate(images: Tensor, angles: Tensor) -> Tensor:
    """out(p) = in(R_n p), p in pixels from the centre, R_n the turn by angle_n; bilinear.

    ``affine_grid`` counts each axis from -1 to 1, hence the two ratios of sides.
    """
    height, width = images.shape[2:]
    angles = angles.to(images.device, torch.float32)
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    turn = torch.stack(
        [
            torch.stack([cos, -sin * (height / width), zero], dim=1),
            torch.stack([sin * (width / height), cos, zero], dim=1),
        ],
        dim=1,
    )
    pixels = images if images.is_floating_point() else images.to(torch.float32)
    grid = functional.affine_grid(turn.to(pixels.dtype), list(images.shape), align_corners=False)
    rotated = functional.grid_sample(
        pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return rotated if images.is_floating_point() else rotated.round_().to(images.dtype)
