"""The evidence: a zip that explains itself, and says nothing about others."""

import io
import json
import zipfile
from pathlib import Path

import pytest

import expunge
from expunge.ledger.chain import hash_event


def read(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_evidence_about_a_person(ledger: expunge.Ledger, tmp_path: Path) -> None:
    for name in ("person-1", "person-2"):
        ledger.request(name)
        ledger.work()
    files = read(ledger.export("person-2"))
    assert set(files) == {
        "README.txt", "anchor.json", "events.json", "requests.json",
        "shop/0002/certificate.json", "shop/0002/report-public.html", "shop/0002/chain/0001.json",
    }  # fmt: skip
    weights = ledger.models("shop")[0].releases[1].directory / "model.safetensors"
    path = tmp_path / "certificate.json"
    path.write_bytes(files["shop/0002/certificate.json"])
    parent = tmp_path / "parent.json"
    parent.write_bytes(files["shop/0002/chain/0001.json"])
    assert expunge.verify(path, weights, parent=parent).data.forget.count == 1
    for event in json.loads(files["events.json"]):
        told = (event["number"], event["at"], event["kind"], event["body"])
        assert hash_event(event["previous"], *told) == event["hash"]
        assert ledger.events()[event["number"] - 1].hash == event["hash"]
    kinds = [event["kind"] for event in json.loads(files["events.json"])]
    assert kinds == ["requested", "taken", "begun", "released", "answered"]
    assert json.loads(files["requests.json"])[0]["number"] == 2
    assert b"Request 2: received" in files["README.txt"]
    for data in files.values():
        assert b"person-1" not in data
        assert str(tmp_path).encode() not in data or b"begun" in data


def test_nobody_is_no_evidence(small: expunge.Ledger) -> None:
    with pytest.raises(expunge.InputError, match="has no request in this ledger"):
        small.export("person-1")


def test_an_open_request_is_exported_too(small: expunge.Ledger) -> None:
    small.request("person-1")
    files = read(small.export("person-1"))
    assert set(files) == {"README.txt", "anchor.json", "events.json", "requests.json"}


def test_a_certificate_that_does_not_hold_is_not_handed_out(small: expunge.Ledger) -> None:
    small.request("person-1")
    small.work()
    path = small.models("shop")[0].releases[0].directory / "certificate.json"
    path.write_bytes(path.read_bytes().replace(b'"cpu"', b'"gpu"'))
    with pytest.raises(expunge.VerificationError, match="is not the certificate that the ledger"):
        small.export("person-1")
