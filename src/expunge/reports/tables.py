"""The tables of a report as plain rows: what a template prints, and nothing it has to compute."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

from expunge.certificates.certificate import Certificate
from expunge.certificates.record import Trace
from expunge.errors import InputError
from expunge.recipes import describe_fields
from expunge.reports.metrics import CENTRE, OLD, RETRAINING, STAGES, Arm, Metrics, Stage

MOST_ROWS = 200
FEW = 100  # of fewer samples an accuracy is told as a count


class Fact(NamedTuple):
    """One line of a table of facts."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class AuditTable:
    """The audit's verdict in one sentence, whether it contradicts, and every figure."""

    verdict: str
    contradicts: bool
    rows: list[Fact]


def format_exact(value: object) -> str:
    """A value as the certificate's JSON has it, so that it can be compared digit by digit.

    >>> format_exact(1e-5), format_exact(None), format_exact((0.1, 0.3, 0.2)), format_exact("inf")
    ('1e-05', 'none', '0.1 to 0.3 (3 values)', '∞ (no clip)')
    """
    match value:
        case None:
            return "none"
        case "inf":
            return "∞ (no clip)"
        case bool():
            return "yes" if value else "no"
        case tuple() | list():
            numbers = cast(Sequence[float], value)
            return f"{min(numbers)!r} to {max(numbers)!r} ({len(numbers)} values)"
        case float() | int():
            return repr(value)
        case _:
            return str(value)


def format_percent(value: float | None, count: int | None = None) -> str:
    """A fraction with one decimal, of fewer than a hundred the count; a dash without a measurement.

    >>> format_percent(0.8734), format_percent(29 / 30, 30), format_percent(None)
    ('87.3 %', '29 of 30', '–')
    """
    if value is not None and count is not None and 0 < count < FEW:
        return f"{round(value * count)} of {count}"
    return "–" if value is None else f"{100 * value:.1f} %"


def format_odds(chance: float) -> str:
    """A small probability as "1 in N", never smaller than it is.

    >>> format_odds(1e-5), format_odds(0.3), format_odds(3e-11)
    ('1 in 100,000', '1 in 3', '1 in 33,333,333,333')
    """
    return f"1 in {math.floor(1 / chance * (1 + 1e-12)):,}"


def describe_items(items: Mapping[str, object]) -> list[Fact]:
    """A mapping as rows, with words for names.

    >>> describe_items({"retraining_seconds": 41.0, "audit": {"trials": [1, 2]}})
    [Fact(name='retraining seconds', value='41.0', note=''),
     Fact(name='audit.trials', value='1, 2', note='')]
    """
    return [row._replace(name=row.name.replace("_", " ")) for row in _list_rows(items)]


def describe_recipe(certificate: Certificate) -> list[Fact]:
    """Every parameter by its name, with what it means."""
    given = certificate.recipe.model_dump()
    return [
        Fact(p.name, "not used" if (v := given[p.name]) is None else format_exact(v), p.meaning)
        for p in describe_fields(certificate.recipe.method)
    ]


def describe_trace(trace: Trace, certificate: Certificate) -> list[Fact]:
    """What was clipped, and the realised noise in units of what its σ predicts.

    ‖ξ‖/σ has mean about √(d - 1/2) and standard deviation about 1/√2.
    """
    if len(trace) == 0:
        return []
    root = math.sqrt(certificate.parameters - 0.5)
    ratios = [n / (s * root) for n, s in zip(trace.noise_norm, trace.noise_std, strict=True) if s]
    clipped = sum(factor < 1 for factor in trace.clip_factor)
    facts = [
        Fact("Steps in which a gradient was clipped", f"{clipped} of {len(trace)}"),
        Fact(
            "Gradients that were not finite",
            str(sum(trace.nonfinite)),
            "they count as zero, which keeps the guarantee",
        ),
    ]
    if ratios:
        mean, spread = statistics.fmean(ratios), 1 / (math.sqrt(2 * len(ratios)) * root)
        note = f"expected 1 ± {spread:.2g} (one standard deviation)"
        facts.append(Fact("Realised noise in units of the expected norm", f"{mean:.6f}", note))
    return facts


def order_stages(rows: Sequence[Stage], own: str) -> list[Stage]:
    """The old model, the certified run, then arm by arm, each from before to after.

    >>> names = [("after noise", "b"), ("after noise", None), ("before", None)]
    >>> rows = [Stage(stage=stage, arm=arm) for stage, arm in names]
    >>> [(row.arm, row.stage) for row in order_stages(rows, "a")]
    [(None, 'before'), (None, 'after noise'), ('b', 'after noise')]
    """
    names = [OLD, None, own, *(row.arm for row in rows)]
    stages = [*STAGES, *(row.stage for row in rows)]
    return sorted(rows, key=lambda row: (names.index(row.arm), stages.index(row.stage)))


def compare_costs(metrics: Metrics) -> list[tuple[Arm, str]]:
    """Every arm, and its cost in units of the retraining arm where both are known."""
    arms = metrics.arms
    base = next((a.gradient_evaluations for a in arms if a.arm == RETRAINING), None)
    return [
        (a, "–" if not base or (n := a.gradient_evaluations) is None else f"{n / base:.3g} ×")
        for a in arms
    ]


def find_missing(metrics: Metrics) -> list[str]:
    """Controls that were not measured at all."""
    names = {row.arm for row in (*metrics.arms, *metrics.stages)}
    return [name for name in (RETRAINING, CENTRE) if name not in names]


def describe_audit(audit: Mapping[str, Any], certificate: Certificate) -> AuditTable:
    """Whether the audit's lower bound leaves the certificate standing, and all of its figures."""
    lower, confidence, claimed, delta = (
        _read_number(audit, key)
        for key in ("epsilon_lower", "confidence", "epsilon_certified", "delta")
    )
    told, certified = audit.get("contradicts") is True, f"{certificate.epsilon:.6g} is certified"
    # A bound at a larger δ is one at the certified δ too; a bound at a smaller δ is none.
    comparable = delta is None or delta >= certificate.delta
    exceeds = lower is not None and comparable and lower > certificate.epsilon
    found = "" if lower is None else f"at least {lower:.6g}"
    found += "" if confidence is None else f" with confidence {confidence:g}"
    if exceeds:
        verdict = (
            f"The audit contradicts the certificate: epsilon is {found}, but {certified}. "
            "Do not rely on this certificate."
        )
    elif told:
        verdict = f"The audit contradicts the certificate: {audit.get('verdict') or 'see below'}"
    elif lower is None:
        verdict = "The audit states no lower bound on epsilon."
    else:
        verdict = (
            f"The audit does not contradict the certificate: it finds epsilon to be {found}, and "
            f"{certified}. An attack that finds less proves nothing more; the theorem does."
        )
    if claimed is not None and not math.isclose(claimed, certificate.epsilon, rel_tol=1e-6):
        verdict += f" The audit was made for another claim: epsilon = {claimed:.6g}."
    return AuditTable(verdict, told or exceeds, _list_rows(audit))


def _read_number(audit: Mapping[str, Any], key: str) -> float | None:
    value = audit.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError.of(f"audit.{key}", value, "a finite number")
    return float(value)


def _list_rows(items: Mapping[str, object]) -> list[Fact]:
    rows = list(islice(_flatten("", items), MOST_ROWS + 1))
    if len(rows) > MOST_ROWS:
        rows[-1] = Fact("…", "more figures are in the file")
    return rows


def _flatten(prefix: str, value: object) -> Iterator[Fact]:
    """Nested figures as ``outer.inner`` rows; long lists by their length only."""
    match value:
        case Mapping():
            for key, item in cast(Mapping[str, object], value).items():
                yield from _flatten(f"{prefix}.{key}" if prefix else key, item)
        case list() | tuple():
            items = cast(Sequence[object], value)
            short = len(items) <= 8 and not any(isinstance(i, Mapping | list) for i in items)
            shown = ", ".join(map(format_exact, items)) if short else f"{len(items)} values"
            yield Fact(prefix, shown or "none")
        case _:
            yield Fact(prefix, format_exact(value))
