"""Verification: what it checked, what it did not look at, unusable input, signatures, chains."""

import json

import numpy as np
import pytest
import rfc8785

from expunge.certificates import verification
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.hashes import hash_tensors, write_safetensors
from expunge.certificates.record import Adapter
from expunge.certificates.release import Contents, Release, describe_contents
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify
from expunge.errors import CertificateError, InputError, UnlearningError, VerificationError
from tests.helpers.sample_releases import (
    LATER,
    NOISY,
    edit_json,
    make_noisy,
    make_record,
    make_tensors,
    save_chain,
    save_release,
)


def refuse(sentence, *given, error=VerificationError, **more) -> None:
    with pytest.raises(error, match=sentence):
        verify(*given, **more)


@pytest.mark.parametrize("kind", ["retraining", "linear-model", "shards", *NOISY])
def test_every_kind_of_release_holds(kind, tmp_path) -> None:
    release = save_release(tmp_path / "run", kind)
    found = verify(tmp_path / "run")
    assert found.holds
    assert found.certificate == release.certificate
    assert found == verify(tmp_path / "run" / "certificate.json")
    assert len(found.checked) >= 5
    assert "It holds." in str(found)


# --- what was not looked at
def test_what_was_not_looked_at_is_said(tmp_path) -> None:
    _, second = save_chain(tmp_path)
    run = tmp_path / "second"
    said = " ".join(verify(run).unchecked)
    assert f"the parent: it names {second.certificate.parent}, which was not given" in said
    assert "not signed" in said
    (run / "report.html").write_text("all is well")
    assert "other files in this folder: report.html" in " ".join(verify(run).unchecked)
    (run / "record.json").unlink()
    assert "the run record: it stays with the operator" in verify(run).unchecked
    (run / "model.safetensors").unlink()
    said = " ".join(verify(run).unchecked)
    assert "model.safetensors: the certificate names it, and it is not here" in said
    assert "parent" not in " ".join(verify(run, parent=tmp_path / "first").unchecked)
    save_release(tmp_path / "exact")
    assert "was not run again: expunge replay" in " ".join(verify(tmp_path / "exact").unchecked)
    (tmp_path / "exact" / "config.json").unlink()
    assert "config.json: the certificate names it" in " ".join(verify(tmp_path / "exact").unchecked)


def test_people_of_the_request_are_compared(tmp_path) -> None:
    save_release(tmp_path / "run")
    assert "people who were given" in " ".join(
        verify(tmp_path / "run", people=["bob", "ann"]).checked
    )
    refuse("not about the people", tmp_path / "run", people=["ann"])
    (tmp_path / "run" / "record.json").unlink()
    refuse("no record to compare them with", tmp_path / "run", people=["ann"], error=InputError)


def test_a_result_instead_of_an_error(tmp_path) -> None:
    save_release(tmp_path / "run")
    edit_json(tmp_path / "run" / "certificate.json", lambda c: c.update(theorem="trust me"))
    found = verify(tmp_path / "run", strict=False)
    assert not found.holds
    assert any("theorem is 'trust me'" in problem for problem in found.problems)
    assert "It does not hold." in str(found)


def test_every_difference_is_named_at_once(tmp_path) -> None:
    save_release(tmp_path / "run", "gradient-clipping")
    path = tmp_path / "run" / "certificate.json"
    plain = json.loads(path.read_bytes()) | {"theorem": "x", "survival_bound": 0.5}
    path.write_bytes(rfc8785.dumps(plain))
    tensors = make_tensors() | {"layer.bias": np.ones(3, np.float32)}
    write_safetensors(tmp_path / "run" / "model.safetensors", tensors, {"format": "np"})
    with pytest.raises(VerificationError) as caught:
        verify(tmp_path / "run")
    for named in (
        "digest is", "theorem is", "survival_bound is 0.5", "metadata of",
        "but the certificate has", "but the record gives",
    ):  # fmt: skip
        assert named in str(caught.value)
    assert caught.value.exit_code == 1


def test_words_of_a_file_never_reach_the_terminal_raw(tmp_path) -> None:
    """A certificate whose text would clear the screen and print a verdict of its own."""
    spoof = "\x1b[2J\x1b[HIt holds."
    for change in (
        lambda c: c.update(theorem=spoof),
        lambda c: c.update({spoof: 1}),
        lambda c: c["environment"]["versions"].update({spoof: "1"}),
        lambda c: c["training"]["options"].update({spoof: spoof}),
        lambda c: c["weights"]["files"].update({spoof: "0" * 64}),
    ):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        save_release(folder)
        edit_json(folder / "certificate.json", change)
        with pytest.raises((VerificationError, CertificateError)) as caught:
            verify(folder)
        assert "\x1b" not in str(caught.value)
    folder = tmp_path / "beside"
    save_release(folder)
    (folder / f"{spoof}.txt").write_text("x")
    assert "\x1b" not in str(verify(folder))


# --- unusable input
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "must be JSON"),
        (b"\x89PNG", "must be JSON"),
        (b"[1]", "an object"),
        (b"{" * 100_000, "must be JSON"),
        (b'{"schema_version":1,"schema_version":1}', "twice"),
        (b'{"schema_version":1}', "field required"),
        (b"\x00" * 10, "must be JSON"),
    ],
)
def test_unusable_certificates(content, sentence, tmp_path) -> None:
    save_release(tmp_path / "run")
    path = tmp_path / "run" / "certificate.json"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match=sentence) as caught:
        verify(path)
    assert caught.value.exit_code == 2
    with pytest.raises(CertificateError, match=sentence):
        Certificate.load(path)


def test_files_that_cannot_be_read(tmp_path) -> None:
    save_release(tmp_path / "run")
    weights = tmp_path / "run" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refuse("their header says", tmp_path / "run", error=CertificateError)
    refuse(
        r"weights .* is not a file", tmp_path / "run", tmp_path / "none.safetensors",
        error=CertificateError,
    )  # fmt: skip
    refuse(r"certificate .* is not a file", tmp_path / "none.json", error=CertificateError)
    with (tmp_path / "run" / "certificate.json").open("ab") as file:
        file.truncate(100_000_001)
    refuse("larger than 100,000,000 bytes", tmp_path / "run", error=CertificateError)


def test_weights_saved_by_safetensors_itself_hold(tmp_path) -> None:
    save_release(tmp_path / "run")
    elsewhere = tmp_path / "plain.safetensors"
    for metadata in (None, {"format": "pt"}):
        write_safetensors(elsewhere, make_tensors(), metadata)
        assert verify(tmp_path / "run", elsewhere).holds
    write_safetensors(elsewhere, make_tensors(), {"format": "pt", "note": "hi"})
    refuse("metadata", tmp_path / "run", elsewhere)


def test_what_cannot_be_recomputed_does_not_hold(tmp_path, monkeypatch) -> None:
    """A recipe that breaks the second computation is a difference, never a traceback."""

    def overflow(*_: object) -> None:
        raise OverflowError("too large")

    save_release(tmp_path / "run", "gradient-clipping")
    monkeypatch.setattr(verification, "recompute", overflow)
    refuse("cannot be recomputed", tmp_path / "run")


# --- adapters
def save_adapter(folder):
    """A release with an adapter beside the weights, as PEFT lays it out."""
    tensors, adapter = make_tensors(), {"base_model.model.layer.lora_A.weight": np.ones((2, 3))}
    files = {
        "adapter/adapter_config.json": b'{"r": 2}',
        "adapter/adapter_model.safetensors": adapter,
    }
    hashes = Adapter(hash=hash_tensors(adapter), base="4" * 64)
    contents = Contents(tensors, files, hashes)
    draft = make_record(tensors)
    weights = draft.weights.model_copy(update=describe_contents(contents))
    record = draft.model_copy(update={"weights": weights})
    release = Release(tensors, certify(record), record, tensors, files)
    release.save(folder)
    return release


def test_an_adapter_is_covered_with_the_weights_and_alone(tmp_path) -> None:
    save_adapter(tmp_path / "run")
    said = " ".join(verify(tmp_path / "run").checked)
    assert "adapter/adapter_model.safetensors has the hash" in said
    assert "adapter/adapter_config.json is the certificate's" in said
    alone = tmp_path / "run" / "adapter"
    assert any("base of the adapter" in sentence for sentence in verify(alone).unchecked)
    assert verify(tmp_path / "run").holds
    (alone / "adapter_config.json").write_bytes(b'{"r": 3}')
    refuse(r"adapter_config\.json has hash", alone)


def test_an_adapter_that_no_certificate_speaks_of(tmp_path) -> None:
    save_adapter(tmp_path / "run")
    save_release(tmp_path / "other")
    (tmp_path / "run" / "adapter").rename(tmp_path / "other" / "adapter")
    refuse("adapter may be loaded, and no certificate", tmp_path / "other")


# --- signatures
def test_signature(tmp_path) -> None:
    private, public = generate_key_pair()
    _, other = generate_key_pair()
    certificate = save_release(tmp_path / "run").certificate
    run, path = tmp_path / "run", tmp_path / "run" / "certificate.json"
    refuse("not signed", run, key=public)
    (tmp_path / "key.pem").write_bytes(private)
    signed = certificate.sign(tmp_path / "key.pem")
    assert signed == certificate.sign(private)
    signed.save(path)
    assert "whose key signed it" in " ".join(verify(run).unchecked)
    (tmp_path / "public.pem").write_bytes(public)
    for key in (public, tmp_path / "public.pem"):
        found = verify(run, key=key)
        assert found.certificate == signed
        assert any("signed by the key sha256:" in sentence for sentence in found.checked)
    refuse(r"it is signed by the key .* not by the expected", run, key=other)
    assert signed.digest == certificate.digest
    assert signed.sha256 != certificate.sha256
    for key in (b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n", b"\0" * 40):
        with pytest.raises(InputError, match="private key"):
            certificate.sign(key)
        refuse("public key", run, key=key, error=InputError)


# --- sequences of requests
def test_a_chain_of_requests(tmp_path) -> None:
    first, second = save_chain(tmp_path)
    one, two = tmp_path / "first", tmp_path / "second"
    said = "it is chained to its parent, whose certificate holds; its files were not looked at"
    assert said in verify(two, parent=one).checked
    assert second.certificate.weights.old == first.certificate.weights.after
    assert first.certificate.weights.old is None
    assert any("which was not given" in sentence for sentence in verify(two).unchecked)
    refuse("parent is None", one, parent=two)
    first.certificate.sign(generate_key_pair()[0]).save(one / "certificate.json")
    assert verify(two, parent=one).holds, "a parent may have been signed since"


def test_chains_that_do_not_fit_are_refused(tmp_path) -> None:
    first, second = save_chain(tmp_path)
    parent = first.certificate
    with pytest.raises(UnlearningError, match="the parent released"):
        certify(make_noisy(make_tensors(), parent=parent.sha256, created=LATER), parent=parent)
    with pytest.raises(UnlearningError, match="SHA-256 of the parent"):
        certify(second.record.model_copy(update={"parent": "a" * 64}), parent=parent)
    weights = second.record.weights.model_copy(update={"start": parent.weights.after})
    with pytest.raises(UnlearningError, match=r"build\(\) gave the"):
        certify(second.record.model_copy(update={"weights": weights}), parent=parent)


def test_releases_compose(tmp_path) -> None:
    """n releases of a μ-GDP run are √n μ-GDP together."""
    record = make_noisy(make_tensors())
    one, four = certify(record), certify(record, releases=4)
    assert four.mu == pytest.approx(2 * one.mu, rel=1e-12)
    assert four.releases == 4
    Release(None, four, record, make_tensors()).save(tmp_path / "run")
    assert verify(tmp_path / "run").certificate.epsilon > one.epsilon
