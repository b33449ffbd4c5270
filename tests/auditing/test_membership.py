"""Membership inference: curves, the null, what a certificate allows, and digits end to end."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import special
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import cross_entropy

from expunge import (
    CertificateError,
    GradientClipping,
    InputError,
    ModelClipping,
    OutputPerturbation,
    SeededNoise,
    calibrate,
)
from expunge.auditing.membership import (
    Signals,
    bound_roc,
    examine,
    measure_attack,
    read_odds,
    run_shadows,
    save_membership,
    score_ratio,
    trace_roc,
)
from expunge.noisy.run import unlearn
from expunge.tasks import digits

torch.set_num_threads(1)
RECIPE = calibrate(
    lambda sigma: GradientClipping(1.0, 1.0, 0.05, 4.0, 5, sigma), epsilon=1.0, delta=1e-5
)


def area(false, true):
    return float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2))


# Curves and the null


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_the_curve_is_scikit_learns_with_and_without_ties(levels):
    rng = np.random.default_rng(levels)
    scores = rng.integers(levels, size=(7, 60)).astype(float)
    members = rng.random(scores.shape) < 0.3 + 0.4 * scores / levels
    false, true = trace_roc(scores, members)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert area(false, true) == pytest.approx(roc_auc_score(members.ravel(), scores.ravel()))


def null_signals(rng, K=12, m=80):
    """Hard and easy candidates, good and bad runs, and coins that nothing depends on."""
    members = rng.random((K, m)) < 0.5
    signal = 3 * rng.normal(size=(1, m)) + rng.normal(size=(K, 1)) + rng.normal(size=(K, m))
    return signal, members


def test_the_ratio_is_fair_to_a_model_that_never_saw_the_coins():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        signal, members = null_signals(rng)
        found.append(area(*trace_roc(score_ratio(signal, members), members)))
    assert abs(np.mean(found) - 0.5) < 4 * np.std(found) / math.sqrt(200)
    assert np.std(found) < 0.05


def test_intervals_cover_a_half_under_the_null_and_not_under_a_signal():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        signal, members = null_signals(rng)
        low, high = measure_attack(
            score_ratio(signal, members), members, np.array([0.1]), 80, rng
        ).auc_interval
        covered += low <= 0.5 <= high
    assert covered >= 33
    signal, members = null_signals(rng)
    told = score_ratio(signal + 1.5 * members, members)
    assert measure_attack(told, members, np.array([0.1]), 80, rng).auc_interval[0] > 0.6


def test_the_ratio_sees_each_candidate_beside_itself():
    """Members move by one where candidates differ by thirty: a global threshold sees nothing."""
    rng = np.random.default_rng(2)
    members = rng.random((16, 100)) < 0.5
    signal = 30 * rng.normal(size=(1, 100)) + members + 0.3 * rng.normal(size=members.shape)
    assert area(*trace_roc(score_ratio(signal, members), members)) > 0.95
    assert area(*trace_roc(signal, members)) < 0.55


def test_a_runs_own_label_is_not_used_against_it():
    rng = np.random.default_rng(3)
    signal, members = null_signals(rng, 10, 4000)
    before = score_ratio(signal, members)
    members[4, 17] = not members[4, 17]
    after = score_ratio(signal, members)
    assert after[4, 17] == pytest.approx(before[4, 17], abs=0.02)
    assert abs(after[5, 17] - before[5, 17]) > 0.02


# What is allowed


def test_allowed_curves_of_one_gaussian_agree_both_ways():
    fpr = np.geomspace(1e-4, 1, 40)
    exact = bound_roc(OutputPerturbation(1.0, 1.6), fpr)
    general = bound_roc(ModelClipping(1.0, 0.1, 0.0, 1.6, 1), fpr)
    assert np.allclose(exact, special.ndtr(special.ndtri(fpr) + 1.25))
    assert np.all(general >= exact - 1e-12)
    assert np.all(general <= exact + 0.01)
    assert np.all(np.diff(general) >= 0)


def test_the_best_attack_on_a_gaussian_attains_what_is_allowed():
    rng = np.random.default_rng(4)
    members = rng.random((1, 200_000)) < 0.5
    scores = rng.normal(size=members.shape) + 1.25 * members
    fpr = np.array([0.01, 0.1, 0.5])
    allowed = bound_roc(OutputPerturbation(1.0, 1.6), fpr)
    attained = measure_attack(scores, members, fpr, 2, rng).roc
    assert np.allclose(attained, allowed, atol=0.01)


# Digits, end to end


def build(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def learn(model, x, y, steps=40, rate=0.02):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def found():
    """An overfitted net on a hundred digits; a fifth of the candidates have a wrong label."""
    task = digits.load()
    x, y = task.train.inputs.flatten(1).float() / 8 - 1, task.train.targets.clone()
    g = torch.Generator().manual_seed(0)
    kept, forgotten = slice(0, 100), slice(300, 420)
    wrong = torch.rand(120, generator=g) < 0.2
    y[forgotten][wrong] = torch.randint(10, (int(wrong.sum()),), generator=g)
    rx, ry, cx, cy = x[kept], y[kept], x[forgotten], y[forgotten]

    def train(members, seed):
        return learn(build(seed), torch.cat([rx, cx[members]]), torch.cat([ry, cy[members]]))

    def forget(shadow, start="model"):
        run = unlearn(
            shadow.original,
            [(rx, ry)],
            RECIPE,
            loss_fn=cross_entropy,
            noise=SeededNoise(shadow.seed),
            centre="zero",
            start=start,
        )
        return learn(run.model, rx, ry)

    arms = {
        "unlearned": forget,
        "retrained": lambda shadow: learn(build(shadow.seed + 1), rx, ry),
        "centre": lambda shadow: forget(shadow, "centre"),
        "fine-tuned only": lambda s: learn(copy.deepcopy(s.original), rx, ry, 5, 1e-3),
    }
    return examine(run_shadows(train, arms, cx, cy, shadows=12), RECIPE, resamples=100)


def test_the_original_model_is_found_out(found):
    attacks = found.attacks["original"]
    assert attacks["u-lira"].auc_interval[0] > 0.6
    assert attacks["loss"].auc_interval[0] > 0.6
    assert attacks["u-lira"].auc > attacks["loss"].auc > 0.5
    assert attacks["u-lira"].tpr_at_1_percent > 0.1
    assert attacks["u-lira"].advantage_interval[0] > found.advantage_allowed


@pytest.mark.parametrize("arm", ["retrained", "unlearned", "centre"])
def test_models_that_forgot_are_not_found_out(found, arm):
    for name, attack in found.attacks[arm].items():
        assert attack.auc_interval[0] < 0.5 + found.advantage_allowed, name
        assert attack.auc < 0.58, name
        assert attack.tpr_at_1_percent < 0.05, name


def test_an_unlearning_that_forgets_nothing_is_found_out(found):
    assert found.attacks["fine-tuned only"]["u-lira"].auc_interval[0] > 0.65


def test_it_is_saved_and_merged(found, tmp_path):
    (tmp_path / "audit.json").write_text('{"epsilon_lower": 0.5}')
    save_membership(found, tmp_path)
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved["epsilon_lower"] == 0.5
    part = saved["membership"]
    assert part["shadows"] == 12
    assert part["attacks"]["original"]["u-lira"]["auc"] == found.attacks["original"]["u-lira"].auc
    assert len(part["fpr"]) == len(part["tpr_allowed"]) == 61
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(CertificateError, match="is not JSON"):
        save_membership(found, tmp_path)
    with pytest.raises(InputError, match="a directory that exists"):
        save_membership(found, tmp_path / "none")


# Refusals


def test_models_that_the_attack_cannot_read_are_refused():
    x, y = torch.zeros(3, 4), torch.tensor([0, 1, 1])
    with pytest.raises(InputError, match="shape of the model's output is"):
        read_odds(nn.Linear(4, 1), x, y)
    with pytest.raises(InputError, match=r"shape .* is \(3, 2, 2\)"):
        read_odds(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))), x, y)
    with pytest.raises(InputError, match="output is 'dict'; it must be logits"):
        read_odds(Wrapped(dict), x, y)
    with pytest.raises(InputError, match="not finite"):
        read_odds(nn.Linear(4, 2), x + math.nan, y)
    with pytest.raises(InputError, match="targets must be one class number"):
        read_odds(nn.Linear(4, 2), x, y + 5)


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.body, self.wrap = nn.Linear(4, 2), wrap

    def forward(self, x):
        return self.wrap(logits=self.body(x))


def test_odds_are_the_textbooks_and_the_mode_is_kept():
    model = Wrapped(SimpleNamespace).train()
    x, y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2
    odds = read_odds(model, x, y)
    p = model.body(x).double().softmax(1).detach()
    own = p[torch.arange(9), y].numpy()
    assert np.allclose(odds, np.log(own / (1 - own)), atol=1e-5)
    assert np.allclose(np.log1p(np.exp(-odds)), -np.log(own), atol=1e-6), "the loss, from the odds"
    assert model.training


def test_unusable_shadow_runs_are_refused():
    x, y = torch.zeros(3, 4), torch.tensor([0, 1, 1])

    def train(members, seed):
        return nn.Linear(4, 2)

    with pytest.raises(InputError, match="shadows is 3; it must be at least 4"):
        run_shadows(train, {}, x, y, shadows=3)
    with pytest.raises(InputError, match="names other than 'original'"):
        run_shadows(train, {"original": lambda s: s.original}, x, y)
    with pytest.raises(InputError, match="number of targets is 2"):
        run_shadows(train, {}, x, y[:2])
    all_in = np.ones((4, 3), bool)
    one = {"original": np.zeros((4, 3))}
    with pytest.raises(InputError, match="only one kind"):
        examine(Signals(all_in, one), RECIPE)
