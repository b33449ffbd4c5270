"""A release as one self-contained HTML page, made only of a certificate that holds.

The operator's copy shows figures of the run's trace and of the old model, which no noise covers;
``public=True`` leaves all of them out.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expunge.accounting.guarantee import log_delta
from expunge.certificates.certificate import Certificate
from expunge.certificates.record import Record, Trace
from expunge.certificates.release import RECORD
from expunge.certificates.signing import fingerprint
from expunge.certificates.verification import OTHER_FILES, Verification, verify
from expunge.certificates.wording import list_facts, name_unseen
from expunge.display import clean, round_up
from expunge.errors import CertificateError, InputError
from expunge.files import read_limited, refuse_twice, write_atomic
from expunge.recipes import ComparedTo, is_exact
from expunge.report.charts import draw_hundred, draw_lines

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_BYTES = 10_000_000
_POINTS = 41
_PUBLIC_COLUMNS, _COLUMNS = ("retain", "test"), ("retain", "forget", "test")


def write_report(folder: str | Path, public: bool = False) -> Path:
    """Write ``report.html`` (public: ``report-public.html``) from the files of a release.

    A certificate that does not hold is a :class:`VerificationError`: no page is made of it.

    >>> write_report("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: folder is '/nowhere'; it must be the folder of a release
    """
    place = Path(folder)
    if not place.is_dir():
        raise InputError.of("folder", str(folder), "the folder of a release")
    found = verify(place)
    record = place / RECORD
    if not public and not record.exists():
        raise CertificateError(f"{place} has no {RECORD}; without it only --public is possible")
    kept = None if public else Record.load(record)
    metrics = place / "metrics.json"
    measured = _read_metrics(metrics) if metrics.exists() else {}
    text = render_report(found, kept, measured)
    target = place / ("report-public.html" if public else "report.html")
    write_atomic(target, text.encode("utf-8"), private=not public)
    return target


def render_report(
    verification: Verification, record: Record | None, metrics: Mapping[str, Any]
) -> str:
    """The page as text; without a record, the public one."""
    from markupsafe import Markup

    c = verification.certificate
    facts = list_facts(c)
    pictures = [
        ("What can survive", facts["survival"], draw_hundred(100 * c.survival_bound, "")),
        *_draw_trade_off(c),
        *([] if record is None or record.trace is None else _draw_trace(record.trace)),
    ]
    return (
        _make_environment()
        .get_template("report.html.j2")
        .render(
            c=c,
            public=record is None,
            checked=verification.checked,
            unchecked=[line for line in verification.unchecked if not line.startswith(OTHER_FILES)],
            facts=facts,
            unseen=name_unseen(c),
            guess=round_up(50 * (1 + _find_distance(c)), 4),
            key="nobody" if c.signature is None else fingerprint(c.signature.public_key),
            pictures=[(title, words, Markup(drawn)) for title, words, drawn in pictures],
            stages=_list_stages(metrics, record is None),
            cost={} if record is None else _read_table(metrics.get("cost")),
            columns=_PUBLIC_COLUMNS if record is None else _COLUMNS,
        )
    )


def _find_distance(c: Certificate) -> float:
    """Total variation between run and reference: δ at ε = 0."""
    if is_exact(c.recipe):
        return 0.0
    log = log_delta(c.recipe, 0.0, compared_to=c.compared_to, execution=c.execution)
    return min(math.exp(log), 1.0)


def _draw_trade_off(c: Certificate) -> list[tuple[str, str, str]]:
    """δ against ε for both comparisons; an exact run has none to show."""
    if is_exact(c.recipe):
        return []
    top = max(2 * c.retrained.epsilon, 2 * c.centre.epsilon, 0.1)
    sides: list[tuple[str, ComparedTo]] = [("retrained model", "retrained"), ("centre", "centre")]
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, side in sides:
        points = list[tuple[float, float]]()
        for n in range(_POINTS):
            epsilon = top * n / (_POINTS - 1)
            log = log_delta(c.recipe, epsilon, compared_to=side, execution=c.execution)
            if log > -80:
                points.append((epsilon, log / math.log(10)))
        if points:
            lines[name] = points
    words = (
        f"Certified against {c.compared_to}: epsilon {round_up(c.epsilon, 4)}, delta "
        f"{round_up(c.delta, 3)}. Every other point of the line holds too."
    )
    if not lines:
        return []
    drawn = draw_lines(lines, words, "epsilon", "delta", powers=True)
    return [("Epsilon against delta", words, drawn)]


def _draw_trace(trace: Trace) -> list[tuple[str, str, str]]:
    """Norms of the noisy steps: confidential."""
    lines = {
        name: [(float(step), value) for step, value in enumerate(column)]
        for name, column in (("model", trace.model_norm), ("noise", trace.noise_norm))
        if column
    }
    words = f"Norms in {len(trace)} noisy steps, before each noise. Confidential."
    drawn = draw_lines(lines, words, "step", "norm") if lines else ""
    return [("The noisy steps", words, drawn)] if lines else []


def _read_metrics(path: Path) -> dict[str, Any]:
    raw = read_limited(path, MAX_BYTES, "metrics")
    try:
        plain = json.loads(raw, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path} is not JSON: {clean(str(error))}") from None
    return _read_table(plain)


def _read_table(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _list_stages(metrics: Mapping[str, Any], public: bool) -> list[tuple[str, list[str]]]:
    """Accuracies stage by stage; of the public, the released model's on retained and test data."""
    given = metrics.get("stages")
    stages = (
        [_read_table(row) for row in cast(list[object], given)] if isinstance(given, list) else []
    )
    if public:
        stages = [row for row in stages if str(row.get("stage", "")).startswith("after")][-1:]
    columns = _PUBLIC_COLUMNS if public else _COLUMNS
    return [
        (str(row.get("stage", "")), [_show(row.get(name)) for name in columns]) for row in stages
    ]


def _show(value: object) -> str:
    """A part of all, in percent."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return "–"
    try:
        part = float(value)
    except OverflowError:
        raise CertificateError(
            "metrics.json has an accuracy of hundreds of digits; it must be from 0 to 1"
        ) from None
    return "–" if math.isnan(part) else f"{100 * min(max(part, 0.0), 1.0):.2f} %"


@functools.cache
def _make_environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    environment.filters["up"] = round_up
    return environment
