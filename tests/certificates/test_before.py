"""Certificates and records of version 0.1.0 hold for ever, and not with one byte changed."""

import hashlib
import shutil
from pathlib import Path

import pytest

from expunge.certificates.record import RunRecord
from expunge.certificates.schema import SCHEMA_PATH
from expunge.certificates.verification import verify, verify_chain
from expunge.errors import CertificateError, VerificationError

BEFORE = Path(__file__).parents[1] / "data" / "before"
NAMES = sorted(path.name for path in BEFORE.iterdir())
FIRST, SECOND = (BEFORE / name / "certificate.json" for name in ("chain-first", "chain-second"))


def test_every_method_is_here() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_a_certificate_of_before_holds_with_weights_and_record(name) -> None:
    folder = BEFORE / name
    found = verify(folder / "certificate.json", record=folder / "record.json")
    assert found.schema_version == 1
    assert found.to_bytes() == (folder / "certificate.json").read_bytes()
    record = RunRecord.load(folder / "record.json")
    assert record.to_bytes() == (folder / "record.json").read_bytes()
    assert record.digest() == found.record


def test_a_chain_of_before_holds() -> None:
    assert [c.schema_version for c in verify_chain([FIRST, SECOND])] == [1, 1]
    verify(SECOND, parent=FIRST, record=SECOND.with_name("record.json"))
    with pytest.raises(VerificationError, match="parent"):
        verify(FIRST, parent=SECOND)


@pytest.mark.parametrize("file", ["certificate.json", "record.json", "model.safetensors"])
@pytest.mark.parametrize("name", NAMES)
def test_one_changed_byte_does_not_hold(name, file, tmp_path) -> None:
    shutil.copytree(BEFORE / name, tmp_path, dirs_exist_ok=True)
    raw = bytearray((tmp_path / file).read_bytes())
    place = len(raw) * 2 // 3
    raw[place] ^= 1
    (tmp_path / file).write_bytes(bytes(raw))
    with pytest.raises((VerificationError, CertificateError)):
        verify(tmp_path / "certificate.json", record=tmp_path / "record.json")


def test_the_published_schema_of_version_1_stays() -> None:
    digest = hashlib.sha256(SCHEMA_PATH.with_name("certificate-1.json").read_bytes()).hexdigest()
    assert digest == "f5e1cbdef4c93f947c79f7f7ff15bd647a8c9c6cb7b8711080fd89e9c5329258"
