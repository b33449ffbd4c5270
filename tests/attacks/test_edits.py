"""An adversary who edits certificates, records, weights and chains, and repairs what they can.

They make digests right again, derive sentences anew, write weights again, and have the
library at hand. They do not have the operator's key.
"""

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785

from expunge.accounting.guarantee import guarantee
from expunge.certificates.certificate import Certificate, complete
from expunge.certificates.hashes import hash_tensors, write_safetensors
from expunge.certificates.record import Record, Statistics
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify
from expunge.errors import CertificateError, VerificationError
from expunge.recipes import Execution
from tests.helpers.sample_releases import edit_json, load, make_tensors, save_chain, save_release

FAILS = VerificationError, CertificateError


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for kind in ("retraining", "gradient-clipping", "shards", "linear-model"):
        save_release(folder / kind, kind)
    save_chain(folder)
    return folder


@pytest.fixture
def run(made, tmp_path) -> Path:
    """Copies of everything; the adversary works without the record."""
    shutil.copytree(made, tmp_path / "runs")
    for record in (tmp_path / "runs").rglob("record.json"):
        record.unlink()
    return tmp_path / "runs"


def refuse(named: str, *given: Any, error: Any = VerificationError, **more: Any) -> None:
    with pytest.raises(error, match=named):
        verify(*given, **more)


def forge(folder: Path, change: Any) -> None:
    """The most careful forgery: sentences and digest derived again, weights rewritten."""
    plain = json.loads((folder / "certificate.json").read_bytes())
    change(plain)
    try:
        forged = complete(plain | {"signature": None})
    except CertificateError:
        (folder / "certificate.json").write_bytes(rfc8785.dumps(plain))
        return
    forged.save(folder / "certificate.json")
    if "sharding" not in plain or plain["sharding"] is None:
        write_safetensors(folder / "model.safetensors", make_tensors(), {"format": "pt"})


def put(*path: Any, to: Any) -> Any:
    def change(plain: Any) -> None:
        for name in path[:-1]:
            plain = plain[name]
        plain[path[-1]] = to

    return change


def together(*changes: Any) -> Any:
    return lambda plain: [change(plain) for change in changes]


NOISY, EXACT, SHARDS, LINEAR = "gradient-clipping", "retraining", "shards", "linear-model"
HALF = together(put("epsilon", to=0.5), put("retrained", "epsilon", to=0.5))

# --- numbers and facts of a certificate, forged as carefully as can be

INVISIBLE = "\u3164\u2800\ufe0f"
EDITS = [
    (NOISY, put("epsilon", to=0.1), "epsilon is 0.1"),
    (NOISY, HALF, "retrained.epsilon is 0.5, which is too small"),
    (NOISY, together(put("epsilon", to=9.5), put("retrained", "epsilon", to=9.5)), "a smaller one"),
    (NOISY, put("delta", to=1e-9), "delta"),
    (NOISY, together(put("delta", to=0), put("retrained", "delta", to=0),
                     put("centre", "delta", to=0)), "it must be 0 exactly for methods without"),
    (NOISY, put("mu", to=0.1), "mu is 0.1"),
    (NOISY, put("compared_to", to="centre"), "epsilon is"),
    (NOISY, put("theorem", to="trust me"), "theorem is 'trust me'"),
    (NOISY, put("centre", "epsilon", to=0.1), "centre.epsilon is 0.1"),
    (NOISY, put("centre", "mu", to=0.1), "centre.mu is 0.1"),
    (NOISY, put("survival_bound", to=0.01), "survival_bound is 0.01"),
    (NOISY, put("recipe", "noise_std", to=0.3), "not what the run gives"),
    (NOISY, put("recipe", "start_clip", to=0.06), "too small"),
    (NOISY, put("recipe", "learning_rate", to=1e-3), "too small"),
    (NOISY, put("recipe", to={"method": "retraining"}), "delta is 1e-05; it must be 0"),
    (NOISY, put("recipe", "weight_decay", to=0), "too small"),
    (NOISY, put("execution", "rounding", to=0), "costs at least"),
    (NOISY, put("grid", to=0.3), "a power of two"),
    (NOISY, put("execution", "tail_delta", to=1e-7), "too small"),
    (NOISY, put("execution", "rounding", to=-1), "rounding is -1"),
    (NOISY, put("execution", "more", to=1), "execution.more"),
    (NOISY, put("parameters", to=10**6), "costs at least"),
    (NOISY, put("execution", "releases", to=2), "too small"),
    (NOISY, put("noise", "keys", to=2), "noise.keys is 2"),
    (NOISY, put("noise", "source", to="none"), "draws noise"),
    (NOISY, put("start", to="build"), "start is 'build'"),
    (NOISY, put("origin", to=None), "origin is None"),
    (NOISY, put("weights", "after", to="0" * 64), "but the certificate has 0000"),
    (NOISY, put("weights", "old", to="0" * 64), "weights.old must be given exactly"),
    (NOISY, put("weights", "noisy", to=None), "weights.noisy must be given"),
    (NOISY, put("training", to=None), "no training is recorded"),
    (NOISY, put("created", to="never"), "created: 'never' must be a time in UTC"),
    (NOISY, put("created", to="2199-01-01T00:00:00+00:00"), "ten years ahead"),
    (NOISY, put("parent", to="0" * 64), "weights.old must be given exactly"),
    (NOISY, put("schema_version", to=2), "schema_version"),
    (NOISY, put("forget", "salt", to="0" * 64), "belong in the record"),
    (NOISY, put("forget", "count", to=0), "forget names nobody"),
    (EXACT, put("retained", "samples", to=99), "99 are retained"),
    (EXACT, put("noise", to={"source": "system", "generator": None, "keys": 1}), "has none"),
    (EXACT, put("weights", "files", "config.json", to="0" * 64), "config.json has hash"),
    (EXACT, put("weights", "files", "../../secret", to="0" * 64), "not the name of a file"),
    (EXACT, put("weights", "files", "/etc/passwd", to="0" * 64), "not the name of a file"),
    (EXACT, put("weights", "start", to=None), "weights.start, the hash of what"),
    (EXACT, put("applied", to=[{"note": "x", "before": "1" * 64, "after": "2" * 64}]),
     "applied does not lead"),
    (SHARDS, put("sharding", "hashes", 0, to="7" * 64), "constituents.0 in"),
    (SHARDS, put("sharding", "samples", to=[60, 40]), "must have 3 samples"),
    (SHARDS, put("sharding", "trained_from", to=[0, 1, 0]), "trained_from must be given exactly"),
    (SHARDS, put("sharding", to=None), "sharding must be given exactly"),
    (SHARDS, put("sharding", "samples", to=[60, 41, 0]), "shards have 101 samples"),
    (LINEAR, put("statistics", to=None), "statistics must be given exactly"),
    (LINEAR, put("statistics", "samples", to=7), "statistics are of 7 rows"),
    (EXACT, put("parameters", to=10**9), "parameters is 1000000000, but .* has 19 numbers"),
    (EXACT, put("grid", to=0.5), "an exact run has none"),
    (EXACT, put("execution", "releases", to=2), "an exact run has none"),
    (EXACT, put("weights", "published", "hash", to="0" * 64), "weights.published is 0000"),
    (EXACT, put("weights", "published", "names", to=["norm.count", "no"]), "weights.published is"),
    (EXACT, put("weights", "published", "names", to=["layer.bias"]), "weights.published is"),
    (NOISY, put("weights", "noisy", to="a" * 64), "nothing was added to it"),
    (NOISY, put("created", to="20261115T220000Z"), "must be a time in UTC"),
    (NOISY, put("created", to="2026-11-15T22:00:00.5+00:00"), "must be a time in UTC"),
    (NOISY, put("created", to="2026-11-15T23:00:00+01:00"), "must be a time in UTC"),
    (NOISY, put("seed", to="seven"), "seed"),
    (NOISY, put("seed", to="1" * 5000), "seed"),
    (NOISY, put("created", to="1999-01-01T00:00:00+00:00"), "which is before 2020"),
    (NOISY, put("unchanged", to=["no"]), "unchanged names 'no', which is not in"),
    (NOISY, put("missing", to=["layer.bias", "layer.bias"]), "missing has a name twice"),
    (EXACT, put("weights", "published", "names", to=["norm.count"] * 2), "names has a name twice"),
    (EXACT, put("weights", "files", "x" * 300, to="0" * 64), "is longer than 255 bytes"),
    (EXACT, lambda plain: plain["forget"].update(root=plain["retained"]["root"]), "one set of"),
    (SHARDS, put("sharding", "combination", to="the best"), "combination"),
    *((EXACT, put("environment", "device", to=f"cpu{c}"), "cannot be seen") for c in INVISIBLE),
    (EXACT, put("centre", "epsilon", to=-1), "greater than or equal to 0"),
    (EXACT, put("centre", "epsilon", to=1e-10), "centre.epsilon is 1e-10, which is not what"),
    (EXACT, put("centre", "mu", to=5e-324), "centre.mu is 5e-324"),
    (EXACT, put("survival_bound", to=5e-324), "survival_bound is 5e-324"),
    (EXACT, put("noise", "generator", to="dice"), "an exact run has none"),
    (EXACT, put("buffers", to=["norm.count"]), "no old model was used"),
    (NOISY, put("buffers", to=["no"]), "buffers names 'no', which is not in"),
    (EXACT, put("weights", "files", "pytorch_model.bin", to="0" * 64), "is no configuration"),
    (EXACT, put("weights", "files", "model.safetensors.index.json", to="0" * 64), "is no config"),
    (EXACT, put("weights", "files", "adapter/adapter_model.safetensors", to="0" * 64), "is no con"),
    (EXACT, put("training", "function", to="nobody's data: checked"), "or withheld"),
    (EXACT, put("training", "options", to={"epochs": 3}), "or withheld"),
    (LINEAR, put("weights", "start", to="0" * 64), "must be given but for linear models"),
    (LINEAR, put("forget", "count", to=0), "forget names nobody"),
    (SHARDS, put("sharding", "samples", to=[60, 20, 20]), "or lacks one"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "named"), EDITS, ids=[e[2] for e in EDITS])
def test_a_careful_forgery_is_named(kind, change, named, run) -> None:
    forge(run / kind, change)
    refuse(named, run / kind, error=FAILS)


# --- sentences, which the forger does not derive again

SENTENCES = [
    (put("releasable", to=False), "releasable is False"),
    (put("warnings", to=["all is well"]), "warnings is"),
    (put("scope", "not_covered", to=[]), "scope is"),
    (put("scope", "operator", to=["The code is perfect."]), "scope is"),
    (put("scope", "void_if", to=["never"]), "scope is"),
    (put("noise", "source", to="seeded"), "releasable is True"),
    (put("weights", "start", to="3" * 64), "scope is"),
    (put("weights", "published", to={"names": ["w"], "hash": "0" * 64, "compared": "f"}), "scope"),
    (put("code", "build", to="0" * 64), "scope is"),
    (put("training", "function", to="expunge.Training"), "scope is"),
    (put("missing", to=["layer.weight"]), "scope is"),
    (put("digest", to="0" * 64), "digest is 0000"),
]


@pytest.mark.parametrize(("change", "named"), SENTENCES, ids=[named for _, named in SENTENCES])
def test_sentences_follow_from_the_fields(change, named, run) -> None:
    edit_json(run / NOISY / "certificate.json", change, seal=named != "digest is 0000")
    refuse(named, run / NOISY)


# --- facts that nothing recomputes: the record names them, and so does a signature

FACTS = [
    put("environment", "device", to="cuda"), put("environment", "dtype", to="bfloat16"),
    put("environment", "versions", to={}), put("environment", "threads", to=8),
    put("seed", to=1), put("forget", "root", to="0" * 64), put("forget", "samples", to=1),
    put("retained", "root", to="0" * 64), put("retained", "count", to=1),
    put("record", to="1" * 64), put("code", "train", to=None), put("unchanged", to=["w"]),
    put("training", "validation", to=9), put("created", to="2026-11-15T23:00:00+00:00"),
]  # fmt: skip


@pytest.mark.parametrize("change", FACTS)
def test_facts_are_bound_by_record_and_signature(change, made, run) -> None:
    folder = run / NOISY
    private, public = generate_key_pair()
    forge(folder, change)
    refuse(r"the record gives|the record's hash is", folder, record=made / NOISY / "record.json")
    load(made / NOISY).sign(private).save(folder / "certificate.json")
    edit_json(folder / "certificate.json", change)
    refuse("signature does not match", folder, key=public)
    forge(folder, lambda plain: None)  # the signature is taken away, or another put there
    refuse("it is not signed", folder, key=public)
    load(folder).sign(generate_key_pair()[0]).save(folder / "certificate.json")
    refuse("not by the expected", folder, key=public)


# --- records
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("trace", "noise_norm", 0, to=9.0), "too short or too long"),
        (put("trace", "nonfinite", 0, to=True), "the record's hash is"),
        (put("recipe", "noise_std", 0, to=1e308), "noise_std differs from the recipe"),
        (put("weights", "old", to="0" * 64), "the record's hash is"),
        (put("nonce", to="0" * 64), "the record's hash is"),
        (put("seed", to=5), "seed is 0, but the record gives 5"),
        (put("recipe", "start_clip", to=0.001), "recipe.start_clip is 0.01, but the record"),
        (put("execution", "rounding", to=0), "rounding is 0"),
        (put("forget", "samples", to=6), "forget.samples is 5, but the record gives 6"),
        (put("format", to="expunge-record-0"), "format"),
        (put("more", to=1), "more"),
    ],
)
def test_an_edited_record_is_named(change, named, made, run) -> None:
    shutil.copy(made / NOISY / "record.json", run / NOISY)
    edit_json(run / NOISY / "record.json", change)
    refuse(named, run / NOISY, error=FAILS)


def test_values_that_python_takes_for_the_same(made, run) -> None:
    """True is 1 there, and what is absent is None."""
    for change, named in (
        (lambda model: model.update(alpha=True), "statistics.model.alpha is True, but the record"),
        (lambda model: model.pop("weights"), "statistics.model is "),
        (lambda model: model.update(more=None), "statistics.model is "),
    ):
        shutil.copy(made / LINEAR / "certificate.json", run / LINEAR)
        forge(run / LINEAR, lambda plain, change=change: change(plain["statistics"]["model"]))
        refuse(named, run / LINEAR, record=made / LINEAR / "record.json")


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\u202eb", f"a{INVISIBLE}"])
def test_text_of_options_that_cannot_be_seen(text, made, run, tmp_path) -> None:
    for change in (
        lambda plain: plain["statistics"]["features"].update({"network": text}),
        lambda plain: plain["statistics"]["model"].update({text: [1]}),
    ):
        shutil.copy(made / LINEAR / "certificate.json", run / LINEAR)
        edit_json(run / LINEAR / "certificate.json", change)
        refuse("not in canonical form", run / LINEAR, error=CertificateError)
    # The labels of honest people may have such characters, and are written as escapes.
    stated = Record.load(made / LINEAR / "record.json").statistics
    stated = stated.model_dump() | {"model": {"classes": [text, "b"]}}
    save_release(tmp_path / "own", LINEAR, statistics=Statistics(**stated))
    assert load(tmp_path / "own").statistics.model["classes"] == [ascii(text), "b"]
    assert verify(tmp_path / "own").holds


def test_a_finer_grid_than_the_records(made, run) -> None:
    """All numbers of the forged certificate agree with each other, and promise more."""
    c, grid = load(run / NOISY), 2.0**-60
    ran = Execution(rounding=3 * grid * c.parameters**0.5)
    better = guarantee(c.recipe, delta=c.delta, execution=ran)
    forge(run / NOISY, lambda plain: plain.update(asdict(better), grid=grid, execution=asdict(ran)))
    assert verify(run / NOISY).certificate.epsilon < c.epsilon
    refuse(r"grid is .* but the record gives", run / NOISY, record=made / NOISY / "record.json")


def test_another_runs_record_and_keys_twice(made, run) -> None:
    shutil.copy(made / EXACT / "record.json", run / NOISY)
    refuse("the record's hash is", run / NOISY)
    raw = (made / NOISY / "record.json").read_bytes()
    (run / NOISY / "record.json").write_bytes(raw.replace(b"{", b'{"nonce":"0",', 1))
    refuse("twice", run / NOISY, error=CertificateError)


# --- weights and what lies beside them
def test_edited_weights(run) -> None:
    file = run / EXACT / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    rng = random.Random(0)
    for place in [0, 7, 8, 20, length + 7, len(raw) - 1, *rng.sample(range(len(raw)), 60)]:
        changed = bytearray(raw)
        changed[place] ^= rng.randrange(1, 256)
        file.write_bytes(changed)
        with pytest.raises(FAILS):
            verify(run / EXACT)
    for changed in (raw[:-1], raw + b"\0", b"", raw[:7], raw[:8], raw[:40], raw[: length + 8]):
        file.write_bytes(changed)
        with pytest.raises(FAILS):
            verify(run / EXACT)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"layer.bias": np.ones(3, np.float32)}),
        lambda t: t.pop("norm.count"),
        lambda t: t.update({"extra": np.zeros(1)}),
        lambda t: t.update({"layer.bias": t["layer.bias"].astype(np.float64)}),
        lambda t: t.update({"layer.weight": t["layer.weight"].reshape(4, 3)}),
        lambda t: t.update({"layer.Bias": t.pop("layer.bias")}),
    ],
)
def test_other_tensors(change, run) -> None:
    tensors = make_tensors()
    change(tensors)
    for written in ({"format": "pt"}, {"expunge.weights": hash_tensors(tensors)}, None):
        write_safetensors(run / EXACT / "model.safetensors", tensors, written)
        refuse("but the certificate has", run / EXACT)


@pytest.mark.parametrize("name", [
    "pytorch_model.bin", "model.safetensors.index.json", "model.py", "adapter_model.bin",
    "other.safetensors", "MODEL.SAFETENSORS", "tf_model.h5", "flax_model.msgpack", "model.gguf",
    "adapter_config.json", "config.json", "Config.JSON", "generation_config.json", "own.so",
    "modules.json", "model_index.json", "model.tflite", "a.zip", "model.skops", "__0_0.distcp",
    "custom_generate/generate.py",
])  # fmt: skip
def test_what_a_program_would_load_instead(name, run) -> None:
    """Of a noisy release: its certificate names no config.json."""
    (run / NOISY / name).parent.mkdir(exist_ok=True)
    (run / NOISY / name).write_bytes(b"{}")
    refuse("may be loaded, and no certificate covers it", run / NOISY)


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin\n", "model.safetensors ", "model.pkl.gz", "constituents/0/model.bin"],
)
def test_names_that_look_like_others(name, run) -> None:
    """A space at the end is not seen in a list of names."""
    for kind in (EXACT, SHARDS):
        (run / kind / name).parent.mkdir(parents=True, exist_ok=True)
        (run / kind / name).write_bytes(b"x")
        refuse("may be loaded, and no certificate covers it", run / kind)


def test_a_model_among_many_other_files_is_named(run) -> None:
    for n in range(30):
        (run / EXACT / f"a{n}.txt").write_text("x")
    (run / EXACT / "z").mkdir()
    (run / EXACT / "z" / "model.bin").write_bytes(b"x")
    said = " ".join(verify(run / EXACT).unchecked)
    assert "other files in this folder: z/ (in it model.bin), a0.txt" in said
    assert "and 11 more" in said


# --- signatures
def test_keys_and_signatures_that_fit_many_messages(run) -> None:
    """A key of small order under which a signature fits anything; s + the order of the group."""
    path = run / EXACT / "certificate.json"
    load(run / EXACT).sign(generate_key_pair()[0]).save(path)
    value = bytes.fromhex(load(run / EXACT).signature.value)
    order = 2**252 + 27742317777372353535851937790883648493
    larger = int.from_bytes(value[32:], "little") + order
    for changed in (
        {"value": (value[:32] + larger.to_bytes(32, "little")).hex()},
        *(
            {"public_key": key, "value": f"{key}{'00' * 32}"}
            for key in ("01" + "00" * 31, "00" * 32, "ec" + "ff" * 30 + "7f")
        ),
    ):
        edit_json(path, lambda plain, changed=changed: plain["signature"].update(changed))
        refuse("the signature does not match", run / EXACT)


def test_a_parent_that_a_stranger_signed_is_said(run) -> None:
    load(run / "first").sign(generate_key_pair()[0]).save(run / "first" / "certificate.json")
    assert "whose key signed its parent" in verify(run / "second", parent=run / "first").unchecked


# --- any byte of a certificate
def test_random_edits_of_a_certificate(run) -> None:
    path, rng = run / EXACT / "certificate.json", random.Random(3)
    private, public = generate_key_pair()
    load(run / EXACT).sign(private).save(path)
    raw = path.read_bytes()
    for _ in range(150):
        place, width = rng.randrange(len(raw)), rng.randrange(1, 9)
        changed = rng.choice([
            raw[:place] + rng.randbytes(width) + raw[place + width :],
            raw[:place] + rng.choice([b" ", b"\n", b"0", b","]) + raw[place:],
            raw[:place] + raw[place + width :],
            raw[: place + width] + raw[place:],
            raw[:place],
        ])  # fmt: skip
        path.write_bytes(changed)
        if changed != raw:
            with pytest.raises(FAILS):
                verify(path, key=public)


# --- chains
@pytest.mark.parametrize(
    ("which", "change", "named"),
    [
        ("first", put("survival_bound", to=0.01), r"survival_bound is 0\.01"),
        ("first", put("seed", to=1), "SHA-256 of the parent"),
        ("first", put("created", to="2026-11-17T22:00:00+00:00"), "before its parent's"),
        ("second", put("parent", to="0" * 64), "SHA-256 of the parent"),
        ("second", together(put("parent", to=None), put("weights", "old", to=None)),
         "parent is None"),
        ("second", put("weights", "old", to="0" * 64), "but the parent released"),
        ("second", put("created", to="2026-11-14T22:00:00+00:00"), "before its parent's"),
    ],
)  # fmt: skip
def test_an_edited_chain(which, change, named, run) -> None:
    assert verify(run / "second", parent=run / "first").holds
    plain = json.loads((run / which / "certificate.json").read_bytes())
    change(plain)
    complete(plain).save(run / which / "certificate.json")
    for name in ("first", "second"):
        (run / name / "model.safetensors").unlink()
    refuse(named, run / "second", parent=run / "first")


def test_chains_in_another_order_or_with_a_gap(run) -> None:
    for parent, child in (("second", "first"), ("first", "first"), (EXACT, "second")):
        refuse("SHA-256 of the parent", run / child, parent=run / parent)


def test_the_untouched_holds(made, run) -> None:
    for folder in (*made.iterdir(), *run.iterdir()):
        assert verify(folder).holds
    assert isinstance(load(made / EXACT), Certificate)
    assert Record.load(made / EXACT / "record.json").sha256 == load(made / EXACT).record
