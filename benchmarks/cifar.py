"""CIFAR-10 on the device, augmented there: small trainings must not wait for a loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.datasets import CIFAR10

MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
PADDING = 4


@dataclass(frozen=True)
class Cifar:
    """Images as bytes, NCHW, and their labels."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> Cifar:
        """The same on another device."""
        return Cifar(*(t.to(device) for t in vars(self).values()))

    def cut(self, samples: int) -> Cifar:
        """The first few images and labels, for trying things out."""
        return Cifar(*(t[:samples] for t in vars(self).values()))

    def epoch(
        self, batch: int, seed: int, epoch: int, skip: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch of full batches, shuffled, cropped and flipped depending on seed and epoch."""
        device, count = self.train.device, len(self.train)
        generator = torch.Generator(device).manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(count, generator=generator, device=device)
        shifts = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator, device=device)
        flips = torch.randint(0, 2, (count,), generator=generator, device=device).bool()
        for start in range(skip * batch, count - batch + 1, batch):
            chosen = order[start : start + batch]
            images = _cropped(self.train[chosen], shifts[:, chosen], flips[chosen])
            yield normalised(images), self.train_labels[chosen]

    def tests(self, batch: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order."""
        for images, labels in zip(
            self.test.split(batch), self.test_labels.split(batch), strict=True
        ):
            yield normalised(images), labels


def normalised(images: Tensor) -> Tensor:
    """Bytes to floats of mean 0 and deviation 1, channels last in memory."""
    mean, std = (images.new_tensor(v, dtype=torch.float32).view(3, 1, 1) for v in (MEAN, STD))
    return ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)


def _cropped(images: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    size, device = images.shape[-1], images.device
    padded = F.pad(images, [PADDING] * 4)
    along = torch.arange(size, device=device)
    columns = torch.where(flips[:, None], along.flip(0), along) + shifts[1, :, None]
    rows = along + shifts[0, :, None]
    at = torch.arange(len(images), device=device)[:, None, None]
    return padded[at, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def load(folder: Path) -> Cifar:
    """Load torchvision's folder, or sheets of images (`train_00.webp`, ..., `labels.npz`)."""
    if (folder / "labels.npz").exists():
        labels = np.load(folder / "labels.npz")
        parts = [(_sheets(folder, part), labels[part]) for part in ("train", "test")]
    else:
        sets = (CIFAR10(folder, train=train) for train in (True, False))
        parts = [(part.data, np.array(part.targets)) for part in sets]
    tensors = []
    for images, labels in parts:
        nchw = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).contiguous()
        tensors += [nchw, torch.from_numpy(labels.astype(np.int64))]
    return Cifar(*tensors)


def _sheets(folder: Path, part: str) -> np.ndarray:
    """All images of a part; a sheet has them in rows and columns, 32 x 32 pixels each."""
    images = []
    for file in sorted(folder.glob(f"{part}_*.webp")):
        sheet = np.asarray(Image.open(file).convert("RGB"))
        rows, columns = sheet.shape[0] // 32, sheet.shape[1] // 32
        tiles = sheet.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2)
        images.append(tiles.reshape(-1, 32, 32, 3))
    return np.concatenate(images)
