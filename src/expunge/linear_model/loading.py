"""The way back: a predictor from a release, a model from a state, and the same numbers again from
stored rows or from data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashes import hash_tensors
from expunge.errors import CertificateError, ExpungeError, InputError
from expunge.files import read_limited, refuse_twice
from expunge.linear_model.base import KIND
from expunge.linear_model.estimators import LogisticRegression, Ridge, RidgeClassifier
from expunge.linear_model.features import restore
from expunge.linear_model.released import list_contents, make_predictor
from expunge.linear_model.ridge import Solution
from expunge.manifests import damaged, read_kind
from expunge.states import State

_MODELS: dict[str, Any] = {
    model.__name__: model for model in (Ridge, RidgeClassifier, LogisticRegression)
}
_MOST = 1_000_000_000


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
        features = restore(given["features"], network)
        model = _MODELS[given["model"]](**given["parameters"], features=features, state=folder)
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
        return make_predictor(_MODELS[given["model"]], given, solved, network)
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
    claimed = certificate.statistics
    if claimed is None:
        raise InputError.of("run", str(run), "a release of a linear model")
    if isinstance(source, tuple):
        X, y = cast("tuple[Any, Any]", source)
        given = _read_estimator(folder, certificate)
        features = restore(given["features"], network)
        model = _MODELS[given["model"]](**given["parameters"], features=features)
        model._facts = {k: v for k, v in given["facts"].items() if k in ("declared", "evaluation")}
        model.partial_fit(X, y)
        sums, found = model._open().sums, list[str]()
    else:
        model = load(source, network) if isinstance(source, str | Path) else source
        sums = model._open().add_again()
        found = (
            [] if sums.digest() == model.digest() else ["the stored rows do not add up to the sums"]
        )
    if sums.digest() != claimed.digest:
        found.append(f"the rows add up to {sums.digest()}, not to {claimed.digest}")
    if sums.rows != claimed.samples:
        found.append(f"there are {sums.rows} rows, not {claimed.samples}")
    if not found:
        one, two = (m._find_solution() for m in (model, released))
        tensors = list_contents(model, {}).tensors
        if hash_tensors(tensors) != certificate.weights.after:
            apart = max(
                float(np.nanmax(np.abs(a - b), initial=0.0)) if a.shape == b.shape else np.inf
                for a, b in ((one.weights, two.weights), (one.intercept, two.intercept))
            )
            found.append(f"the weights differ from the released ones by up to {apart:.1e}")
    return found
