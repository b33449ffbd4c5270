"""What notebooks and print show of a guarantee and of a plan: small, and all of it visible."""

import re
from types import SimpleNamespace

import pytest

from expunge import guarantee, plan, recipes
from expunge.accounting.planning import Plan
from expunge.display import clean, round_up

GRADIENT = recipes.GradientClipping(0.01, 100.0, 1e-4, 10.0, 1, 0.02827)
RECIPES: dict[str, recipes.Recipe] = {
    "gradient-clipping": GRADIENT, "model-clipping": recipes.ModelClipping(0.5, 1e-3, 10.0, 0.5, 6),
    "output-perturbation": recipes.OutputPerturbation(0.01, 0.0746127),
    "retraining": recipes.Retraining(), "linear-model": recipes.LinearModel(),
    "shards": recipes.Sharding(8, 4),
}  # fmt: skip
ATTACKS = ["line\nanother\nand\na\nfourth", "\x1b[2Jcleared\x07", "\u202edesrever"]


def check(thing: object) -> None:
    text, shown = str(thing), SimpleNamespace()
    assert len(text.splitlines()) <= 10, text
    assert all(c.isprintable() or c == "\n" for c in text)
    thing._repr_pretty_(SimpleNamespace(text=lambda given: setattr(shown, "text", given)), False)
    assert shown.text == text, "a notebook shows what print does"


@pytest.mark.parametrize("attack", ATTACKS)
def test_words_of_a_guarantee_or_a_plan_move_no_cursor(attack: str) -> None:
    found = guarantee(GRADIENT, delta=1e-5)
    check(recipes.Guarantee(**{**vars(found), "theorem": attack, "compared_to": attack}))
    planned = plan(epsilon=1.0, delta=1e-5, parameters=1000)
    check(Plan(**{**vars(planned), "advice": attack}))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_guarantee_is_shown_rounded_to_the_safe_side(recipe: object) -> None:
    found = guarantee(recipe, delta=1e-5)
    check(found)
    shown = re.search(r"^  retrained +(\S+) +(\S+)", str(found), flags=re.MULTILINE)
    assert float(shown[1]) >= found.epsilon
    assert float(shown[2]) >= found.delta


def test_a_plan_shows_every_candidate_and_the_advice() -> None:
    found = plan(epsilon=1.0, delta=1e-5, parameters=20_042)
    check(found)
    assert all(candidate.method in str(found) for candidate in found.candidates)
    assert found.advice in str(found)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_s_words_are_one_line_of_visible_characters(attack: str) -> None:
    assert clean(attack).isprintable()
    assert clean(clean(attack)) == clean(attack)
    assert clean("plain – words") == "plain – words"


def test_an_infinite_bound_is_shown_as_one() -> None:
    assert round_up(float("inf")) == "Infinity"
