"""An adversary who edits what later runs, replays and loads read: parents, records, other files."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import expunge
from expunge.certificates.certificate import Certificate, complete
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.people import commit
from expunge.certificates.record import Adapter, Weights
from expunge.certificates.release import Contents, describe_contents
from expunge.certificates.signing import generate_key_pair
from expunge.errors import CertificateError, InputError, VerificationError
from expunge.report.page import write_report
from tests.helpers.job_folder import refuse, succeed
from tests.helpers.sample_releases import (
    LATER,
    edit_json,
    load,
    make_noisy,
    make_record,
    make_release,
    make_shards,
    make_tensors,
    save_chain,
    save_release,
)

NAMES = [f"user-{n % 10}" for n in range(40)]
INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = expunge.Data((INPUTS, (INPUTS[:, 0] > 0).long()), ids=NAMES)
LEFT = DATA.without(["user-3"])


def build() -> nn.Module:
    return nn.Linear(4, 2)


def train(model: nn.Module, examples: Any, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    release = expunge.retrain(build, DATA, forget=["user-3"], train=train)
    release.save(folder / "run")
    release.apply(lambda model: model.half(), "float16").save(folder / "half")
    return folder


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs")) / "run"


def write_weights(run: Path, change: Any) -> None:
    tensors = {
        name: change(tensor) for name, tensor in load_file(run / "model.safetensors").items()
    }
    save_file(tensors, run / "model.safetensors", {"format": "pt"})


# --- replay
def test_replay_of_weights_that_are_not_the_certificates(run) -> None:
    """Trained on everybody, and the record that names who left taken away."""
    everybody = expunge.Data(DATA.examples, ids=[*NAMES[:-1], "nobody"])
    cheat = expunge.retrain(build, everybody, forget=["nobody"], train=train)
    seen = expunge.Data(DATA.examples[:], ids=NAMES)
    (run / "record.json").unlink()
    save_file(dict(cheat.tensors), run / "model.safetensors", {"format": "pt"})
    said = str(expunge.replay(run, build, seen, train=train))
    assert "the data are others: 40 examples of 10 people, the run had 36 of 9" in said
    assert "the released weights have the hash" in said


def test_replay_of_an_applied_release_reads_its_file(run) -> None:
    half = run.parent / "half"
    assert expunge.replay(half, build, DATA, train=train).same
    write_weights(half, lambda tensor: tensor * 0 + 7)
    found = expunge.replay(half, build, DATA, train=train)
    assert not found.same
    assert "the released weights have the hash" in str(found)


def test_replay_with_another_record(run) -> None:
    kept = commit(DATA.people, 40).model_dump(mode="json")
    edit_json(run / "record.json", lambda plain: plain.update(retained=kept))
    with pytest.raises(VerificationError, match=r"record\.json of .* its certificate names"):
        expunge.replay(run, build, DATA, train=train)


def test_replay_of_shards_reads_the_released_file(tmp_path) -> None:
    shards = expunge.Shards(build, train, seed="public", shards=2, slices=2)
    shards.learn(DATA)
    shards.release().save(tmp_path / "run")
    assert shards.replay(DATA, run=tmp_path / "run") == []
    shutil.copytree(tmp_path / "run", tmp_path / "more")
    (tmp_path / "more" / "record.json").unlink()
    forge(tmp_path / "more", lambda plain: plain["retained"].update(count=9000))
    (said,) = shards.replay(DATA, run=tmp_path / "more")
    assert said.startswith("the data are of 10 people with")
    assert "the release says 9000 people with" in said
    write_weights(tmp_path / "run", lambda tensor: tensor * 0 + 3)
    with pytest.raises(VerificationError, match="but the certificate has"):
        shards.replay(DATA, run=tmp_path / "run")
    # The certificate names the file now, but its constituents are the honest ones.
    (tmp_path / "run" / "record.json").unlink()
    after = hash_tensors(load_file(tmp_path / "run" / "model.safetensors"))
    forge(tmp_path / "run", lambda plain: plain["weights"].update(after=after))
    with pytest.raises(VerificationError, match=r"constituents\.0 in"):
        shards.replay(DATA, run=tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"a release of shards, with model\.safetensors"):
        shards.replay(DATA, run=tmp_path / "run")


# --- the parent of a later run
def test_an_edited_record_of_the_parent(run) -> None:
    """Without its leaves, forgotten people would come back unseen."""
    edit_json(run / "record.json", lambda plain: plain["forget"].update(leaves=[]))
    with pytest.raises(CertificateError, match="leaves are not those of root, salt and count"):
        expunge.retrain(build, DATA, forget=["user-4"], train=train, parent=run)
    nobody = commit(["nobody"], 4, leaves=True).model_dump(mode="json")
    edit_json(run / "record.json", lambda plain: plain.update(forget=nobody))
    with pytest.raises(VerificationError, match=r"record\.json of the parent has the hash"):
        expunge.retrain(build, DATA, forget=["user-4"], train=train, parent=run)


def test_a_parent_without_its_record_is_warned_of(run) -> None:
    (run / "record.json").unlink()
    for parent in (run, Certificate.load(run / "certificate.json")):
        with pytest.warns(UserWarning, match="cannot be looked for in the data"):
            expunge.retrain(build, LEFT, forget=["user-4"], train=train, parent=parent)


def test_a_parent_whose_certificate_does_not_hold(run) -> None:
    for seal, named in ((False, "digest is"), (True, "epsilon is")):
        edit_json(run / "certificate.json", lambda plain: plain.update(epsilon=0.5), seal=seal)
        with pytest.raises(VerificationError, match=f"of the parent does not hold: {named}"):
            expunge.retrain(build, LEFT, forget=["user-4"], train=train, parent=run)


def test_a_count_that_the_people_do_not_have(run) -> None:
    edit_json(run / "record.json", lambda plain: plain["forget"].update(count=5))
    with pytest.raises(CertificateError, match="leaves are not those"):
        expunge.verify(run, people=["user-3"])
    edit_json(run / "record.json", lambda plain: plain["forget"].update(leaves=None))
    found = expunge.verify(run, people=["user-3"], strict=False)
    assert "the request was not about the people who were given" in found.problems


# --- chains
@pytest.fixture(scope="module")
def chain(made) -> tuple[Path, Path]:
    release = expunge.retrain(build, LEFT, forget=["user-4"], train=train, parent=made / "run")
    return made / "run", release.save(made / "second")


def forge(folder: Path, change: Any) -> None:
    """Sentences and digest are derived again."""
    plain = json.loads((folder / "certificate.json").read_bytes())
    change(plain)
    complete(plain | {"signature": None}).save(folder / "certificate.json")


def test_a_child_that_releases_the_weights_of_its_parent(chain, tmp_path) -> None:
    first, second = chain
    assert expunge.verify(second, parent=first).holds
    copy = Path(shutil.copytree(second, tmp_path / "copy"))
    after = Certificate.load(first / "certificate.json").weights.after
    (copy / "record.json").unlink()
    shutil.copy(first / "model.safetensors", copy)
    write_weights(copy, lambda tensor: tensor)
    forge(copy, lambda plain: plain["weights"].update(after=after))
    assert expunge.verify(copy).holds
    with pytest.raises(
        VerificationError, match="it releases what its parent released, which saw 36"
    ):
        expunge.verify(copy, parent=first)


def test_the_same_people_named_again_release_the_same_weights(chain) -> None:
    """Retraining repeats itself: that is no fraud."""
    again = expunge.retrain(build, DATA, forget=["user-3"], train=train, parent=chain[0])
    before = Certificate.load(chain[0] / "certificate.json")
    assert again.certificate.weights.after == before.weights.after


def test_constituents_of_the_parent_although_people_left(tmp_path) -> None:
    shards = expunge.Shards(build, train, seed="public", shards=2, slices=2)
    shards.learn(DATA)
    one = shards.release().save(tmp_path / "one")
    two = shards.forget(["user-3"], DATA).save(tmp_path / "two")
    assert expunge.verify(two, parent=one).holds
    old, new = (Certificate.load(run / "certificate.json") for run in (one, two))
    k = next(k for k in range(2) if new.sharding.trained_from[k])
    shutil.copy(one / "model.safetensors", two)
    write_weights(two, lambda tensor: tensor)
    (two / "record.json").unlink()

    def claim(plain: Any, first: int) -> None:
        marks = [first if n == k else 0 for n in range(2)]
        plain["sharding"].update(hashes=list(old.sharding.hashes), trained_from=marks)
        plain["weights"].update(after=old.weights.after)

    for first, named in (
        (1, f"constituent {k} of .* is the parent's"),
        (0, "said to be untouched"),
    ):
        forge(two, lambda plain, first=first: claim(plain, first))
        with pytest.raises(VerificationError, match=named):
            expunge.verify(two, parent=one)


def test_a_parent_of_other_slices_is_another_ensemble(tmp_path) -> None:
    tensors, record = make_shards()
    parent = make_release(record, tensors).certificate
    plain = parent.model_dump(mode="json")
    plain["recipe"]["slices"] = 9
    other = complete(plain)
    stated = plain | {"parent": other.sha256, "created": LATER}
    stated["sharding"] |= {"trained_from": [0, 0, 0]}
    stated["recipe"] = parent.model_dump(mode="json")["recipe"]
    for name, certificate in (("child", complete(stated)), ("parent", other)):
        certificate.save(tmp_path / f"{name}.json")
    with pytest.raises(VerificationError, match="the parent is not of the same ensemble"):
        expunge.verify(tmp_path / "child.json", parent=tmp_path / "parent.json")
    for name, value in (("hashes", []), ("samples", [100]), ("trained_from", [0] * 7)):
        stated["sharding"] |= {name: value}  # never a traceback
        stated["parent"] = parent.sha256
        complete(stated).save(tmp_path / "child.json")
        parent.save(tmp_path / "parent.json")
        with pytest.raises(VerificationError, match="must have 3 samples, hashes and trained_from"):
            expunge.verify(tmp_path / "child.json", parent=tmp_path / "parent.json")


# --- what lies beside a release
@pytest.mark.parametrize(
    "name",
    ["constituents/9/model.safetensors", "constituents/pytorch_model.bin", "constituents/0/x.pt"],
)
def test_constituents_that_were_planted(name, tmp_path) -> None:
    tensors, record = make_shards()
    files = {"constituents/0/config.json": b"{}", "constituents/1/config.json": b"{}"}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    weights = record.weights.model_copy(update={"files": hashes})
    record = record.model_copy(update={"weights": weights})
    run = make_release(record, tensors, files=files).save(tmp_path / "run")
    assert expunge.verify(run).holds
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"")
    with pytest.raises(VerificationError, match="may be loaded, and no certificate covers it"):
        expunge.verify(run)


def test_a_constituent_that_was_planted_among_many_files(tmp_path) -> None:
    tensors, record = make_shards()
    files = {"constituents/0/config.json": b"{}"}
    contents = describe_contents(Contents(tensors, files))
    weights = record.weights.model_copy(update=contents)
    record = record.model_copy(update={"weights": weights})
    run = make_release(record, tensors, files=files).save(tmp_path / "run")
    (run / "constituents" / "9").mkdir()
    for number in range(3000):  # read in an order of the system's own
        (run / "constituents" / "9" / f"{number}").touch()
    (run / "constituents" / "9" / "model.safetensors").touch()
    with pytest.raises(VerificationError, match="9 may be loaded, and no certificate covers it"):
        expunge.verify(run)
    shutil.move(run / "constituents" / "9", run / "9")
    assert "9/ (in it " in " ".join(expunge.verify(run).unchecked)


@pytest.mark.parametrize("edit", ["a stranger signed it", "its digest", "nobody signed it"])
def test_the_certificate_in_the_adapters_folder(edit, tmp_path) -> None:
    """It is published alone: what is said of the folder around it is said of it, too."""
    tensors, part = make_tensors(), {"lora": make_tensors()["layer.bias"]}
    weights = Weights(start="a" * 64, **describe_contents(Contents(tensors, {})))
    hashes = Adapter(hash=hash_tensors(part), base="b" * 64)
    record = make_record(tensors, weights=weights.model_copy(update={"adapter": hashes}))
    files = {"adapter/adapter_model.safetensors": part}
    run = make_release(record, tensors, files=files).save(tmp_path / "run")
    (private, public), (other, _) = generate_key_pair(), generate_key_pair()
    own, copy = load(run).sign(private), run / "adapter" / "certificate.json"
    own.save(run / "certificate.json")
    if edit == "nobody signed it":
        assert expunge.verify(run, key=public).holds
        return
    if edit == "its digest":
        own.model_copy(update={"digest": "0" * 64}).save(copy)
    else:
        own.sign(other).save(copy)
    with pytest.raises(VerificationError, match="is another certificate, or signed by another key"):
        expunge.verify(run, key=public)


def test_what_was_not_looked_at_of_the_parent(tmp_path) -> None:
    save_chain(tmp_path)
    one, two = tmp_path / "first", tmp_path / "second"
    (two / "record.json").unlink()
    forge(one, lambda plain: plain["noise"].update(source="seeded"))
    parent = Certificate.load(one / "certificate.json").sha256
    forge(two, lambda plain: plain.update(parent=parent))
    write_weights(two, lambda tensor: tensor)
    said = "\n".join(expunge.verify(two, parent=one).unchecked)
    assert "whether its parent was released: that says 'Not for release" in said
    third = save_release(tmp_path / "third", "linear-model", created=LATER).certificate
    forge(tmp_path / "third", lambda plain: plain.update(parent="f" * 64))
    fourth = third.model_copy(update={"parent": load(tmp_path / "third").sha256})
    complete(fourth.model_dump(mode="json")).save(tmp_path / "fourth.json")
    found = expunge.verify(tmp_path / "fourth.json", parent=tmp_path / "third", strict=False)
    assert f"the parent of its parent: that names {'f' * 64}" in found.unchecked


# --- noisy runs of one old model
def test_a_noisy_run_beside_whose_record_is_damaged(tmp_path) -> None:
    save_release(tmp_path / "one", "gradient-clipping")
    tensors = make_tensors(1)
    weights = Weights(
        start="a" * 64, noisy="9" * 64, old="e" * 64, **describe_contents(Contents(tensors))
    )
    second = make_release(make_noisy(tensors, weights=weights), tensors)
    record = tmp_path / "one" / "record.json"
    raw = record.read_bytes()
    for changed in (raw + b" ", raw.replace(b"e" * 64, b"0" * 64)):
        record.write_bytes(changed)
        with pytest.raises(InputError, match="is a noisy run and cannot be counted"):
            second.save(tmp_path / "two")
    (tmp_path / "one" / "certificate.json").write_bytes(b"{}")  # no noisy run that anybody knows of
    record.write_bytes(b"{}")
    second.save(tmp_path / "two")


# --- what people read
def test_show_says_that_it_only_claims_and_checks_the_digest(tmp_path) -> None:
    save_release(tmp_path / "run")
    shown = succeed("show", tmp_path / "run")
    assert shown.splitlines()[1] == "What it claims; expunge verify checks it."
    edit_json(tmp_path / "run" / "certificate.json", lambda c: c.update(seed=5), seal=False)
    assert "digest is" in refuse("show", tmp_path / "run", code=1)


def test_numbers_of_metrics_are_parts_of_all(tmp_path) -> None:
    save_release(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.json"
    metrics.write_text('{"stages": [{"stage": "after", "retain": 9.99, "test": NaN}]}')
    page = write_report(tmp_path / "run", public=True).read_text()
    assert "the operator’s measurements, which no certificate covers" in page
    assert "<td>100.00 %</td><td>–</td>" in page
    metrics.write_text(f'{{"stages": [{{"stage": "after", "retain": 1{"0" * 400}}}]}}')
    with pytest.raises(CertificateError, match="it must be from 0 to 1"):
        write_report(tmp_path / "run", public=True)
