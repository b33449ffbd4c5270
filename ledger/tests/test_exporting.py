"""The evidence: a zip that explains itself, and says nothing about others."""

import io
import json
import zipfile
from pathlib import Path

import expunge
from expunge_ledger import Ledger
from expunge_ledger.chain import digest_body, hash_event


def read(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_evidence_about_a_person(ledger: Ledger, tmp_path: Path) -> None:
    for names in (("person-1",), ("person-2", "person-3")):
        for name in names:
            ledger.request(name)
        ledger.work()
    files = read(ledger.export("person-2"))
    first, second = ledger.models("shop")[0].releases
    assert (first.parent, second.parent) == (None, first.certificate)
    assert (first.requests, second.requests) == ((1,), (2, 3))
    chained = f"shop/0002/chain/{first.certificate[:16]}.json"
    assert set(files) == {
        "README.txt", "anchor.json", "events.json", "requests.json", "shop/0002/certificate.json",
        chained,
    }  # fmt: skip
    (tmp_path / "c.json").write_bytes(files["shop/0002/certificate.json"])
    (tmp_path / "p.json").write_bytes(files[chained])
    weights = second.directory / "model.safetensors"
    found = expunge.verify(tmp_path / "c.json", weights, parent=tmp_path / "p.json")
    assert found.certificate.forget.count == 2
    events = json.loads(files["events.json"])
    assert [one["kind"] for one in events] == ["requested", "begun", "released"]
    for one in events:
        given = (one["number"], one["at"], one["kind"], one["digest"])
        assert hash_event(one["previous"], *given) == one["hash"]
        assert ledger.events()[one["number"] - 1].hash == one["hash"]
    assert digest_body(events[0]["salt"], events[0]["body"]) == events[0]["digest"]
    assert "body" not in events[1], "others are named in it, and where the release lies"
    assert json.loads(files["requests.json"])[0]["number"] == 2
    assert b"Request 2: received" in files["README.txt"]
    import platform

    for name, data in files.items():
        for secret in ("person-", str(tmp_path), platform.node()):
            assert secret.encode() not in data, (name, secret)
    numbers = [one.get("body", {}).get("request") for one in events]
    assert 3 not in numbers


def test_an_open_request_is_exported_too(small: Ledger) -> None:
    small.request("person-1")
    files = read(small.export("person-1"))
    assert set(files) == {"README.txt", "anchor.json", "events.json", "requests.json"}
