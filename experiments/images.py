"""MNIST, CIFAR-10 and CIFAR-100 from their official files, and scikit-learn's digits.

The normalisation constants are the ones in public use, fixed numbers that no run computes. Their
publishers took them from the official training files; for a data set of your own, use constants
that never saw it (docs/theory.md).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from download import check_digest, find
from samples import Samples, number_ids, split_validation

Bytes = npt.NDArray[np.uint8]
PIXELS = 3 * 32 * 32


@dataclass(frozen=True, eq=False)
class Images:
    """The official parts, the number of classes, and (mean, std) of every channel."""

    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


MNIST_PLACE = "https://storage.googleapis.com/cvdf-datasets/mnist/"
MNIST = {  # of what is in the gzipped file
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
CIFAR_PLACE = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class _Cifar:
    """What tells one CIFAR from the other; the last file is the test set."""

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_bytes: int
    archive: str
    folder: str
    files: dict[str, str]


CIFAR = {
    "cifar10": _Cifar(
        10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 1,
        "cifar-10-binary.tar.gz", "cifar-10-batches-bin",
        {
            "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    "cifar100": _Cifar(
        100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 2,
        "cifar-100-binary.tar.gz", "cifar-100-binary",
        {
            "train": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ),
}  # fmt: skip


def load_mnist() -> Images:
    """All 60,000 and 10,000 images, from ``mnist/*-ubyte.gz``."""
    arrays = [
        read_idx(find(f"mnist/{name}.gz", MNIST_PLACE), digest) for name, digest in MNIST.items()
    ]
    parts = [
        _collect(f"mnist/{part}/", images[:, None], labels)
        for part, images, labels in (("train", *arrays[:2]), ("test", *arrays[2:]))
    ]
    return Images(*parts, 10, (0.1307,), (0.3081,))


def load_cifar(name: str) -> Images:
    """``cifar10`` or ``cifar100`` (fine labels): all 50,000 and 10,000 images."""
    source = CIFAR[name]
    place = CIFAR_PLACE + source.archive
    batches = [
        read_cifar(find(f"{source.folder}/{file}.bin", place), source.label_bytes, digest)
        for file, digest in source.files.items()
    ]
    images, labels = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
    train = _collect(f"{name}/train/", images, labels)
    test = _collect(f"{name}/test/", *batches[-1])
    return Images(train, test, source.classes, source.mean, source.std)


def load_digits() -> Images:
    """1,797 grey images of 8 x 8 pixels from 0 to 16, scaled to [-1, 1]; no download.

    >>> found = load_digits()
    >>> len(found.train), len(found.test), str(found.train.ids[0])
    (1300, 297, 'digits/00000')
    """
    from sklearn.datasets import load_digits as load

    bunch: Any = load()
    everything = _collect("digits/", bunch.images.astype(np.uint8)[:, None], bunch.target)
    rest, test = split_validation(everything, 297, seed=1_797)
    train, _ = split_validation(rest, 200)
    return Images(train, test, 10, (8 / 255,), (8 / 255,))


def read_idx(path: Path, checksum: str) -> Bytes:
    """The array of a gzipped idx file of bytes: ``00 00 08 ndim``, ndim 32-bit sizes, content."""
    data = gzip.decompress(path.read_bytes())
    check_digest(data, checksum, path)
    shape = np.frombuffer(data, ">u4", count=data[3], offset=4).tolist()
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def read_cifar(path: Path, label_bytes: int, checksum: str) -> tuple[Bytes, Bytes]:
    """(images [n, 3, 32, 32], labels [n]) of records: labels, the last of which counts, pixels."""
    data = path.read_bytes()
    check_digest(data, checksum, path)
    rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + PIXELS)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


def _collect(prefix: str, images: Bytes, labels: npt.NDArray[Any]) -> Samples:
    targets = torch.from_numpy(labels.astype(np.int64))
    ids = number_ids(prefix, len(labels))
    return Samples(torch.from_numpy(np.array(images)), targets, ids)
