"""What a linear model releases: weights, the facts of its estimator, record and certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.people import commit
from expunge.certificates.record import Code, Environment, Record, Statistics, Weights
from expunge.certificates.release import Contents, Release, describe_contents
from expunge.linear_model.features import restore
from expunge.linear_model.ridge import Solution, count_threads
from expunge.linear_model.rows import Store
from expunge.recipes import LinearModel as Recipe

FORMAT = "expunge-estimator-1"


def make_release(
    model: Any, store: Store, names: tuple[str, ...], samples: int, marks: Mapping[bytes, str]
) -> Release:
    """The release of the solution that ``model`` has, about a request of ``names``."""
    state, solved = store.state, model._solved[1]
    given = state.settings
    predictor = make_predictor(type(model), given, solved)
    contents = list_contents(predictor, given)
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
        relist=lambda changed: list_contents(changed, given),
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


def list_contents(model: Any, given: Mapping[str, Any]) -> Contents:
    solved = model._find_solution()
    named = {"coef": solved.weights.T, "intercept": solved.intercept}
    tensors = {name: np.ascontiguousarray(value) for name, value in named.items()}
    facts = dict(given) | {"format": FORMAT, "labels": list(solved.labels), "alpha": solved.alpha}
    text = json.dumps(facts, sort_keys=True, indent=1, ensure_ascii=False)
    return Contents(tensors, {"estimator.json": text.encode()})


def make_predictor(
    kind: type[Any], given: Mapping[str, Any], solved: Solution, network: Any = None
) -> Any:
    """A fitted model without rows."""
    model = kind(**given["parameters"], features=restore(given["features"], network))
    model._released, model._solved = True, (None, solved)
    model._take_facts(given["facts"])
    return model
