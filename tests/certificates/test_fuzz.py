"""Any changed byte in certificate or weights makes verification fail."""

import random
from pathlib import Path

import pytest

from expunge.certificates.certificate import Certificate
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify
from expunge.errors import CertificateError, VerificationError
from handmade import OUTPUT, make_run

FAILS = VerificationError, CertificateError


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, bytes, bytes]:
    """(certificate path, certificate bytes, weights bytes) of a signed run that holds."""
    folder = tmp_path_factory.mktemp("run")
    path, certificate = make_run(folder, OUTPUT)
    certificate.sign(generate_key_pair()[0]).save(path)
    verify(path)
    return path, path.read_bytes(), (folder / "model.safetensors").read_bytes()


@pytest.fixture
def attempt(tmp_path):
    """Verify a pair of files: True if it holds, False if it fails as it should."""

    def check(certificate: bytes, weights: bytes) -> bool:
        (tmp_path / "certificate.json").write_bytes(certificate)
        (tmp_path / "model.safetensors").write_bytes(weights)
        try:
            found = verify(tmp_path / "certificate.json")
        except FAILS:
            return False
        assert isinstance(found, Certificate)
        return True

    return check


def flip(data: bytes, place: int, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[place] ^= rng.randrange(1, 256)
    return bytes(changed)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One edit that is not the identity: replace, insert, delete, swap, repeat or cut."""
    place, width = rng.randrange(len(data)), rng.randrange(1, 9)
    match rng.randrange(6):
        case 0:
            found = data[:place] + rng.randbytes(width) + data[place + width :]
        case 1:
            found = data[:place] + rng.choice([b" ", b"\n", b"0", b",", b"\0"]) + data[place:]
        case 2:
            found = data[:place] + data[place + width :]
        case 3:
            end = place + width
            found = data[:place] + data[end : end + width] + data[place:end] + data[end + width :]
        case 4:
            found = data[: place + width] + data[place:]
        case _:
            found = data[:place]
    return found if found != data else data + b"\0"


def test_untouched_files_hold(run, attempt) -> None:
    assert attempt(run[1], run[2])


@pytest.mark.slow
def test_every_byte_of_the_weights_counts(run, attempt) -> None:
    """Length, header (padding included), metadata and data: all positions."""
    rng = random.Random(1)
    held = [p for p in range(len(run[2])) if attempt(run[1], flip(run[2], p, rng))]
    assert held == []


@pytest.mark.slow
def test_every_byte_of_the_certificate_counts(run, attempt) -> None:
    rng = random.Random(2)
    held = [p for p in range(len(run[1])) if attempt(flip(run[1], p, rng), run[2])]
    assert held == []


@pytest.mark.slow
def test_changed_digits_of_the_certificate(run, attempt) -> None:
    """Digits for digits: the file stays JSON of the right shape."""
    rng = random.Random(3)
    digits = [p for p, byte in enumerate(run[1]) if chr(byte).isdigit()]
    held = []
    for place in rng.sample(digits, 250):
        other = rng.choice([d for d in b"0123456789" if d != run[1][place]])
        if attempt(run[1][:place] + bytes([other]) + run[1][place + 1 :], run[2]):
            held.append(place)
    assert held == []


@pytest.mark.parametrize("which", [1, 2], ids=["certificate", "weights"])
def test_random_edits(which, run, attempt) -> None:
    rng = random.Random(which)
    for _ in range(300):
        pair = [run[1], run[2]]
        pair[which - 1] = mutate(pair[which - 1], rng)
        assert not attempt(*pair)


@pytest.mark.parametrize("which", [1, 2], ids=["certificate", "weights"])
def test_truncated_and_extended(which, run, attempt) -> None:
    size = len(run[which])
    for data in (
        *(run[which][:end] for end in (0, 1, 7, 8, 9, 100, size // 2, size - 1)),
        *(run[which] + tail for tail in (b"\0", b" ", b"\n", b"}", b"\0" * 4096)),
    ):
        pair = [run[1], run[2]]
        pair[which - 1] = data
        assert not attempt(*pair)


def test_another_runs_certificate_or_weights(run, attempt, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    path, _ = make_run(other, OUTPUT, gradient_evaluations=1)
    assert attempt(path.read_bytes(), (other / "model.safetensors").read_bytes())
    assert not attempt(path.read_bytes(), run[2])
    assert not attempt(run[1], (other / "model.safetensors").read_bytes())
