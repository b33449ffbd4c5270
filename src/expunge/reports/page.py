"""Record, certificate, metrics and audit as one self-contained HTML page.

The page is for two readers: first the data-protection officer, then the engineer. It needs no
network and no script. It shows figures of the run's trace and of the old model, which no noise
covers, so it belongs to the operator; ``public=True`` leaves all of them out.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expunge.accounting.guarantee import is_exact, log_delta
from expunge.certificates.certificate import Certificate
from expunge.certificates.hashing import ADAPTER, find_weights, hash_weights
from expunge.certificates.record import RunRecord
from expunge.certificates.signing import holds
from expunge.certificates.wording import (
    METHOD_WORDS,
    TRAINING_METHODS,
    allows_release,
    derive_scope,
    find_cautions,
    find_warnings,
    name_reference,
    round_up,
)
from expunge.errors import CertificateError, ExpungeError, InputError, VerificationError
from expunge.files import read_limited, write_atomic
from expunge.reports import figures, tables
from expunge.reports.charts import draw_chart
from expunge.reports.figures import list_bounds
from expunge.reports.metrics import find_own, keep_public, parse_metrics

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_BYTES = 100_000_000
TEMPLATES = Path(__file__).parent
WEAK = 0.9
# What could hide or turn around text: control characters, lone surrogates, direction overrides.
_HARMFUL = re.compile(
    "[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069\\ufffe\\uffff]"
)


def render_report(
    record: RunRecord | None,
    certificate: Certificate,
    metrics: Mapping[str, Any] | None = None,
    audit: Mapping[str, Any] | None = None,
    *,
    public: bool = False,
) -> str:
    """The page as text: a pure function of its arguments.

    ``metrics`` is described in :mod:`expunge.reports.metrics`. With ``public=True`` nothing but the
    certificate and the released model's accuracy on retained and test data is used; the record may
    then be None. A certificate that contradicts itself or the record is a
    :class:`VerificationError`: no page is made of it.

    >>> from expunge.recipes import Execution
    >>> from expunge.certificates.certificate import certify
    >>> from expunge.recipes import Retraining
    >>> from expunge.certificates.record import Trace
    >>> record = RunRecord(
    ...     recipe=Retraining(), parameters=10, grid=0.0, execution=Execution(),
    ...     noise={"source": "none", "releasable": True}, noise_keys=0, trace=Trace(),
    ...     gradient_evaluations=640, weights_before="a" * 64, weights_noisy="b" * 64,
    ...     weights_after="b" * 64, device="cpu", dtype="float32",
    ...     created="2025-11-15T22:00:00+00:00", start="fresh")
    >>> page = render_report(record, certify(record, delta=1e-5), {"title": "Shop <model>"})
    >>> "<h1><bdi>Shop &lt;model&gt;</bdi></h1>" in page
    True
    """
    from markupsafe import Markup

    if record is None and not public:
        raise InputError("record is None; only a public report can do without the record")
    _raise_if_unsound(certificate, None if public else record)
    measured = parse_metrics(metrics)
    if public:
        measured, record, audit = keep_public(measured, certificate.recipe.method), None, None
    trace = None if record is None else record.trace
    account = certificate.method, certificate.execution
    plain = certificate.model_dump()
    own = find_own(measured, certificate.recipe.method)
    arm = measured.arm or certificate.recipe.method
    grad_clip = getattr(certificate.method, "grad_clip", None)
    return (
        _make_environment()
        .get_template("report.html.j2")
        .render(
            c=certificate,
            m=measured,
            public=public,
            title=measured.title or "Unlearning report",
            reference=name_reference(certificate),
            methods=METHOD_WORDS,
            training=TRAINING_METHODS,
            exact=is_exact(certificate.method),
            cautions=find_cautions(certificate),
            strength=_weigh(certificate),
            bounds=list_bounds(certificate),
            steps=sum(run.steps for run in certificate.schedule),
            arm=arm,
            own=own,
            stages=tables.order_stages(measured.stages, arm),
            recipe=tables.describe_recipe(certificate),
            trace=[] if trace is None else tables.describe_trace(trace, certificate),
            arms=tables.compare_costs(measured),
            missing=tables.find_missing(measured),
            problem=plain.get("problem"),
            statistics=plain.get("statistics"),
            describe=tables.describe_items,
            draw=lambda chart: Markup(draw_chart(chart)),
            most_rows=tables.MOST_ROWS,
            audit=None if audit is None else tables.describe_audit(audit, certificate),
            figures={
                "accuracy": figures.chart_accuracy(own),
                "curves": figures.chart_curves(measured.curves),
                "trace": None if trace is None else figures.chart_trace(trace, grad_clip),
                "trade_off": figures.chart_trade_off(certificate, *account),
                "forgetting": figures.chart_forgetting(certificate, *account),
            },
        )
    )


def write_report(directory: str | Path, *, public: bool = False) -> Path:
    """Write ``report.html`` (public: ``report-public.html``) from the files of a run directory.

    Weights that are there must be those that the certificate is about.

    >>> write_report("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: /nowhere is not a directory; name the directory of a run
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; name the directory of a run")
    needed = ["certificate.json"] if public else ["record.json", "certificate.json", "metrics.json"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise CertificateError(
            f"{folder} has no {' and no '.join(missing)}; a report is made from "
            + ", ".join(needed)
        )
    record = None if public else _load(folder / "record.json", RunRecord.load)
    certificate = _load(folder / "certificate.json", Certificate.load)
    metrics, audit = (
        _load(folder / name, _read_object) if (folder / name).is_file() else None
        for name in ("metrics.json", "audit.json")
    )
    _check_weights(certificate, find_weights(folder / "certificate.json"))
    text = render_report(record, certificate, metrics, audit, public=public)
    target = folder / ("report-public.html" if public else "report.html")
    try:
        write_atomic(target, text.encode("utf-8"), private=not public)
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def _check_weights(certificate: Certificate, path: Path) -> None:
    """The page says whether they may be released, so they must be the ones it speaks of."""
    adapter = certificate.weights.adapter
    told = certificate.weights.after
    if path.name == ADAPTER:
        told = None if adapter is None else adapter.hash
    if path.exists() and hash_weights(path)[0] != told:
        raise VerificationError(
            f"no report is made of this certificate: {path} are not the weights that it is about"
        )


def _load(path: Path, read: Any) -> Any:
    """What ``read`` makes of the file; its error names the file."""
    try:
        return read(path)
    except ExpungeError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path} cannot be used: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    raw = read_limited(path, MAX_BYTES, path.name)
    try:
        data = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return cast(dict[str, Any], data)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _raise_if_unsound(certificate: Certificate, record: RunRecord | None) -> None:
    """Put nothing into words that the certificate itself contradicts; no weights are read."""
    c, found = certificate, list[str]()
    if c.digest != c.compute_digest():
        found.append("its digest is not that of its content")
    if c.signature is not None:
        signature = c.signature
        if not holds(signature.value, signature.public_key, c.signed_bytes()):
            found.append("its signature does not match it")
    warnings = find_warnings(c)
    derived = derive_scope(c), warnings, allows_release(warnings)
    if (c.scope, c.warnings, c.releasable) != derived:
        found.append("its scope or warnings do not follow from its other fields")
    for side, bound in list_bounds(c):
        epsilon = bound.epsilon * (1 + 1e-10)
        truth = log_delta(c.method, epsilon, compared_to=side, execution=c.execution)
        if truth > math.log(bound.delta) + 1e-9:
            found.append(f"{side}.epsilon is {bound.epsilon!r}, less than its recipe gives")
    chosen = dict(list_bounds(c)).get(c.compared_to)
    if chosen is None or (chosen.epsilon, chosen.delta, chosen.mu) != (c.epsilon, c.delta, c.mu):
        found.append(f"its epsilon, delta and mu are not those of {c.compared_to}")
    if record is not None and record.digest() != c.record:
        found.append("it was not made from this record")
    if found:
        raise VerificationError("no report is made of this certificate: " + "; ".join(found))


def _weigh(certificate: Certificate) -> dict[str, Any]:
    """The guarantee in numbers that a non-engineer can weigh, rounded to the safe side: e^ε, and
    the best guess between run and reference, (1 + δ at ε = 0)/2 for even odds."""
    c = certificate
    log_distance = figures.log_delta_at(c, c.method, c.execution, c.compared_to, 0.0)
    guess = min((1 + math.exp(log_distance)) / 2, 1.0)
    times = round_up(math.exp(min(c.epsilon, 709.0)), 4)
    return {"times": times, "guess": round_up(100 * guess, 4), "weak": guess >= WEAK}


@functools.cache
def _make_environment() -> Environment:
    """One for all pages: it keeps the compiled template."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    environment.filters.update(
        up=round_up,
        exact=tables.format_exact,
        percent=tables.format_percent,
        odds=tables.format_odds,
    )
    return environment


def _clean(value: Any) -> Any:
    """What a template prints, without characters that hide or turn around text."""
    return type(value)(_HARMFUL.sub("�", value)) if isinstance(value, str) else value
