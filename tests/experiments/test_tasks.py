"""MNIST and CIFAR from small files in the official formats, and the real files when named."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import cifar
import mnist
from expunge.errors import InputError
from expunge.tasks.samples import Samples, split_forget

real_data = pytest.mark.skipif(
    "EXPUNGE_DATA" not in os.environ,
    reason="EXPUNGE_DATA is not set: it must name the folder with the official data files",
)


def write_mnist(folder: Path, *, packed: bool, train: int = 30, test: int = 10) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        for kind, array in (
            ("images-idx3", rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)),
            ("labels-idx1", (np.arange(count) % 10).astype(np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            data = head + array.tobytes()
            name = folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            name.write_bytes(gzip.compress(data) if packed else data)


def write_cifar(folder: Path, name: str, *, binary: bool, per_file: int = 6) -> None:
    rng = np.random.default_rng(1)
    label_bytes, classes = (1, 10) if name == "cifar10" else (2, 100)
    if name == "cifar10":
        files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        place = "cifar-10-batches-bin" if binary else "cifar-10-batches-py"
    else:
        files = ["train", "test"]
        place = "cifar-100-binary" if binary else "cifar-100-python"
    (folder / place).mkdir(parents=True)
    for file in files:
        images = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        labels = rng.integers(0, classes, (per_file, label_bytes), dtype=np.uint8)
        if binary:
            rows = np.concatenate([labels, images], axis=1)
            (folder / place / f"{file}.bin").write_bytes(rows.tobytes())
        else:
            batch = {b"data": images, b"batch_label": b"training"}
            batch |= (
                {b"labels": labels[:, 0].tolist()}
                if label_bytes == 1
                else {
                    b"coarse_labels": labels[:, 0].tolist(),
                    b"fine_labels": labels[:, 1].tolist(),
                }
            )
            (folder / place / file).write_bytes(pickle.dumps(batch, 2))


def all_ids(*parts: Samples) -> list[str]:
    return [name for part in parts for name in part.ids.tolist()]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_is_read_split_and_named(tmp_path: Path, packed: bool, name: str) -> None:
    write_mnist(tmp_path / name, packed=packed)
    task = mnist.load(tmp_path, name=name, validation=5, verify=False)
    assert task.train.inputs.shape == (25, 1, 28, 28)
    assert task.train.inputs.dtype == torch.uint8
    assert task.train.targets.dtype == torch.int64
    assert sorted(all_ids(task.train, task.validation)) == [
        f"{name}/train/{i:05d}" for i in range(30)
    ]
    assert task.test.ids.tolist() == [f"{name}/test/{i:05d}" for i in range(10)]
    numbers = [int(name[-5:]) for name in task.train.ids]
    assert numbers == sorted(numbers)
    assert task.train.targets.tolist() == [i % 10 for i in numbers]
    assert len(task.classes) == 10


def test_validation_is_fixed_and_can_be_left_out(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", packed=True)
    first, second = (mnist.load(tmp_path, validation=4, verify=False) for _ in range(2))
    assert first.validation.ids.tolist() == second.validation.ids.tolist()
    assert torch.equal(first.validation.inputs, second.validation.inputs)
    whole = mnist.load(tmp_path, validation=0, verify=False)
    assert (len(whole.train), len(whole.validation)) == (30, 0)
    with pytest.raises(InputError, match="validation is 30; it must be from 0 to 29"):
        mnist.load(tmp_path, validation=30, verify=False)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_the_same_from_binary_and_from_pickles(tmp_path: Path, name: str) -> None:
    tasks = []
    for binary in (True, False):
        root = tmp_path / str(binary)
        write_cifar(root, name, binary=binary)
        tasks.append(cifar.load(name, root, validation=2, verify=False))
    first, second = tasks
    for part in ("train", "validation", "test"):
        a, b = getattr(first, part), getattr(second, part)
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert a.ids.tolist() == b.ids.tolist()
    total = 30 if name == "cifar10" else 6
    assert sorted(all_ids(first.train, first.validation)) == [
        f"{name}/train/{i:05d}" for i in range(total)
    ]
    assert first.train.inputs.shape[1:] == (3, 32, 32)
    assert len(first.classes) == len(set(first.classes)) == (10 if name == "cifar10" else 100)
    assert first.classes == tuple(sorted(first.classes))


def test_files_that_are_not_the_official_ones_are_refused_unless_told(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", packed=True)
    write_cifar(tmp_path, "cifar10", binary=True)
    write_cifar(tmp_path, "cifar100", binary=False)
    for load in (
        lambda: mnist.load(tmp_path),
        lambda: cifar.load("cifar10", tmp_path),
        lambda: cifar.load("cifar100", tmp_path),
    ):
        with pytest.raises(InputError, match=r"is not the official file: its .* the official one"):
            load()


def test_missing_and_wrong_files_are_one_sentence_each(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no train-images-idx3-ubyte, gzipped or not; root must"):
        mnist.load(tmp_path)
    with pytest.raises(InputError, match="cifar-10-batches-bin or cifar-10-batches-py; root must"):
        cifar.load("cifar10", tmp_path)
    with pytest.raises(InputError, match="name is 'svhn'; it must be one of mnist, fashion-mnist"):
        mnist.load(tmp_path, name="svhn")
    write_mnist(tmp_path / "mnist", packed=False)
    labels = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    good = labels.read_bytes()
    labels.write_bytes(good[:-1] + b"\x0a")
    with pytest.raises(InputError, match="has the label 10; labels of 10 classes are 0 to 9"):
        mnist.load(tmp_path, validation=0, verify=False)
    labels.write_bytes(good[:4] + struct.pack(">I", 9) + good[8:-1])
    with pytest.raises(InputError, match=r"holds an array \(9,\); it must be \(10,\)"):
        mnist.load(tmp_path, validation=0, verify=False)
    images = tmp_path / "mnist" / "t10k-images-idx3-ubyte"
    images.write_bytes(good)
    with pytest.raises(InputError, match=r"it must be \(n, 28, 28\)"):
        mnist.load(tmp_path, validation=0, verify=False)


def test_cifar100_given_as_cifar10_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100", binary=True, per_file=6)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / f"{name}.bin").write_bytes((tmp_path / "cifar-100-binary/train.bin").read_bytes())
    with pytest.raises(InputError, match="whole number of records of 3073 bytes"):
        cifar.load("cifar10", tmp_path, validation=0, verify=False)


@pytest.mark.slow
@real_data
@pytest.mark.parametrize(
    ("load", "sizes", "per_class"),
    [
        (mnist.load, (55_000, 5_000, 10_000), None),
        (lambda: cifar.load("cifar10"), (45_000, 5_000, 10_000), 1000),
        (lambda: cifar.load("cifar100"), (45_000, 5_000, 10_000), 100),
    ],
    ids=["mnist", "cifar10", "cifar100"],
)
def test_the_official_files_have_the_published_contents(load, sizes, per_class) -> None:
    task = load()
    parts = (task.train, task.validation, task.test)
    assert tuple(map(len, parts)) == sizes
    assert len(set(all_ids(*parts))) == sum(sizes)
    if per_class:
        assert set(task.test.targets.bincount().tolist()) == {per_class}
    pixels = torch.cat([task.train.inputs, task.validation.inputs]).double() / 255
    channels = pixels.transpose(0, 1).flatten(1)
    torch.testing.assert_close(
        channels.mean(1), torch.tensor(task.mean).double(), atol=2e-4, rtol=0
    )
    torch.testing.assert_close(channels.std(1), torch.tensor(task.std).double(), atol=2e-3, rtol=0)
    retain, forget = split_forget(task.train)
    assert (len(retain), len(forget)) == (sizes[0] * 9 // 10, sizes[0] // 10)
