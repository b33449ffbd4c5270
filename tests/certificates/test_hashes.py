"""Hashes of tensors: one for numpy, torch and files, and files in which every byte counts."""

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from expunge.certificates import hashes
from expunge.errors import CertificateError, InputError
from tests.helpers.sample_releases import make_tensors


def test_hash_is_the_documented_formula() -> None:
    header = json.dumps(["expunge/tensor-1", "w", "F32", [1, 2]]).encode()
    data = np.array([[1.0, 2.0]], np.float32)
    leaf = hashlib.sha256(len(header).to_bytes(8, "little") + header + data.tobytes()).digest()
    root = hashlib.sha256(b"expunge/tensors-1\0" + (1).to_bytes(8, "little") + leaf).hexdigest()
    assert hashes.hash_tensors({"w": data}) == root


def test_torch_and_numpy_agree_in_every_layout() -> None:
    import torch

    arrays = {
        "plain": np.arange(12.0).reshape(3, 4),
        "turned": np.arange(12, dtype=np.int32).reshape(3, 4).T,
        "scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False]), "half": np.ones(3, np.float16),
        "complex": np.array([1 + 2j], np.complex64), "sliced": np.arange(10)[::3],
    }  # fmt: skip
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    tensors["turned"] = torch.arange(12, dtype=torch.int32).reshape(3, 4).T
    tensors["complex"] = torch.tensor([1 - 2j], dtype=torch.complex64).conj()
    assert hashes.hash_tensors(tensors) == hashes.hash_tensors(arrays)
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    assert hashes.hash_tensors(swapped) == hashes.hash_tensors(arrays)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int64"])
def test_types_that_numpy_lacks_are_written_too(name, tmp_path) -> None:
    import safetensors.torch as reader
    import torch

    tensors = {"w": torch.linspace(-2, 2, 9).to(getattr(torch, name)).reshape(3, 3)}
    tensors["p"] = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    hashes.write_safetensors(tmp_path / "m", tensors, {"format": "pt"})
    assert hashes.hash_file(tmp_path / "m") == hashes.hash_tensors(tensors)
    found = reader.load_file(tmp_path / "m")
    assert bytes(hashes.read_bytes(found["w"])) == bytes(hashes.read_bytes(tensors["w"]))


def test_safetensors_writes_and_reads_the_same(tmp_path) -> None:
    tensors = make_tensors()
    hashes.write_safetensors(tmp_path / "ours", tensors, {"format": "pt"})
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    ours, theirs = (hashes.read_leaves(tmp_path / name) for name in ("ours", "theirs"))
    assert ours == theirs
    _, layout = ours
    for name, align in (("ours", 64), ("theirs", 8)):
        header = hashes.serialise_header(layout.entries, layout.metadata, align)
        assert (8 + len(header)) % align == 0, "mapped into memory, tensors are aligned"
        assert (tmp_path / name).read_bytes()[8:].startswith(header)
    for name, array in safetensors.numpy.load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, tensors[name])


@given(st.data())
def test_any_changed_value_name_or_shape_changes_the_hash(data) -> None:
    tensors = {"a": np.arange(4.0), "b": np.arange(4.0, 8.0)}
    name = data.draw(st.sampled_from(["a", "b"]))
    place = data.draw(st.integers(0, 3))
    changed = {key: array.copy() for key, array in tensors.items()}
    changed[name][place] += data.draw(st.sampled_from([1e-15, 1.0, -0.5]))
    same = np.array_equal(changed[name], tensors[name])
    assert (hashes.hash_tensors(changed) == hashes.hash_tensors(tensors)) == same
    assert hashes.hash_tensors({"b": tensors["a"], "a": tensors["b"]}) != hashes.hash_tensors(
        tensors
    )
    assert hashes.hash_tensors(tensors | {"a": tensors["a"].reshape(2, 2)}) != hashes.hash_tensors(
        tensors
    )


@pytest.mark.parametrize(
    ("value", "sentence"),
    [([1.0], "numpy array or a torch tensor"), (np.array(["x"]), "dtype of w")],
)
def test_what_is_no_tensor_is_named(value, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        hashes.describe_tensor("w", value)


def rewrite_header(path, change) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(raw[8 : 8 + length])
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h: h.replace(b'"a"', b'"b"'), "twice"),
        (lambda h: h.replace(b'"F64"', b'"F99"', 1), "unusable header: 'F99'"),
        (lambda h: h.replace(b"[2]", b"[3]", 1), "canonical form"),
        (lambda h: h.replace(b"[2]", b"[2.0]", 1), "unusable header"),
        (lambda h: h.replace(b"[2]", b"[-1,-2]", 1), "unusable header"),
        (lambda h: h.replace(b'"data_offsets":[0,16]', b'"data_offsets":[8,24]'), "canonical form"),
        (lambda h: h.replace(b'"shape"', b'"more":1,"shape"'), "canonical form"),
        (lambda h: h.replace(b":", b": "), "canonical form"),
        (lambda h: h + b" ", "canonical form"),
        (lambda h: b"[" + h, "unusable header"),
        (lambda h: b"[]", "unusable header"),
        (lambda h: b"{}" + b" " * 54, "their header says"),
        (lambda h: b'{"__metadata__":{"a":1},' + h[1:], "unusable header"),
        (lambda h: b"\xff" + h, "unusable header"),
    ],
)
def test_malformed_files_are_refused(change, sentence, tmp_path) -> None:
    hashes.write_safetensors(tmp_path / "m", {"a": np.zeros(2), "b": np.ones(2)})
    rewrite_header(tmp_path / "m", change)
    with pytest.raises(CertificateError, match=sentence):
        hashes.hash_file(tmp_path / "m")
