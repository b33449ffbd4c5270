"""MNIST and Fashion-MNIST: 28 x 28 grey images of 10 classes, from the official idx files.

Of the 60,000 training images 5,000 are set apart for validation by a fixed seed; the 10,000 test
images stay the test set. The normalisation constants are the ones in public use, fixed numbers
that no run computes. Their publishers took them from the official training files; for a data set
of your own, use constants that never saw it (theory, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from download import data_folder, fetch
from expunge.errors import InputError
from expunge.tasks.samples import Samples, Task, number_ids, split_validation
from readers import check_labels, read_idx


@dataclass(frozen=True)
class _Source:
    """Class names, constants, places, and per file the digests of its content and its archive."""

    classes: tuple[str, ...]
    mean: float
    std: float
    places: tuple[str, ...]
    content: dict[str, str]
    archives: dict[str, str]


_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_FASHION = "t-shirt trouser pullover dress coat sandal shirt sneaker bag boot"
_SOURCES = {
    "mnist": _Source(
        classes=tuple("0123456789"),
        mean=0.1307,
        std=0.3081,
        places=(
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        content={
            _FILES[0]: "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            _FILES[1]: "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            _FILES[2]: "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            _FILES[3]: "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        archives={
            _FILES[0]: "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            _FILES[1]: "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            _FILES[2]: "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            _FILES[3]: "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": _Source(
        classes=tuple(_FASHION.split()),
        mean=0.2860,
        std=0.3530,
        places=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        content={
            _FILES[0]: "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            _FILES[1]: "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            _FILES[2]: "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            _FILES[3]: "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        archives={
            _FILES[0]: "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            _FILES[1]: "md5:25c81989df183df01b3e8a0aad5dffbe",
            _FILES[2]: "md5:bef4ecab320f06d8554ea6380940ec79",
            _FILES[3]: "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


def load(
    root: str | Path | None = None,
    *,
    name: str = "mnist",
    validation: int = 5_000,
    verify: bool = True,
) -> Task:
    """The task from ``root/name/*-ubyte[.gz]``; ``name`` may also be ``fashion-mnist``.

    With ``root`` the files must be there. Without it they are looked for in the folder that
    EXPUNGE_DATA names (else ~/.cache/expunge), and downloaded into it if missing. ``validation=0``
    keeps all 60,000 for training, as the paper does; ``verify=False`` admits files that are not
    the official ones.

    >>> load("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: /nowhere/mnist has no train-images-idx3-ubyte, gzipped or not; ...
    """
    if name not in _SOURCES:
        raise InputError.of("name", name, f"one of {', '.join(_SOURCES)}")
    source = _SOURCES[name]
    folder = data_folder(root) / name
    paths = [_find(folder, file, source, download=root is None) for file in _FILES]
    official = _read(name, "train", paths[0], paths[1], source, verify)
    train, held = split_validation(official, validation)
    test = _read(name, "test", paths[2], paths[3], source, verify)
    return Task(name, train, held, test, source.classes, (source.mean,), (source.std,))


def _find(folder: Path, file: str, source: _Source, *, download: bool) -> Path:
    packed = folder / f"{file}.gz"
    for path in (packed, folder / file):
        if path.is_file():
            return path
    if not download:
        raise InputError(
            f"{folder} has no {file}, gzipped or not; root must be the folder that holds "
            f"{folder.name}/{file}, and without root= the file is downloaded"
        )
    return fetch([place + packed.name for place in source.places], packed, source.archives[file])


def _read(
    name: str, part: str, images_path: Path, labels_path: Path, source: _Source, verify: bool
) -> Samples:
    digests = source.content if verify else {}
    images = read_idx(images_path, digests.get(images_path.name.removesuffix(".gz")))
    labels = read_idx(labels_path, digests.get(labels_path.name.removesuffix(".gz")))
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise InputError(f"{images_path} holds an array {images.shape}; it must be (n, 28, 28)")
    if labels.shape != (len(images),):
        raise InputError(
            f"{labels_path} holds an array {labels.shape}; it must be ({len(images)},), one label "
            "per image"
        )
    check_labels(labels, len(source.classes), labels_path)
    return Samples(
        torch.from_numpy(images[:, None].copy()),
        torch.from_numpy(labels.astype(np.int64)),
        number_ids(f"{name}/{part}/", np.arange(len(labels))),
    )
