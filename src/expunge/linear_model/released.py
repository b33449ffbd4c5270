"""The way out and back: what a linear model releases, a predictor from a release, a model from a
state, and the same numbers again from stored rows or from data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.people import commit
from expunge.certificates.record import Code, Environment, Record, Statistics, Weights
from expunge.certificates.release import Contents, Release, describe_contents
from expunge.errors import CertificateError, ExpungeError, InputError
from expunge.files import read_limited, refuse_twice
from expunge.linear_model.features import restore
from expunge.linear_model.ridge import Solution, count_threads
from expunge.linear_model.rows import Store
from expunge.manifests import damaged, read_kind
from expunge.recipes import LinearModel as Recipe
from expunge.states import State

KIND = "linear-model"
FORMAT = "expunge-estimator-1"
MODELS: dict[str, Any] = {}  # what a state or a release may name; ``estimators`` fills it
_MOST = 1_000_000_000


def make_release(
    model: Any, store: Store, names: tuple[str, ...], samples: int, marks: Mapping[bytes, str]
) -> Release:
    """The release of the solution that ``model`` has, about a request of ``names``."""
    state, solved = store.state, model._solved[1]
    given = state.settings
    predictor = _make_predictor(type(model), given, solved)
    contents = _list_contents(predictor, given)
    parent = None if state.parent is None else Certificate.from_bytes(state.parent)
    count, people = store.commit_people()  # keyed hashes: they open for nobody else
    retained = commit([hashlib.sha256(people).hexdigest()], store.sums.rows)
    record = Record(
        recipe=Recipe(),
        parameters=solved.weights.size + solved.intercept.size,
        start="build",
        forget=commit(names, samples, leaves=True),
        retained=retained.model_copy(update={"count": count}),
        code=Code(),
        weights=Weights(**describe_contents(contents)),
        statistics=_describe_statistics(given, solved, store),
        environment=Environment(dtype="float64", threads=count_threads() if solved.proven else 1),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        parent=None if parent is None else parent.sha256,
    )
    return Release(
        predictor,
        certify(record, parent=parent),
        record,
        contents.tensors,
        contents.files,
        relist=lambda changed: _list_contents(changed, given),
        saving=state.saving(marks),
    )


def _describe_statistics(given: Mapping[str, Any], solved: Solution, store: Store) -> Statistics:
    facts = given["facts"]
    features = dict(given["features"] or {"kind": "table", "columns": facts["inputs"]})
    if given["features"] is not None:
        features["evaluation"] = facts["evaluation"]
    model = {"name": given["model"], "parameters": given["parameters"]}
    if given["model"] != "LogisticRegression":
        where = "on every machine" if solved.proven else "in one environment"
        model |= {"alpha": solved.alpha, "rounding": f"the same bits {where}"}
    counted: Any = {"samples": store.sums.rows, "digest": store.digest()}
    return Statistics(features=features, numbers=given["numbers"], model=model, **counted)


def _list_contents(model: Any, given: Mapping[str, Any]) -> Contents:
    solved = model._find_solution()
    named = {"coef": solved.weights.T, "intercept": solved.intercept}
    tensors = {name: np.ascontiguousarray(value) for name, value in named.items()}
    facts = dict(given) | {"format": FORMAT, "labels": list(solved.labels), "alpha": solved.alpha}
    text = json.dumps(facts, sort_keys=True, indent=1, ensure_ascii=False)
    return Contents(tensors, {"estimator.json": text.encode()})


def _make_predictor(kind: Any, given: Any, solved: Solution, network: Any = None) -> Any:
    """A fitted model without rows."""
    model = _make_model(kind, given, network)
    model._released, model._solved = True, (None, solved)
    model._take_facts(given["facts"])
    return model


def _make_model(kind: Any, given: Any, network: Any, state: Path | None = None) -> Any:
    """A model as it was described, which has learned nothing yet."""
    features = restore(given["features"], network)
    return kind(**given["parameters"], features=features, state=state)


def load(path: str | Path, network: Any = None) -> Any:
    """The model of a state, which goes on there, or a predictor from a release.

    ``network`` is the public one that its features were made with. Without it a model can still
    forget and release; it cannot learn, and it cannot predict.

    >>> load("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: path is '/nowhere'; it must be a state of a linear model or its ...
    """
    folder = Path(path)
    if (folder / "certificate.json").exists():  # a release, whatever else somebody put there
        return _load_release(folder, network)
    if read_kind(folder) is None:
        raise InputError.of("path", str(path), "a state of a linear model or its release")
    given = State.open(folder, KIND).settings
    try:
        model = _make_model(MODELS[given["model"]], given, network, folder)
        model._open()
    except ExpungeError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError):
        raise damaged(folder, "manifest.json", "has settings of no linear model") from None
    return model


def _read_estimator(folder: Path, certificate: Certificate) -> dict[str, Any]:
    """estimator.json, if it is the file that the certificate names."""
    data = read_limited(folder / "estimator.json", _MOST, "estimator")
    if hashlib.sha256(data).hexdigest() != certificate.weights.files.get("estimator.json"):
        raise CertificateError(f"{folder}/estimator.json is not what its certificate is about")
    return json.loads(data, object_pairs_hook=refuse_twice)


def _load_release(folder: Path, network: Any) -> Any:
    certificate = Certificate.load(folder / "certificate.json")
    if certificate.statistics is None:
        raise InputError.of("path", str(folder), "a state of a linear model or its release")
    try:
        given = _read_estimator(folder, certificate)
        tensors = load_file(folder / "model.safetensors")
        if hash_tensors(tensors) != certificate.weights.after:
            what = f"{folder}/model.safetensors"
            raise CertificateError(f"{what} is not what its certificate is about")
        solved = Solution(
            tensors["coef"].T, tensors["intercept"], given["alpha"], False, tuple(given["labels"])
        )
        return _make_predictor(MODELS[given["model"]], given, solved, network)
    except ExpungeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CertificateError(f"the release {folder} cannot be read: {error}") from None


def replay(run: str | Path, source: Any, network: Any = None) -> list[str]:
    """What differs when a release is computed again; nothing, if it is what it says.

    ``source`` is the state (a folder or a model), whose stored rows are added up again, or the
    retained data themselves: (X, y). On another machine ridge regression has the same bits; of
    logistic regression the last digits may differ, and this says by how much.
    """
    folder = Path(run)
    certificate, released = Certificate.load(folder / "certificate.json"), load(folder)
    claimed, found = cast(Statistics, certificate.statistics), list[str]()
    if isinstance(source, tuple):
        X, y = cast("tuple[Any, Any]", source)
        given = _read_estimator(folder, certificate)
        model = _make_model(MODELS[given["model"]], given, network)
        model._facts = {k: v for k, v in given["facts"].items() if k in ("declared", "evaluation")}
        model.partial_fit(X, y)
        sums = model._open().sums
    else:
        model = load(source, network) if isinstance(source, str | Path) else source
        sums = model._open().add_again()
        if sums.digest() != model.digest():
            found.append("the stored rows do not add up to the sums")
    if sums.digest() != claimed.digest:
        found.append(f"the rows add up to {sums.digest()}, not to {claimed.digest}")
    if sums.rows != claimed.samples:
        found.append(f"there are {sums.rows} rows, not {claimed.samples}")
    if not found:
        one, two = (_list_contents(each, {}).tensors for each in (model, released))
        if hash_tensors(one) != certificate.weights.after:
            apart = max(
                float(np.nanmax(np.abs(one[name] - two[name]), initial=0.0))
                if one[name].shape == two[name].shape
                else np.inf
                for name in one
            )
            found.append(f"the weights differ from the released ones by up to {apart:.1e}")
    return found
