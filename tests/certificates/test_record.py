"""Records, commitments and hashes: round trips, golden values, and refusals."""

import hashlib
import json
import math
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from expunge.certificates.hashing import (
    combine_leaves,
    hash_leaf,
    hash_tensors,
    hash_weights,
    write_safetensors,
)
from expunge.certificates.identifiers import Commitment, commit, commit_disjoint, opens, read_ids
from expunge.certificates.record import FineTuning, RunRecord, Trace
from expunge.errors import CertificateError, InputError
from expunge.files import read_limited, write_atomic
from expunge.recipes import GradientClipping
from handmade import GRADIENT, RECIPES, SALT, WEIGHTS, hash_of, make_record, make_trace

# --- commitments


def test_commitment_golden() -> None:
    found = commit(["alice", "bob"], "00" * 32)
    assert found.root == "7fea5fce1bff3e05345e32db54887ed7c1d97eea95baec0585fe45dc08183451"
    assert found.count == 2


def test_commitment_is_the_documented_formula() -> None:
    salt = bytes.fromhex(SALT)
    leaves = sorted(hashlib.sha256(b"expunge/id\0" + salt + i).digest() for i in (b"a", b"b", b"9"))
    header = b"expunge/ids\0" + salt + (3).to_bytes(8, "little")
    assert commit(["b", 9, "a"], SALT).root == hashlib.sha256(header + b"".join(leaves)).hexdigest()


def is_visible(name: str) -> bool:
    try:
        return bool(read_ids([name]))
    except InputError:
        return False


@given(
    st.lists(
        st.text().filter(is_visible),
        unique_by=lambda x: unicodedata.normalize("NFC", x),
    ),
    st.randoms(),
)
def test_commitment_ignores_order_and_opens_only_for_its_set(ids, random) -> None:
    commitment = commit(ids)
    shuffled = list(ids)
    random.shuffle(shuffled)
    assert opens(commitment, shuffled)
    assert not opens(commitment, [*ids, "another one, which is not in the list"])
    assert not ids or not opens(commitment, ids[1:])


def test_whole_numbers_are_their_decimal_text() -> None:
    assert (
        commit(np.arange(4), SALT) == commit(["0", "1", "2", "3"], SALT) == commit(range(4), SALT)
    )


def test_salt_hides_the_set() -> None:
    assert commit(["a"]).root != commit(["a"]).root
    with pytest.raises(InputError, match="withheld"):
        opens(replace(commit(["a"]), salt=None), ["a"])


@pytest.mark.parametrize("ids", [["a", "b", "a"], [1, "1", 2], [np.int64(3), 3, "x"]])
def test_a_person_on_many_samples_is_one_identifier(ids) -> None:
    found = commit(ids, SALT)
    assert (found.count, found.samples) == (2, 3)
    assert found.root == commit({str(i) for i in ids}, SALT).root
    assert opens(found, set(map(str, ids)))
    assert commit(["a"], SALT, samples=40).samples == 40


def test_identifiers_are_compared_in_normal_form() -> None:
    composed, apart = "Zo\u00eb", "Zoe\u0308"
    assert commit([composed, apart], SALT).count == 1
    assert opens(commit([composed]), [apart])
    with pytest.raises(InputError, match="in forget_ids too"):
        commit_disjoint([composed], ["x", apart])


def test_commitments_of_version_1_still_open() -> None:
    """Their identifiers were taken as they came, and the root is the same formula."""
    leaf = hashlib.sha256(b"expunge/id\0" + bytes.fromhex(SALT) + "Zoe\u0308".encode()).digest()
    header = b"expunge/ids\0" + bytes.fromhex(SALT) + (1).to_bytes(8, "little")
    root = hashlib.sha256(header + leaf).hexdigest()
    old = Commitment(root=root, count=1, salt=SALT, algorithm="sha256-salted-set-1")
    assert opens(old, ["Zoe\u0308"])
    assert not opens(old, ["Zo\u00eb"])


def test_a_request_names_someone_and_is_a_list() -> None:
    with pytest.raises(InputError, match="forget_ids is"):
        commit_disjoint([], ["a"])
    with pytest.raises(InputError, match="not one text"):
        commit_disjoint("user-42", ["a"])
    forget, retain = commit_disjoint(["a", "a"], np.array(["b", "c"]))
    assert (forget.count, forget.samples, retain.count) == (1, 2, 2)
    assert commit_disjoint(None, None) == (None, None)


@pytest.mark.parametrize("ids", [[1.5], [None], [True], [b"a"], [np.bool_(True)]])
def test_only_text_and_whole_numbers_are_identifiers(ids) -> None:
    with pytest.raises(InputError, match="strings or whole numbers"):
        commit(ids)


@pytest.mark.parametrize(
    ("field", "value"), [("salt", "zz" * 32), ("root", "ab"), ("count", -1), ("algorithm", "md5")]
)
def test_bad_commitments_are_refused(field, value) -> None:
    given = {"root": "a" * 64, "count": 1, "salt": SALT, "algorithm": "sha256-salted-set-1"}
    with pytest.raises(InputError, match=field):
        Commitment(**(given | {field: value}))


# --- records


@pytest.mark.parametrize("name", RECIPES)
def test_record_round_trip(name, tmp_path) -> None:
    record = make_record(RECIPES[name], frozen="f" * 64, frozen_names=("embed",), parent="e" * 64)
    record.save(tmp_path / "record.json")
    found = RunRecord.load(tmp_path / "record.json")
    assert found == record
    assert found.digest() == record.digest()
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_infinity_and_large_seeds_survive() -> None:
    recipe = GradientClipping(
        start_clip=1.0, grad_clip=math.inf, learning_rate=0.1, weight_decay=0.0, steps=1,
        noise_std=1.0, start_noise_std=2.0,
    )  # fmt: skip
    noise = {"source": "seeded", "generator": "g", "releasable": False, "seed": 2**60 + 1}
    record = make_record(recipe, noise=noise)
    plain = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert RunRecord.from_dict(plain) == record


def test_every_field_changes_the_digest() -> None:
    record = make_record()
    changed = {
        "gradient_evaluations": 641,
        "weights_before": "d" * 64,
        "start": "centre",
        "device": "cuda",
        "nonce": "7" * 64,
        "forget": None,
        "finetune": None,
        "trace": make_trace(GRADIENT, 21),
    }
    digests = {make_record(**{name: value}).digest() for name, value in changed.items()}
    assert len(digests | {record.digest()}) == len(changed) + 1


def test_two_records_of_one_run_have_different_nonces() -> None:
    values = {f: getattr(make_record(), f) for f in RunRecord.__dataclass_fields__ if f != "nonce"}
    assert RunRecord(**values).digest() != RunRecord(**values).digest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parameters", -1),
        ("parameters", 2.5),
        ("grid", 0.3),
        ("grid", -1.0),
        ("weights_after", "ABC"),
        ("weights_before", "A" * 64),
        ("parent", "x"),
        ("start", "zero"),
        ("buffers", "kept"),
        ("noise", {"source": "dice"}),
        ("resumed", True),
    ],
)
def test_bad_fields_are_refused(field, value) -> None:
    with pytest.raises(InputError, match=field):
        make_record(**{field: value})


def test_trace_columns_must_match() -> None:
    with pytest.raises(InputError, match=r"noise_norm has 1 entries"):
        Trace((0.1, 0.1), (1, 1), (1, 1), (1, 1), (1, 1), (1,), (False, False))
    with pytest.raises(InputError, match=r"gradient_norm is nan"):
        Trace((0.1,), (1,), (math.nan,), (1,), (1,), (1,), (True,))
    columns = np.ones(3)
    trace = Trace(columns, columns, columns, columns, columns, columns, columns == 0)
    assert len(trace) == 3
    assert trace.nonfinite == (False, False, False)
    assert type(trace.noise_norm[0]) is float


def test_finetuning_is_checked() -> None:
    with pytest.raises(InputError, match="learning_rate"):
        FineTuning("SGD", 1, 1, math.nan, 1, "constant", 1)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "format is None"),
        (b'{"format":"expunge-record-1"}', "not a usable record"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_unusable_records_are_named(content, sentence, tmp_path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match=sentence):
        RunRecord.load(path)


@pytest.mark.parametrize("field", ["recipe", "trace", "noise", "execution", "weights_after"])
def test_a_record_with_one_broken_part_is_unusable(field) -> None:
    for value in (3, None, [], {"x": 1}):
        with pytest.raises(CertificateError, match="not a usable record"):
            RunRecord.from_dict(make_record().to_dict() | {field: value})


# --- files


def test_a_failed_write_leaves_what_was_there(tmp_path) -> None:
    path = tmp_path / "x"
    write_atomic(path, b"old")

    def broken():
        yield b"new"
        raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError):
        write_atomic(path, broken())
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"
    with pytest.raises(InputError, match="folder that exists"):
        write_atomic(tmp_path / "no" / "x", b"")


def test_reads_are_limited(tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_limited(tmp_path / "x", 5, "record") == b"12345"
    with pytest.raises(CertificateError, match="larger than 4 bytes"):
        read_limited(tmp_path / "x", 4, "record")
    with pytest.raises(CertificateError, match="is a directory"):
        read_limited(tmp_path, 4, "record")


# --- hashes of weights


def test_weights_hash_golden() -> None:
    assert hash_of(WEIGHTS) == "a9a317d836240c4f4c4ae4d46e4c2ec2bb4c06d9764c0507c213b2324a6ee5ff"


def test_weights_hash_is_the_documented_formula() -> None:
    header = b'["expunge/tensor-1", "w", "F32", [1, 2]]'
    leaf = hashlib.sha256(len(header).to_bytes(8, "little") + header + bytes(8)).digest()
    root = hashlib.sha256(b"expunge/tensors-1\0" + (1).to_bytes(8, "little") + leaf).hexdigest()
    assert hash_tensors([("w", "F32", (1, 2), bytes(8))]) == root


def test_shards_and_chunks_give_one_hash() -> None:
    entries = [(name, *entry) for name, entry in WEIGHTS.items()]
    leaves = [
        hash_leaf(name, dtype, shape, (data[i : i + 3] for i in range(0, len(data), 3)))
        for name, dtype, shape, data in reversed(entries)
    ]
    assert combine_leaves(leaves) == hash_tensors(entries)
    arrays = [(n, d, s, np.frombuffer(b, np.uint8)) for n, d, s, b in entries]
    assert hash_tensors(arrays) == hash_tensors(entries)


@pytest.mark.parametrize(
    "other",
    [
        ("v", "F32", (2, 2), bytes(16)),
        ("w", "I32", (2, 2), bytes(16)),
        ("w", "F32", (4, 1), bytes(16)),
        ("w", "F32", (4,), bytes(16)),
        ("w", "F32", (2, 2), bytes(15) + b"\1"),
    ],
)
def test_name_dtype_shape_and_bytes_all_count(other) -> None:
    assert hash_tensors([other]) != hash_tensors([("w", "F32", (2, 2), bytes(16))])


def test_bad_tensors_are_refused() -> None:
    entry = ("w", "F32", (2,), bytes(8))
    with pytest.raises(InputError, match="unique"):
        hash_tensors([entry, entry])
    with pytest.raises(InputError, match="8 for F32"):
        hash_tensors([("w", "F32", (2,), bytes(7))])
    with pytest.raises(InputError, match="dtype is 'F31'"):
        hash_tensors([("w", "F31", (2,), bytes(8))])


def test_our_file_is_the_file_safetensors_writes(tmp_path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "b": rng.normal(size=(3, 5)).astype("<f4"),
        "a": rng.normal(size=7),
        'ü "quoted"': rng.integers(0, 9, 4),
        "empty": np.zeros((0, 3), "<f4"),
        "scalar": np.array(2.0, "<f2"),
        "flag": np.array([True, False]),
    }
    names = {"float32": "F32", "float64": "F64", "int64": "I64", "float16": "F16", "bool": "BOOL"}
    ours = {name: (names[str(a.dtype)], a.shape, a) for name, a in arrays.items()}
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file(arrays, tmp_path / "theirs", metadata)
        write_safetensors(tmp_path / "ours", ours, metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    expected = hash_tensors((name, *entry) for name, entry in ours.items())
    assert hash_weights(tmp_path / "theirs")[0] == expected
    metadata = {"z": "1", "format": "pt", "a": "é\n"}
    write_safetensors(tmp_path / "ours", ours, metadata)
    with safetensors.safe_open(tmp_path / "ours", "numpy") as file:
        assert file.metadata() == metadata
        assert set(file.keys()) == set(arrays)
        assert all(np.array_equal(file.get_tensor(name), arrays[name]) for name in arrays)


def _file(header: object, data: bytes = b"", raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return len(text).to_bytes(8, "little") + text + data


def _entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0\0",
        (2**63).to_bytes(8, "little") + b"{}",
        _file(None, raw=b"[]"),
        _file(None, raw=b"\xff\xfe"),
        _file(None, raw=b'{"w"'),
        _file(None, raw=b"[" * 50_000),
        _file({"w": _entry()}, bytes(7)),
        _file({"w": _entry()}, bytes(9)),
        _file({"w": _entry(offsets=(8, 16))}, bytes(16)),
        _file({"w": _entry(offsets=(0, 9))}, bytes(9)),
        _file({"w": _entry(offsets=(-8, 0))}),
        _file({"w": _entry(offsets=(8, 0))}),
        _file({"w": _entry(dtype="F31")}, bytes(8)),
        _file({"w": _entry(shape=(-1, -2))}, bytes(8)),
        _file({"w": _entry(shape=(True, 2))}, bytes(8)),
        _file({"w": _entry(shape="2")}, bytes(8)),
        _file({"w": _entry(shape=(2.0,))}, bytes(8)),
        _file({"w": {**_entry(), "extra": 1}}, bytes(8)),
        _file({"w": {"dtype": "F32"}}, bytes(8)),
        _file({"w": 3}),
        _file({"a": _entry(), "b": _entry()}, bytes(8)),
        _file({"__metadata__": {"a": 1}}),
        _file({"__metadata__": [], "w": _entry()}, bytes(8)),
        _file(
            None, bytes(8), b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":'
            b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        ),
    ],
)  # fmt: skip
def test_malformed_weights_are_refused(content, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match="weights"):
        hash_weights(path)


def test_missing_weights_are_named() -> None:
    with pytest.raises(CertificateError, match="no such file"):
        hash_weights(Path("/nowhere/model.safetensors"))


def test_bad_writes_leave_nothing(tmp_path) -> None:
    for tensors in ({"w": ("F32", (3,), bytes(8))}, {"__metadata__": ("F32", (2,), bytes(8))}):
        with pytest.raises(InputError):
            write_safetensors(tmp_path / "m", tensors)
    assert list(tmp_path.iterdir()) == []
