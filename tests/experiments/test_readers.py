"""The official formats, written small here; every damaged byte stream must give one sentence."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import InputError
from readers import check_digest, check_labels, read_cifar_binary, read_cifar_pickle, read_idx


def encode_idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def make_images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def encode_python2(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2's cPickle wrote it (protocol 2): byte strings for text and raw data."""
    raw = images.tobytes()
    return (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03"
        b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01"
        + b"K"
        + bytes([len(images)])
        + b"M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tbU\x06labels]q\x08("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eu."
    )


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("shape", [(5,), (3, 4, 2), (0, 28, 28)])
def test_idx_is_read_packed_or_not(tmp_path: Path, pack, shape) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(pack(encode_idx(array)))
    assert np.array_equal(read_idx(path), array)


def test_idx_checksum_is_that_of_the_content_however_it_is_packed(tmp_path: Path) -> None:
    content = encode_idx(np.arange(6))
    checksum = "sha256:" + hashlib.sha256(content).hexdigest()
    for level in (1, 9):
        path = tmp_path / f"{level}.gz"
        path.write_bytes(gzip.compress(content, level))
        assert read_idx(path, checksum).tolist() == list(range(6))
    path.write_bytes(gzip.compress(content[:-1] + b"\x07"))
    with pytest.raises(InputError, match="is not the official file: its sha256 is"):
        read_idx(path, checksum)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "starts with"),
        (b"\0\0", "starts with"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "starts with 00 00 0d 01"),
        (b"\0\0\x08\x00", "starts with"),
        (b"\0\0\x08\x02\0\0\0\x01", "within its header"),
        (encode_idx(np.arange(9))[:-2], "promises 9 values, it holds 7"),
        (encode_idx(np.arange(9)) + b"\0", "goes on after the 9 values"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "truncated"),
        (gzip.compress(encode_idx(np.arange(900)))[:-9], "truncated or corrupted"),
        (b"\x1f\x8b" + b"junk" * 9, "truncated or corrupted"),
    ],
)
def test_damaged_idx_gives_one_sentence(tmp_path: Path, data: bytes, sentence: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(data)
    with pytest.raises(InputError, match=sentence) as caught:
        read_idx(path)
    assert "\n" not in str(caught.value)


def test_every_flipped_byte_of_a_gzipped_idx_is_noticed_or_harmless(tmp_path: Path) -> None:
    array = np.random.default_rng(2).integers(0, 256, 40, dtype=np.uint8)
    packed = gzip.compress(encode_idx(array), mtime=0)
    path = tmp_path / "labels.gz"
    noticed = 0
    for place in range(len(packed)):
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 0x55]) + packed[place + 1 :])
        try:
            assert np.array_equal(read_idx(path), array)
        except InputError:
            noticed += 1
    assert noticed > 0.8 * len(packed)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80))
def test_arbitrary_bytes_never_give_another_error(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "file"
    for content in (data, b"\0\0\x08\x01" + data, b"\x80\x02" + data):
        path.write_bytes(content)
        for read in (
            lambda: read_idx(path),
            lambda: read_cifar_binary(path, 1),
            lambda: read_cifar_pickle(path, "labels"),
        ):
            with contextlib.suppress(InputError):
                read()


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_binary_records_give_images_and_the_last_label(tmp_path: Path, label_bytes: int) -> None:
    images = make_images(4)
    labels = np.arange(4 * label_bytes, dtype=np.uint8).reshape(4, label_bytes)
    path = tmp_path / "train.bin"
    path.write_bytes(np.concatenate([labels, images], axis=1).tobytes())
    read, classes = read_cifar_binary(path, label_bytes)
    assert np.array_equal(read, images.reshape(4, 3, 32, 32))
    assert classes.tolist() == labels[:, -1].tolist()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="whole number of records"):
        read_cifar_binary(path, label_bytes)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickles_of_every_protocol_are_read(tmp_path: Path, protocol: int, order) -> None:
    images = np.asarray(make_images(3), order=order)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": images, b"labels": [1, 0, 9]}, protocol))
    read, labels = read_cifar_pickle(path, "labels")
    assert np.array_equal(read, images.reshape(3, 3, 32, 32))
    assert labels.tolist() == [1, 0, 9]


def test_python2_pickles_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    data = encode_python2(make_images(2), [3, 7])
    path = tmp_path / "data_batch_1"
    path.write_bytes(data)
    oracle = pickle.loads(data, encoding="bytes")
    images, labels = read_cifar_pickle(path, "labels")
    assert np.array_equal(images.reshape(2, -1), oracle[b"data"])
    assert labels.tolist() == oracle[b"labels"] == [3, 7]


class _Runs:
    """A pickle that would create a file when loaded."""

    def __init__(self, function, *arguments) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_a_pickle_that_names_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "data_batch_1"
    for bad in (
        _Runs(eval, f"open({str(mark)!r}, 'w').close()"),
        _Runs(open, str(mark), "w"),
        _Runs(np.save, str(mark), 1),
        _Runs(np.load, str(mark)),
        _Runs(getattr, "x", "upper"),
        io.StringIO(),
        np.float64(1.0),
    ):
        path.write_bytes(pickle.dumps({"data": bad, "labels": [0]}, 2))
        with pytest.raises(InputError, match="is refused: it asks for") as caught:
            read_cifar_pickle(path, "labels")
        assert "\n" not in str(caught.value)
    assert not mark.exists()
    assert not (tmp_path / "mark.npy").exists()


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ([1, 2], "must hold a dict"),
        ({"data": make_images(1)}, "must have data and labels"),
        ({"data": [1], "labels": [0]}, "must have data and labels"),
        ({"data": make_images(2)[:, :9], "labels": [0, 1]}, "another shape"),
        ({"data": make_images(2), "labels": [0]}, "2 images and 1 labels"),
        ({"data": make_images(1), "labels": [-1]}, "not a whole number"),
        ({"data": make_images(1), "labels": [True]}, "not a whole number"),
        ({"data": make_images(1).astype(float), "labels": [0]}, "not made of bytes"),
        ({"data": np.array([[object]]), "labels": [0]}, "is refused"),
    ],
)
def test_a_pickle_with_other_content_is_refused(tmp_path: Path, batch, sentence: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(batch))
    with pytest.raises(InputError, match=sentence):
        read_cifar_pickle(path, "labels")


def test_a_truncated_pickle_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    data = encode_python2(make_images(1), [3])
    path = tmp_path / "data_batch_1"
    for end in [*range(150), *range(150, len(data), 500)]:
        path.write_bytes(data[:end])
        with pytest.raises(InputError):
            read_cifar_pickle(path, "labels")


def test_labels_out_of_range_name_the_label_and_the_classes() -> None:
    check_labels(np.array([0, 9], np.uint8), 10, "x.bin")
    with pytest.raises(
        InputError, match=r"x\.bin has the label 10; labels of 10 classes are 0 to 9"
    ):
        check_labels(np.array([0, 10], np.uint8), 10, "x.bin")


def test_a_wrong_checksum_names_both(tmp_path: Path) -> None:
    check_digest(b"abc", "sha256:" + hashlib.sha256(b"abc").hexdigest(), "f")
    with pytest.raises(InputError, match=r"f is not the official file: its md5 is 9001.*one 00"):
        check_digest(b"abc", "md5:00", "f")
    with pytest.raises(InputError, match="cannot be read: no such file"):
        read_idx(tmp_path / "absent")
