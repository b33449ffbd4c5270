"""The centre: a fresh initialisation by default, its certificate, its scale, what is refused."""

import dataclasses
import json
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from engine import GRADIENT, OUTPUT, flatten, make_batches, make_mlp
from expunge import (
    Initialisation,
    InputError,
    UnlearningError,
    certify,
    find_scale,
    plan,
    unlearn,
    verify,
)
from expunge.certificates.certificate import Certificate, parse
from expunge.certificates.record import CentreOrigin, RunRecord
from expunge.errors import CertificateError, VerificationError
from expunge.noisy.centre import find_centre
from expunge.noisy.fresh import draw_fresh
from expunge.noisy.model import copy_model
from expunge.noisy.noise import SeededNoise
from expunge.processes.weights import hash_weights

torch.set_num_threads(1)
DRAWN = "reset_parameters of every module"


def go(model=None, recipe=GRADIENT, **options):
    given = {"loss_fn": cross_entropy, "noise": SeededNoise(0)} | options
    return unlearn(make_mlp() if model is None else model, make_batches(), recipe, **given)


def draw(model, *given):
    return draw_fresh(copy_model(model, buffers="reset"), Initialisation(*given))


def test_the_default_is_a_fresh_initialisation_under_the_public_seed():
    run = go()
    assert run.record.origin == CentreOrigin("initialisation", "expunge", DRAWN)
    assert run.record.centre == hash_weights(draw(make_mlp()))
    stays = go(recipe=dataclasses.replace(OUTPUT, noise_std=1e-6), start="centre")
    expected = torch.cat([t.reshape(-1).double() for t in draw(make_mlp()).values()])
    assert float((flatten(stays.model) - expected).abs().max()) < 1e-4


def test_it_follows_from_architecture_and_seed_alone():
    old, other = make_mlp(), make_mlp()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3).add_(1)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = draw(old)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(12)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    two = draw(other)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert hash_weights(one) == hash_weights(two) != hash_weights(draw(old, "another"))
    assert hash_weights(draw(old, 7)) == hash_weights(draw(old, "7"))


def test_statistics_and_gains_are_fresh():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(4))
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.fill_(5.0)
    fresh = draw(model)
    assert bool((fresh["1.weight"] == 1).all())
    assert bool((fresh["2.weight"] == 1).all())
    assert bool((fresh["1.bias"] == 0).all())
    assert float(fresh["0.weight"].abs().max()) < 1
    assert bool((model[1].running_mean == 5).all())


def test_attention_starts_as_it_was_built():
    """Inner modules first: the outer one sets the bias of its projection to 0."""
    fresh = draw(nn.MultiheadAttention(8, 2))
    assert bool((fresh["out_proj.bias"] == 0).all())


def test_a_lora_adapter_starts_with_b_zero():
    import peft

    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(6, 6)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    held = {n: t for n, t in model.named_parameters() if not t.requires_grad}
    fresh = draw_fresh(copy_model(model, public=held), Initialisation())
    for name, tensor in fresh.items():
        assert bool((tensor == 0).all()) == ("lora_B" in name)
        assert bool((tensor != 3).all())


def test_a_factory_gives_the_centre():
    run = go(centre=Initialisation("mine", lambda: nn.Sequential(*make_mlp_layers())))
    assert run.record.origin == CentreOrigin("initialisation", "mine", "built by a factory")


def make_mlp_layers():
    return [
        type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m
        for m in make_mlp()
    ]


def test_zero_and_public_weights_are_told_apart():
    public = {name: torch.ones_like(t) for name, t in make_mlp().state_dict().items()}
    kinds = {c: go(centre=c).record.origin.kind for c in ("zero", "initialisation")}
    assert kinds == {"zero": "zero", "initialisation": "initialisation"}
    run = go(centre=public)
    assert run.record.origin == CentreOrigin("public weights")
    assert run.record.centre == hash_weights(public)


@pytest.mark.parametrize("centre", [None, 0, "fresh", "Zero", [1]])
def test_anything_else_is_refused(centre):
    with pytest.raises(InputError, match=r"centre is .*'initialisation', 'zero'"):
        go(centre=centre)


@pytest.mark.parametrize("seed", ["", True, 1.5, None, "two\nlines", "x" * 1001])
def test_a_seed_is_a_text_or_a_number(seed):
    with pytest.raises(InputError, match="seed is"):
        Initialisation(seed)


def test_what_has_no_reset_parameters_is_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.body(x) * self.scale

    with pytest.raises(UnlearningError, match=r"module itself \(Own\).*Initialisation\(build="):
        go(Own())
    go(Own(), centre=Initialisation(build=Own))
    go(Own(), centre="zero")


def test_the_certificate_says_which_seed_and_verifies(tmp_path):
    from safetensors.torch import save_file

    run = go(forget_ids=["f"], retain_ids=[f"r{i}" for i in range(24)])
    certificate = certify(run.record, delta=1e-5)
    origin = certificate.weights.origin
    assert (origin.kind, origin.seed, origin.drawn) == ("initialisation", "expunge", DRAWN)
    assert any("fresh initialisation" in told for told in certificate.scope.covered)
    assert "seed 'expunge'" in certificate.statement()
    save_file(run.model.state_dict(), tmp_path / "model.safetensors")
    certificate.save(tmp_path / "certificate.json")
    run.record.save(tmp_path / "record.json")
    verify(
        tmp_path / "certificate.json",
        tmp_path / "model.safetensors",
        record=tmp_path / "record.json",
    )
    assert Certificate.load(tmp_path / "certificate.json") == certificate
    assert RunRecord.load(tmp_path / "record.json").origin == run.record.origin


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "another"},
        {"kind": "zero", "seed": None, "drawn": None},
        {"kind": "zero"},
    ],
)
def test_a_certificate_with_another_centre_does_not_hold(tmp_path, changes):
    from safetensors.torch import save_file

    run = go()
    certificate = certify(run.record, delta=1e-5)
    save_file(run.model.state_dict(), tmp_path / "model.safetensors")
    plain = json.loads(certificate.to_bytes())
    plain["weights"]["origin"] |= changes
    path = tmp_path / "certificate.json"
    path.write_bytes(parse(json.dumps(plain).encode()).to_bytes())
    with pytest.raises(VerificationError, match=r"origin|scope"):
        verify(path)


def test_an_empty_origin_is_left_out():
    certificate = certify(go().record, delta=1e-5)
    plain = json.loads(certificate.to_bytes())
    plain["weights"]["origin"] = None
    with pytest.raises(CertificateError, match="origin is null"):
        parse(json.dumps(plain).encode())


def test_records_of_before_have_no_origin():
    record = dataclasses.replace(go(centre="zero").record, origin=None)
    assert "origin" not in record.to_dict()
    assert "origin" not in certify(record, delta=1e-5).model_dump()["weights"]


@pytest.mark.parametrize(
    ("kind", "seed", "drawn"),
    [("zero", "s", None), ("initialisation", None, DRAWN), ("old", None, None)],
)
def test_an_origin_agrees_with_itself(kind, seed, drawn):
    with pytest.raises(InputError, match="origin"):
        CentreOrigin(kind, seed, drawn)


def test_an_origin_agrees_with_the_hash_of_the_centre():
    record = go().record
    for changes in ({"centre": None}, {"origin": CentreOrigin("zero")}):
        with pytest.raises(UnlearningError, match=r"origin\.kind"):
            certify(dataclasses.replace(record, **changes), delta=1e-5)


# The noise that is left


def test_the_scale_is_a_tenth_of_the_smallest_layer():
    model = nn.Sequential(nn.Linear(100, 50), nn.LayerNorm(50), nn.Linear(50, 400))
    scale = find_scale(model)
    assert scale == pytest.approx(0.1 / math.sqrt(3 * 100), rel=0.1)
    assert find_scale(model, "zero") is None
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
    assert find_scale(model) == scale


def test_a_plan_leaves_that_much_noise():
    found = plan(epsilon=1.0, delta=1e-5, parameters=5000, scale=find_scale(nn.Linear(100, 49)))
    noisy = [c for c in found.candidates if c.method != "retraining"]
    assert all(c.noise_left <= 0.006 for c in noisy)


def test_zeros_alone_have_no_scale():
    layer = nn.Linear(3, 2)
    zeros = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    assert find_scale(layer, zeros) is None


def test_zero_with_gains_is_cautioned(caplog):
    with caplog.at_level(logging.WARNING, "expunge"):
        find_centre(copy_model(nn.LayerNorm(3)), "zero")
        assert "gains of 1 normalisations" in caplog.text
        caplog.clear()
        find_centre(copy_model(nn.Linear(3, 3)), "zero")
        find_centre(copy_model(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))), "initialisation")
        assert caplog.text == ""
