"""Attempts on keys and signatures: stripped, borrowed, made with another key or with no key."""

import json
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.hashing import write_safetensors
from expunge.certificates.signing import fingerprint, generate_key_pair, read_public_key
from expunge.certificates.verification import verify
from expunge.errors import VerificationError
from expunge.reports.signing import sign_run
from handmade import WEIGHTS, hash_of, make_record, make_run
from job_folder import call, list_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory that is not signed, beside a key pair."""
    folder = tmp_path / "run"
    folder.mkdir()
    make_run(folder)
    assert call("keygen", tmp_path / "key.pem").returncode == 0
    return folder


def read(folder: Path) -> Certificate:
    return Certificate.load(folder / "certificate.json")


def test_a_run_is_signed_and_its_key_is_named(run: Path) -> None:
    key, public = run.parent / "key.pem", run.parent / "key.pem.pub"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = list_files(run)
    said = call("sign", run, "--key", key)
    name = fingerprint(read_public_key(public))
    assert (said.returncode, said.stdout) == (0, f"{run}: signed by {name}\n")
    after = list_files(run)
    assert {n for n in after if after[n] != before.get(n)} <= {"certificate.json", "report.html"}
    assert read(run).digest == read(run).compute_digest()
    expected = call("verify", run, "--key", public)
    assert expected.returncode == 0
    assert expected.stdout.splitlines()[0].endswith(f"; signed by {name}, the expected key")
    assert call("verify", run, "--public-key", public).stdout == expected.stdout
    anybody = call("verify", run)
    assert anybody.returncode == 0
    assert f"signed by {name}, not compared with an expected key" in anybody.stdout
    told = json.loads(call("verify", run, "--json", "--key", public).stdout)
    assert told["key"] == f"signed by {name}, the expected key"
    again = (run / "certificate.json").read_bytes()
    assert call("sign", run, "--key", key).returncode == 0
    assert (run / "certificate.json").read_bytes() == again, "the same signature"


def test_a_signature_that_was_stripped_is_missed(run: Path) -> None:
    sign_run(run, run.parent / "key.pem")
    stripped = read(run).model_copy(update={"signature": None})
    stripped.save(run / "certificate.json")
    said = call("verify", run, "--key", run.parent / "key.pem.pub")
    assert said.returncode == 1
    assert "it is not signed, but a public key was given" in said.stderr
    assert "; not signed" in call("verify", run).stdout


def test_another_key_is_not_the_expected_one(run: Path) -> None:
    private, public = generate_key_pair()
    (run.parent / "other.pub").write_bytes(public)
    sign_run(run, private)
    said = call("verify", run, "--key", run.parent / "key.pem.pub")
    assert said.returncode == 1
    assert fingerprint(read_public_key(public)) in said.stderr
    assert "not by the expected sha256:" in said.stderr
    before = list_files(run)
    again = call("sign", run, "--key", run.parent / "key.pem")
    assert again.returncode == 2
    assert "is signed already, by sha256:" in again.stderr
    assert list_files(run) == before


def test_the_signature_of_another_certificate_is_none(run: Path, tmp_path: Path) -> None:
    sign_run(run, run.parent / "key.pem")
    other = tmp_path / "other"
    other.mkdir()
    make_run(other)
    certificate = certify(make_record(weights_before="c" * 64), delta=2e-5)
    borrowed = certificate.model_copy(update={"signature": read(run).signature})
    borrowed.save(other / "certificate.json")
    write_safetensors(other / "model.safetensors", WEIGHTS, borrowed.safetensors_metadata())
    with pytest.raises(VerificationError, match="the signature does not match the certificate"):
        verify(other, public_key=run.parent / "key.pem.pub")


def test_what_does_not_hold_is_not_signed(run: Path) -> None:
    weights = run / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    before = list_files(run)
    said = call("sign", run, "--key", run.parent / "key.pem")
    assert said.returncode == 1
    assert "have hash" in said.stderr
    assert list_files(run) == before


def make_keys(folder: Path) -> dict[str, bytes]:
    own, form = Ed25519PrivateKey.generate(), (Encoding.PEM, PrivateFormat.PKCS8)
    return {
        "a public key": generate_key_pair()[1],
        "encrypted": own.private_bytes(*form, BestAvailableEncryption(b"secret")),
        "RSA": rsa.generate_private_key(65537, 2048).private_bytes(*form, NoEncryption()),
        "P-256": ec.generate_private_key(ec.SECP256R1()).private_bytes(*form, NoEncryption()),
        "truncated": generate_key_pair()[0][:60],
        "empty": b"",
        "binary": bytes(range(256)) * 10,
    }


def test_keys_that_cannot_sign_are_one_sentence(run: Path) -> None:
    before = list_files(run)
    for what, pem in make_keys(run).items():
        (run.parent / "bad.pem").write_bytes(pem)
        said = call("sign", run, "--key", run.parent / "bad.pem")
        assert said.returncode == 2, what
        assert said.stderr.count("\n") == 1, what
        assert "private key" in said.stderr, what
        assert "an Ed25519 key in PEM format" in said.stderr, what
        told = call("verify", run, "--key", run.parent / "bad.pem")
        assert told.returncode == (1 if what == "a public key" else 2), what
        assert told.stderr.count("\n") == 1, what
    for path in (run, run.parent / "nowhere.pem", "/dev/null"):
        said = call("sign", run, "--key", path)
        assert (said.returncode, said.stderr.count("\n")) == (2, 1), path
    assert list_files(run) == before


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    assert call("keygen", key).returncode == 0
    before = list_files(tmp_path)
    for place in (key, tmp_path / "key.pem.pub"):
        said = call("keygen", place)
        assert said.returncode == 2
        assert "a key is never overwritten" in said.stderr
    (tmp_path / "beside.pub").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place in ("beside", "link"):
        assert call("keygen", tmp_path / place).returncode == 2
    for place in (tmp_path / "none" / "key", key / "key", tmp_path):
        said = call("keygen", place)
        assert (said.returncode, said.stderr.count("\n")) == (2, 1)
    now = list_files(tmp_path)
    assert now == before | {"beside.pub": now["beside.pub"]}
    assert not os.path.lexists(tmp_path / "elsewhere")


@pytest.mark.parametrize("place", ["nowhere", "key.pem", "empty"])
def test_what_is_no_run_directory_is_not_signed(run: Path, place: str) -> None:
    (run.parent / "empty").mkdir()
    said = call("sign", run.parent / place, "--key", run.parent / "key.pem")
    assert (said.returncode, said.stderr.count("\n")) == (2, 1)


def test_a_parent_may_be_signed_later_and_not_be_changed(run: Path, tmp_path: Path) -> None:
    parent, child = read(run), tmp_path / "child"
    child.mkdir()
    record = make_record(weights_before=parent.weights.after, weights_after=hash_of(WEIGHTS))
    certificate = certify(record, delta=1e-5, parent=parent)
    certificate.save(child / "certificate.json")
    write_safetensors(child / "model.safetensors", WEIGHTS, certificate.safetensors_metadata())
    verify(child, parent=run)
    sign_run(run, run.parent / "key.pem")
    verify(child, parent=run)
    grandchild = certify(
        make_record(weights_before=read(run).weights.after), delta=1e-5, parent=read(run)
    )
    assert grandchild.parent == read(run).sha256
    read(run).model_copy(update={"signature": None}).save(run / "certificate.json")
    grandchild.save(child / "certificate.json")
    with pytest.raises(VerificationError, match="SHA-256 of the parent is"):
        verify(child, parent=run)
