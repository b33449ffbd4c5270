"""CIFAR-10 and CIFAR-100: 32 x 32 colour images, from the official binary or Python files.

Of the 50,000 training images 5,000 are set apart for validation by a fixed seed; the 10,000 test
images stay the test set. The normalisation constants are the ones in public use, fixed numbers
that no run computes (see ``mnist`` on where they come from). Identifiers count the images in the
order of the official files, which is the same in both versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from download import data_folder, fetch, unpack
from expunge.errors import InputError
from expunge.tasks.samples import Samples, Task, number_ids, split_validation
from readers import Bytes, check_labels, read_cifar_binary, read_cifar_pickle

_PLACE = "https://www.cs.toronto.edu/~kriz/"
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""


@dataclass(frozen=True)
class _Source:
    """Everything that tells one CIFAR from the other; the last file of each version is the test."""

    classes: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    label_bytes: int
    label_key: str
    archive: str
    archive_digest: str
    binary: dict[str, str]
    pickles: dict[str, str]


_SOURCES = {
    "cifar10": _Source(
        classes=tuple(_CIFAR10.split()),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        label_bytes=1,
        label_key="labels",
        archive="cifar-10-binary.tar.gz",
        archive_digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
        binary={
            f"cifar-10-batches-bin/{name}.bin": f"sha256:{digest}"
            for name, digest in {
                "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            }.items()
        },
        pickles={
            "cifar-10-batches-py/data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
            "cifar-10-batches-py/data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
            "cifar-10-batches-py/data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
            "cifar-10-batches-py/data_batch_4": "md5:634d18415352ddfa80567beed471001a",
            "cifar-10-batches-py/data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
            "cifar-10-batches-py/test_batch": "md5:40351d587109b95175f43aff81a1287e",
        },
    ),
    "cifar100": _Source(
        classes=tuple(_CIFAR100.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        label_bytes=2,
        label_key="fine_labels",
        archive="cifar-100-binary.tar.gz",
        archive_digest="md5:03b5dce01913d631647c71ecec9e9cb8",
        binary={
            f"cifar-100-binary/{name}.bin": f"sha256:{digest}"
            for name, digest in {
                "train": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                "test": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            }.items()
        },
        pickles={
            "cifar-100-python/train": "md5:16019d7e3df5f24257cddd939b257f8d",
            "cifar-100-python/test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
    ),
}


def load(
    name: str = "cifar10",
    root: str | Path | None = None,
    *,
    validation: int = 5_000,
    verify: bool = True,
) -> Task:
    """The task ``cifar10`` or ``cifar100`` (fine labels) from the official files below ``root``.

    The folders are those of the official archives: ``cifar-10-batches-bin`` or
    ``cifar-10-batches-py``, ``cifar-100-binary`` or ``cifar-100-python``. With ``root`` they must
    be there; without it they are looked for in the folder that EXPUNGE_DATA names (else
    ~/.cache/expunge) and the binary version is downloaded into it if both are missing.
    ``validation=0`` keeps all 50,000 for training, as the paper does; ``verify=False`` admits
    files that are not the official ones.

    >>> load("cifar11")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: name is 'cifar11'; it must be one of cifar10, cifar100
    """
    if name not in _SOURCES:
        raise InputError.of("name", name, f"one of {', '.join(_SOURCES)}")
    source = _SOURCES[name]
    files = _find(source, data_folder(root), download=root is None)
    batches = [_read(path, digest if verify else None, source) for path, digest in files.items()]
    official = _collect(f"{name}/train/", batches[:-1])
    train, held = split_validation(official, validation)
    test = _collect(f"{name}/test/", batches[-1:])
    return Task(name, train, held, test, source.classes, source.mean, source.std)


def _find(source: _Source, folder: Path, *, download: bool) -> dict[Path, str]:
    """The files of the first version that is complete, with their digests."""
    for version in (source.binary, source.pickles):
        files = {folder / file: digest for file, digest in version.items()}
        if all(path.is_file() for path in files):
            return files
    if not download:
        kinds = " or ".join(
            str(Path(next(iter(v))).parent) for v in (source.binary, source.pickles)
        )
        raise InputError(
            f"{folder} has no complete {kinds}; root must be the folder that holds one of them, "
            "and without root= the files are downloaded"
        )
    archive = fetch([_PLACE + source.archive], folder / source.archive, source.archive_digest)
    unpack(archive, source.binary, folder)
    archive.unlink()
    return {folder / file: digest for file, digest in source.binary.items()}


def _read(path: Path, digest: str | None, source: _Source) -> tuple[Bytes, Bytes]:
    images, labels = (
        read_cifar_binary(path, source.label_bytes, digest)
        if path.suffix == ".bin"
        else read_cifar_pickle(path, source.label_key, digest)
    )
    check_labels(labels, len(source.classes), path)
    return images, labels


def _collect(prefix: str, batches: list[tuple[Bytes, Bytes]]) -> Samples:
    images = np.concatenate([images for images, _ in batches])
    labels: npt.NDArray[np.int64] = np.concatenate([labels for _, labels in batches]).astype(
        np.int64
    )
    return Samples(
        torch.from_numpy(images),
        torch.from_numpy(labels),
        number_ids(prefix, np.arange(len(labels))),
    )
