"""A release as one self-contained HTML page, made only of a certificate that holds.

The operator's copy shows what was measured on the old model, which no noise covers;
``public=True`` leaves that out.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationError

from expunge.accounting.guarantee import log_delta
from expunge.certificates.certificate import Certificate
from expunge.certificates.fields import Model
from expunge.certificates.release import RECORD
from expunge.certificates.signing import fingerprint
from expunge.certificates.verification import OTHER_FILES, Verification, verify
from expunge.certificates.wording import list_facts, name_unseen
from expunge.display import clean, round_up
from expunge.errors import CertificateError, InputError
from expunge.files import read_limited, write_atomic
from expunge.recipes import ComparedTo, is_exact
from expunge.report.charts import draw_hundred, draw_lines

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_BYTES = 10_000_000
_POINTS = 41
_PUBLIC_COLUMNS, _COLUMNS = ("retain", "test"), ("retain", "forget", "test")


def _check_part(accuracy: float) -> float:
    if math.isinf(accuracy):
        raise ValueError("it must be from 0 to 1")
    return min(max(accuracy, 0.0), 1.0)


Accuracy = Annotated[float, AfterValidator(_check_part)] | None


class Stage(Model, extra="ignore", allow_inf_nan=True):
    """A row of accuracies."""

    stage: str
    retain: Accuracy = None
    forget: Accuracy = None
    test: Accuracy = None


class Metrics(Model, extra="ignore"):
    """What a job measured on the old model and on the released one."""

    stages: tuple[Stage, ...] = ()
    cost: dict[str, float | str] = Field(default_factory=dict)


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
    if not public and not (place / RECORD).exists():
        raise CertificateError(f"{place} has no {RECORD}; without it only --public is possible")
    text = render_report(found, _read_metrics(place / "metrics.json"), public)
    target = place / ("report-public.html" if public else "report.html")
    write_atomic(target, text.encode("utf-8"), private=not public)
    return target


def render_report(verification: Verification, metrics: Metrics, public: bool) -> str:
    """The page as text."""
    from markupsafe import Markup

    c = verification.certificate
    facts, stages = list_facts(c), metrics.stages
    pictures = [
        ("What can survive", facts["survival"], draw_hundred(100 * c.survival_bound, "")),
        *_draw_trade_off(c),
    ]
    if public:  # of the released model alone, on retained and test data
        stages = [stage for stage in stages if stage.stage.startswith("after")][-1:]
    columns = _PUBLIC_COLUMNS if public else _COLUMNS
    return (
        _make_environment()
        .get_template("report.html.j2")
        .render(
            c=c,
            public=public,
            checked=verification.checked,
            unchecked=[line for line in verification.unchecked if not line.startswith(OTHER_FILES)],
            facts=facts,
            unseen=name_unseen(c),
            guess=round_up(50 * (1 + _find_distance(c)), 4),
            key="nobody" if c.signature is None else fingerprint(c.signature.public_key),
            pictures=[(title, words, Markup(drawn)) for title, words, drawn in pictures],
            stages=[(s.stage, [_show(getattr(s, name)) for name in columns]) for s in stages],
            cost={} if public else metrics.cost,
            columns=columns,
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
    drawn = draw_lines(lines, words, "epsilon", "delta")
    return [("Epsilon against delta", words, drawn)]


def _read_metrics(path: Path) -> Metrics:
    if not path.exists():
        return Metrics()
    try:
        return Metrics.model_validate_json(read_limited(path, MAX_BYTES, "metrics"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = f"{path} is not usable: {where} {first['msg']}"
        raise CertificateError(clean(said)) from None


def _show(accuracy: float | None) -> str:
    return "–" if accuracy is None or math.isnan(accuracy) else f"{100 * accuracy:.2f} %"


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
