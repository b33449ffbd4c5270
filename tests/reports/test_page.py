"""The report: for two readers, self-contained, true to the certificate, and silent in public."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpmath
import pytest

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import PublicTensors, RunRecord
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.wording import METHOD_WORDS
from expunge.errors import InputError, VerificationError
from expunge.recipes import METHODS, Execution, GradientClipping
from expunge.reports.page import TEMPLATES, render_report
from expunge.reports.tables import format_exact
from handmade import GRADIENT, MODEL, OUTPUT, PARAMETERS, RECIPES, make_record, make_trace
from pages import AUDIT, METRICS, Page


def render(recipe: Any = GRADIENT, public: bool = False, **changes: Any) -> tuple[str, Certificate]:
    record = make_record(recipe, **changes)
    certificate = certify(record, delta=1e-5)
    return render_report(record, certificate, METRICS, AUDIT, public=public), certificate


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("metrics", [None, METRICS], ids=["bare", "full"])
def test_the_page_is_sound_html(name: str, public: bool, metrics: Any) -> None:
    record = make_record(RECIPES[name])
    certificate = certify(record, delta=1e-5)
    page = Page(render_report(record, certificate, metrics, public=public))
    assert page.problems == []
    assert page.tags["table"] >= 6


BEFORE = Path(__file__).parents[1] / "data" / "before"


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("folder", sorted(path.name for path in BEFORE.iterdir()))
def test_every_method_has_its_words(folder: str, public: bool) -> None:
    """Certificates and records as an earlier version wrote them, of all methods."""
    record = RunRecord.load(BEFORE / folder / "record.json")
    certificate = Certificate.load(BEFORE / folder / "certificate.json")
    page = Page(render_report(record, certificate, public=public))
    assert page.problems == []
    assert METHOD_WORDS[certificate.recipe.method] in page.text


def test_no_method_is_without_words() -> None:
    assert METHODS.keys() == METHOD_WORDS.keys()


def test_the_checker_finds_what_is_wrong() -> None:
    bad = """<html><body onload="x()"><h1>a</h1><h3 id="i">b</h3><p id="i"><script src="http://x/">
    </script><table><tr><th>1</th></tr></table><a href="https://x">y</a></div></body></html>"""
    found = " ".join(Page(bad).problems)
    for part in ("onload", "h1 is followed by h3", "'i' is used twice", "<script>", "caption",
                 "scope", "link to", "closes nothing", "fetched", "security policy",
                 "lang"):  # fmt: skip
        assert part in found


def list_leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in list_leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in list_leaves(item)]
    return [value]


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_every_number_and_name_of_the_certificate_is_shown(name: str, public: bool) -> None:
    record = make_record(
        RECIPES[name], buffers="frozen", buffer_names=("norm.mean",), centre="cd" * 32,
        public=PublicTensors(("embed.weight", "norm.mean"), True, "file base", "ab" * 32),
        start="centre" if name == "retraining" else "model",
    )  # fmt: skip
    certificate = certify(record, delta=1e-5)
    signed = certificate.sign(generate_key_pair()[0])
    text = render_report(None if public else record, signed, METRICS, public=public)
    shown = " ".join(Page(text).text.split())
    plain = signed.model_dump(mode="json")
    told_in_words = [
        plain["recipe"].pop("method"), plain.pop("start"), plain.pop("releasable"),
    ]  # fmt: skip
    checks = [
        plain["data"].pop("checked"), plain["finetune"].pop("checked"),
        plain.pop("accepted_unchecked"), plain["weights"]["public"].pop("compared"),
    ]  # fmt: skip
    missing = [
        leaf for leaf in list_leaves(plain) if leaf is not None and format_exact(leaf) not in shown
    ]
    assert missing == []
    assert told_in_words[1:] == [record.start, True]
    assert checks == [True, True, False, True]
    assert "file base, compared: embed.weight" in shown
    assert shown.count("not checked") == 0 < shown.count("checked")
    assert "May be released" in shown
    assert told_in_words[0].split("-")[0] in shown


def test_what_was_not_checked_or_compared_is_said() -> None:
    public = PublicTensors(("embed.weight",), False, "declared public by the operator", "ab" * 32)
    record = make_record(checked=False, public=public)
    refused = certify(record, delta=1e-5)
    page = " ".join(Page(render_report(record, refused)).text.split())
    assert "✕ Not for release" in page
    assert "declared public by the operator, not compared: embed.weight" in page
    accepted = certify(record, delta=1e-5, accept_unchecked=True)
    page = " ".join(Page(render_report(record, accepted)).text.split())
    assert "✓ May be released" in page
    assert "not checked accepted by the operator" in page
    assert all(warning in page for warning in accepted.warnings)


def test_bounds_in_words_are_never_below_the_truth() -> None:
    for recipe in (GRADIENT, OUTPUT, MODEL):
        text, certificate = render(recipe)
        words = " ".join(Page(text).text.split())
        times = re.search(r"at most ([\d.]+) times as likely", words)
        guess = re.search(r"is right in at most ([\d.]+) % of cases", words)
        survive = re.search(r"is more than ([\d.]+) percentage points", words)
        assert times is not None
        assert guess is not None
        assert survive is not None
        with mpmath.workdps(40):
            truth = mpmath.exp(mpmath.mpf(certificate.epsilon))
            assert truth <= mpmath.mpf(times[1]) <= truth * mpmath.mpf("1.001")
            if certificate.mu is not None:
                best = 100 * mpmath.ncdf(mpmath.mpf(certificate.mu) / 2)
                assert best <= mpmath.mpf(guess[1]) <= best * mpmath.mpf("1.001")
            assert mpmath.mpf(survive[1]) >= 100 * mpmath.mpf(certificate.survival_bound)
            assert 50 < float(guess[1]) < 100


def test_weak_and_unreleasable_runs_are_called_that() -> None:
    weak, _ = render(dataclasses.replace(OUTPUT, noise_std=0.0067), execution=Execution())
    assert "This is a weak guarantee" in weak
    strong, _ = render()
    assert "weak guarantee" not in strong
    assert "May be released" in strong
    assert "Not signed" in strong
    seeded = {"source": "seeded", "generator": "AES-256-CTR", "releasable": False, "seed": 7}
    page, certificate = render(noise=seeded)
    assert "✕ Not for release" in page
    assert "May be released" not in page
    assert certificate.warnings[0] in page


def test_same_input_same_bytes_in_any_process() -> None:
    script = (
        "import sys, hashlib; sys.path += ['.', 'tests/helpers']\n"
        "import tests.reports.test_page as t\n"
        "print(hashlib.sha256(t.render()[0].encode()).hexdigest())\n"
        "assert 'torch' not in sys.modules"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[2], env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(hashes) == 1


def test_the_public_page_is_a_function_of_what_may_be_published() -> None:
    """Whatever the old model, the trace, other runs and the audit were: the same bytes."""
    record = make_record()
    certificate = certify(record, delta=1e-5)
    expected = render_report(None, certificate, METRICS, public=True)
    other = json.loads(json.dumps(METRICS))
    other["stages"][0] |= {"retain": 0.5, "test": 0.4, "forget": 0.1}
    for row in other["stages"]:
        row["forget"] = 0.123
    other["stages"].append({"stage": "before", "arm": "gradient-clipping", "test": 0.77})
    other["stages"].append({"stage": "after noise", "arm": "model-clipping", "test": 0.66})
    other |= {"curves": [], "arms": [], "cost": {"old_loss": 1.5}}
    trace = dataclasses.replace(make_trace(GRADIENT), model_norm=(0.1, 0.2, 0.3, 0.4, 0.5))
    changed = dataclasses.replace(record, trace=trace, weights_before="d" * 64)
    assert render_report(changed, certificate, other, AUDIT, public=True) == expected
    assert "91.5 %" in expected, "test accuracy of the released model stays"
    for hidden in (
        "93.0 %",
        "89.8 %",
        "95.1 %",
        "Forgotten",
        "Norms at every",
        "41.5",
        "worst pair",
    ):
        assert hidden not in expected
        operator = render_report(record, certificate, METRICS, AUDIT)
        assert hidden in operator
    assert "Keep this page and record.json with the operator" in operator
    assert "Public version" in expected


def test_another_run_of_the_same_method_is_not_taken_for_this_one() -> None:
    certificate = certify(make_record(), delta=1e-5)
    rows = [
        {"stage": "before", "arm": "old model", "test": 0.9512},
        {"stage": "after noise", "arm": "gradient-clipping", "test": 0.1234},
        {"stage": "after noise", "arm": "around public centre", "test": 0.8771},
    ]
    metrics = {"stages": rows, "arm": "around public centre"}
    public = render_report(None, certificate, metrics, public=True)
    assert "87.7 %" in public
    assert "12.3 %" not in public
    assert "95.1 %" not in public
    operator = render_report(make_record(), certificate, metrics)
    drawn = re.search(r"On test data: [^<]*", operator)
    assert drawn is not None
    assert drawn[0] == "On test data: before 95.1 %, after noise 87.7 %."


def test_several_rows_for_one_stage_are_several_runs_and_not_published() -> None:
    certificate = certify(make_record(), delta=1e-5)
    rows = [{"stage": "after noise", "test": 0.1234}, {"stage": "after noise", "test": 0.2345}]
    page = render_report(None, certificate, {"stages": rows}, public=True)
    assert "12.3 %" not in page
    assert "that may be published" in page


HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


def test_hostile_text_stays_text() -> None:
    row = {"stage": HOSTILE, "arm": HOSTILE, "test": 0.5}
    metrics = {
        "title": HOSTILE, "task": HOSTILE, "stages": [row, row], "cost": {HOSTILE: HOSTILE},
        "curves": [{"name": HOSTILE, "x": [0, 1], "y": [1, 2], "x_label": HOSTILE,
                    "y_label": HOSTILE}] * 2,
        "arms": [{"arm": HOSTILE, "gradient_evaluations": n, "test": 0.5} for n in (1, 2)],
    }  # fmt: skip
    record = make_record(
        device=HOSTILE, dtype=HOSTILE, versions={HOSTILE: HOSTILE}, frozen="ab" * 32,
        frozen_names=(HOSTILE,), buffers="frozen", buffer_names=(HOSTILE,),
    )  # fmt: skip
    certificate = certify(record, delta=1e-5)
    text = render_report(record, certificate, metrics, {HOSTILE: {HOSTILE: HOSTILE}})
    page = Page(text)
    assert page.problems == []
    assert page.text.count(HOSTILE) >= 15
    assert page.tags["script"] == page.tags["img"] == 0


def test_characters_that_hide_or_turn_around_text_are_replaced() -> None:
    certificate = certify(make_record(), delta=1e-5)
    text = render_report(make_record(), certificate, {"title": "a\0b\x1b\u202eevil\u2066 é ✓"})
    assert "<h1><bdi>a�b��evil� é ✓</bdi></h1>" in text
    with pytest.raises(InputError, match=r"metrics.title is 'a\\ud800'"):
        render_report(make_record(), certificate, {"title": "a\ud800"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: {"epsilon": c.epsilon / 2, "retrained": c.retrained.model_copy(
            update={"epsilon": c.epsilon / 2})}, "less than its recipe gives"),
        (lambda c: {"epsilon": c.epsilon / 2}, "are not those of retrained"),
        (lambda c: {"releasable": not c.releasable}, "do not follow"),
        (lambda c: {"warnings": ("all is well",)}, "do not follow"),
        (lambda c: {"scope": c.scope.model_copy(update={"not_covered": ()})}, "do not follow"),
        (lambda c: {"record": "0" * 64}, "not made from this record"),
    ],
)  # fmt: skip
def test_no_page_is_made_of_a_doctored_certificate(change: Any, sentence: str) -> None:
    record = make_record()
    honest = certify(record, delta=1e-5)
    doctored = honest.model_copy(update=change(honest))
    with pytest.raises(VerificationError, match="its digest is not that of its content"):
        render_report(record, doctored)
    sealed = doctored.model_copy(update={"digest": doctored.compute_digest()})
    with pytest.raises(VerificationError, match=sentence):
        render_report(record, sealed)


def test_signature_status() -> None:
    private, _ = generate_key_pair()
    record = make_record()
    signed = certify(record, delta=1e-5).sign(private)
    assert signed.signature is not None
    page = render_report(record, signed)
    assert "Signed with Ed25519." in page
    assert "Not signed" not in page
    forged = signed.signature.model_copy(update={"value": "0" * 128})
    with pytest.raises(VerificationError, match="signature does not match"):
        render_report(record, signed.model_copy(update={"signature": forged}))


def test_audit_figures_and_contradiction() -> None:
    record = make_record()
    certificate = certify(record, delta=1e-5)
    fine = render_report(record, certificate, {}, AUDIT)
    assert "does not contradict the certificate" in fine
    assert "50 values" in fine
    assert "made for another claim" in fine
    wrong = render_report(record, certificate, {}, {"epsilon_lower": certificate.epsilon * 1.01})
    assert "The audit contradicts the certificate" in wrong
    told = {"epsilon_lower": 0.1, "contradicts": True, "verdict": "repeated noise"}
    assert "contradicts the certificate: repeated noise" in render_report(
        record, certificate, {}, told
    )
    smaller = {"epsilon_lower": certificate.epsilon * 1.01, "delta": certificate.delta / 10}
    assert "does not contradict" in render_report(record, certificate, {}, smaller)
    assert "was not audited" in render_report(record, certificate)
    with pytest.raises(InputError, match=r"audit\.epsilon_lower is 'much'"):
        render_report(record, certificate, {}, {"epsilon_lower": "much"})


def test_costs_and_controls() -> None:
    text, certificate = render()
    words = " ".join(Page(text).text.split())
    assert "0.25 ×" in text
    assert "Not measured here" not in words
    assert str(certificate.gradient_evaluations + 10240) in words
    bare = render_report(make_record(), certify(make_record(), delta=1e-5))
    assert "Not measured here: retraining and centre control." in " ".join(Page(bare).text.split())


def test_the_trace_is_told_as_it_was() -> None:
    trace = make_trace(GRADIENT)
    sigma, root = 0.2, math.sqrt(PARAMETERS - 0.5)
    mean = sum(n / (sigma * root) for n in trace.noise_norm) / len(trace)
    text, _ = render()
    assert f"{mean:.6f}" in text
    assert "5 of 5" in text
    assert f"{max(trace.noise_norm):.6g}" in text
    nonfinite = dataclasses.replace(trace, nonfinite=(True, False, True, False, False))
    assert ">2 <small>they count as zero" in render(trace=nonfinite)[0]


def test_long_runs_make_light_pages() -> None:
    T = 5000
    recipe = GradientClipping(
        start_clip=0.05, grad_clip=1.0, learning_rate=[0.01 * (1 + t % 7) / 7 for t in range(T)],
        weight_decay=5.0, steps=T, noise_std=0.2,
    )  # fmt: skip
    text, certificate = render(recipe)
    assert len(certificate.schedule) == T
    assert "4800 more rows are in certificate.json" in text
    assert len(text) < 150_000
    assert Page(text).problems == []


def read_colours() -> list[dict[str, str]]:
    """The page's colours, light and dark."""
    css = (TEMPLATES / "charts.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{([^}]*)\}", css)
    found = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    assert [sorted(colours) for colours in found] == [sorted(found[0])] * 2
    return found


def contrast(first: str, second: str) -> float:
    """WCAG 2: (L1 + 0.05)/(L2 + 0.05) of the relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out(scheme: int) -> None:
    colours = read_colours()[scheme]
    paper = colours["paper"]
    texts = [(colours[name], paper) for name in ("ink", "soft", "link")]
    texts += [(colours[name], colours[f"{name}-panel"]) for name in ("good", "bad", "note")]
    texts += [(colours["soft"], colours["panel"]), (colours["ink"], colours["note-panel"])]
    assert min(contrast(*pair) for pair in texts) >= 4.5
    assert min(contrast(colours[f"s{n}"], paper) for n in range(4)) >= 3
