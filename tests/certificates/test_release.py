"""Releases: what is written, what may be changed, and what comes before."""

import stat
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.people import commit
from expunge.certificates.record import Record
from expunge.certificates.release import read_parent
from expunge.certificates.verification import verify
from expunge.errors import InputError
from tests.helpers.sample_releases import CREATED, LATER, save_chain, save_release


def test_a_release_is_a_folder(tmp_path) -> None:
    release = save_release(tmp_path / "run")
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "model.safetensors", "config.json", "certificate.json", "record.json",
    }  # fmt: skip
    assert Record.load(run / "record.json") == release.record
    assert Certificate.load(run / "certificate.json") == release.certificate
    assert stat.S_IMODE((run / "record.json").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "and nothing beside it"


def halve(tensors):
    return {name: array / 2 for name, array in tensors.items()}


def test_apply_is_recorded_and_certified_again(tmp_path) -> None:
    release = save_release(tmp_path / "run", "gradient-clipping")
    one = release.apply(halve, "halved")
    two = one.apply(lambda tensors: tensors.update({"layer.bias": np.ones(3)}), "a new bias")
    assert [step.note for step in two.record.applied] == ["halved", "a new bias"]
    assert two.record.applied[0].before == release.certificate.weights.after
    assert two.certificate.weights.after == hash_tensors(two.tensors)
    assert two.certificate.epsilon == release.certificate.epsilon
    two.save(tmp_path / "two")
    found = verify(tmp_path / "two")
    assert "applied to the released tensors alone: a new bias" in found.certificate.statement()


@pytest.mark.parametrize("note", ["", "  ", "two\nlines", None, "\x1b[2J"])
def test_a_note_is_a_few_words(note, tmp_path) -> None:
    release = save_release(tmp_path / "run")
    with pytest.raises(InputError, match="note is"):
        release.apply(halve, note)


def test_what_a_state_does_runs_around_the_writing(tmp_path) -> None:
    seen = []

    @contextmanager
    def saving(folder, certificate):
        seen.append((folder, certificate, folder.exists()))
        yield
        seen.append(folder.exists())

    release = replace(save_release(tmp_path / "run"), saving=saving)
    release.apply(halve, "halved").save(tmp_path / "two")
    written = (tmp_path / "two" / "certificate.json").read_bytes()
    assert seen == [(tmp_path / "two", written, False), True]


def test_noisy_runs_of_one_old_model_are_counted(tmp_path) -> None:
    release = save_release(tmp_path / "first", "gradient-clipping")
    release.save(tmp_path / "copy")
    release.apply(halve, "halved").save(tmp_path / "applied")
    other = {"weights": release.record.weights.model_copy(update={"noisy": "1" * 64})}
    record = release.record.model_copy(update=other)
    with pytest.raises(InputError, match=r"noisy run of the same old model; .* give releases=2"):
        replace(release, record=record, certificate=certify(record)).save(tmp_path / "second")
    both = replace(release, record=record, certificate=certify(record, releases=2))
    both.save(tmp_path / "second")
    assert verify(tmp_path / "second").certificate.releases == 2
    replace(release, record=record, certificate=certify(record)).save(tmp_path / "far" / "second")


# --- the release before
def test_a_parent_is_a_release_a_folder_or_a_certificate(tmp_path) -> None:
    first, second = save_chain(tmp_path)
    folder = tmp_path / "second"
    for given in (second, folder, str(folder), folder / "certificate.json"):
        before = read_parent(given, LATER)
        assert before.certificate == second.certificate
        assert before.record == second.record
        assert before.find_returned(["zoe", "ann", "cy"]) == ["ann", "cy"], "all requests so far"
    alone = read_parent(first.certificate, LATER)
    assert alone.record is None
    assert alone.find_returned(["ann"]) == []
    assert read_parent(None, LATER) is None
    with pytest.raises(InputError, match="parent is 3"):
        read_parent(3, LATER)


def test_a_wrong_clock_is_refused_before_anything_is_trained(tmp_path) -> None:
    release = save_release(tmp_path / "run", created=LATER)
    with pytest.raises(InputError, match=r"clock says .*, before its parent was created"):
        read_parent(release, CREATED)
    with pytest.raises(InputError, match="more than 5 years"):
        read_parent(tmp_path / "run", "2035-01-01T00:00:00+00:00")


def test_requests_of_a_parent_are_in_its_record(tmp_path) -> None:
    first, second = save_chain(tmp_path)
    before = read_parent(second, LATER)
    assert before.requests == (first.record.forget, second.record.forget)
    assert commit(["cy"], 2, salt=second.record.forget.salt).root == before.requests[1].root
