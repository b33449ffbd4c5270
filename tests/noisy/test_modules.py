"""The engine on modules that people use, each as it comes."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy, relu

from engine import equal, public_part, without_onednn
from expunge import GradientClipping, ModelClipping, OutputPerturbation, certify
from expunge.errors import UnlearningError
from expunge.noisy.fresh import Initialisation
from expunge.noisy.noise import SeededNoise
from expunge.noisy.run import unlearn
from expunge.processes.weights import hash_weights, save_weights

torch.set_num_threads(1)

GRADIENT = GradientClipping(
    start_clip=1.0, grad_clip=1.0, learning_rate=0.1, weight_decay=1.0, steps=3, noise_std=0.05
)
RECIPES = [
    GRADIENT,
    ModelClipping(model_clip=0.1, learning_rate=0.1, weight_decay=0.0, noise_std=0.05, steps=2),
    OutputPerturbation(start_clip=0.1, noise_std=0.05),
]


class Block(nn.Module):
    """A residual block with the normalisation it is given."""

    def __init__(self, width, norm):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([norm(width), norm(width)])

    def forward(self, x):
        y = relu(self.norms[0](self.first(x)))
        return relu(x + self.norms[1](self.second(y)))


class ResNet(nn.Module):
    def __init__(self, norm, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width, norm), Block(width, norm))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(relu(self.stem(x))).mean((2, 3)))


class TiedAutoencoder(nn.Module):
    """The decoder's weight is the encoder's; both names are in the state_dict."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 12)
        self.decoder = nn.Linear(12, 12)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.decoder(relu(self.encoder(x.flatten(1)[:, :12]))))


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        y = avg_pool2d(relu(self.first(x)), 2)
        return self.head(relu(self.second(y)).mean((2, 3)))


def make_weight_norm():
    parametrize = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        nn.Flatten(), parametrize(nn.Linear(192, 8)), nn.ReLU(), parametrize(nn.Linear(8, 3))
    )


def make_frozen_batch_norm():
    model = ResNet(nn.BatchNorm2d)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.requires_grad_(False).eval()
    return model


BUILDERS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3)),
    "cnn": SmallCNN,
    "resnet-groupnorm": lambda: ResNet(lambda width: nn.GroupNorm(2, width)),
    "resnet-frozen-batchnorm": make_frozen_batch_norm,
    "tied": TiedAutoencoder,
    "weight-norm": make_weight_norm,
}


def build(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()


def make_images(count=4):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 8, 8, generator=g)
    return [(x, torch.arange(count) % 3)]


def make_gpt2(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    if seed is None:
        return GPT2LMHeadModel(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def make_text():
    ids = torch.randint(0, 32, (4, 10), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]


def check(run, model, fresh):
    """For every module: a plain state_dict, all that is certified moved, a certificate."""
    assert run.model.state_dict().keys() == model.state_dict().keys()
    fresh.load_state_dict(run.model.state_dict())
    assert equal(fresh, run.model)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    after = dict(run.model.named_parameters())
    assert run.record.parameters == sum(p.numel() for p in trainable.values())
    for name, p in model.named_parameters():
        assert torch.equal(after[name], p) != (name in trainable)
        assert bool(torch.isfinite(after[name]).all())
    assert run.record.weights_after == hash_weights(run.model.state_dict())
    assert certify(run.record, delta=1e-5).epsilon > 0


@pytest.mark.parametrize("recipe", RECIPES, ids=["gradient", "model", "output"])
@pytest.mark.parametrize("name", BUILDERS)
def test_module(name, recipe, tmp_path):
    model = build(name)
    given = {"loss_fn": cross_entropy, "public": public_part(build(name))}
    centre = "zero" if name == "weight-norm" else "initialisation"
    run = unlearn(model, make_images(), recipe, centre=centre, **given)
    check(run, model, build(name))
    save_weights(tmp_path / "model.safetensors", run.model.state_dict())
    from safetensors.torch import load_file

    again = build(name)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = make_images()[0][0]
    assert torch.equal(again(x), run.model(x))


def test_tied_weights_are_counted_and_drawn_once():
    model = build("tied")
    run = unlearn(model, make_images(), GRADIENT, loss_fn=cross_entropy, noise=SeededNoise(0))
    assert run.record.parameters == 12 * 12 + 12 + 12 + 12 * 3 + 3
    assert run.model.decoder.weight is run.model.encoder.weight


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_old_weights_under_a_public_name_are_refused(kind):
    """A copy would keep them: the view of a trained weight that is not trained itself."""
    model = nn.Linear(3, 2)
    view = model.weight.detach().view(-1)[2:4]
    if kind == "parameter":
        model.kept = nn.Parameter(view, requires_grad=False)
    else:
        model.register_buffer("kept", view)
    batches = [(torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))]
    recipe = OutputPerturbation(start_clip=1.0, noise_std=1.0)
    with pytest.raises(UnlearningError, match="weight and kept share memory"):
        unlearn(model, batches, recipe, public=["kept"])
    with torch.no_grad():
        model.kept = (
            nn.Parameter(view.clone(), requires_grad=False)
            if kind == "parameter"
            else (view.clone())
        )
    unlearn(model, batches, recipe, public=["kept"])


def test_frozen_batch_norm_keeps_its_public_statistics():
    model = build("resnet-frozen-batchnorm")
    public = public_part(model)
    run = unlearn(model, make_images(), GRADIENT, loss_fn=cross_entropy, public=public)
    assert run.record.buffers == "frozen"
    assert len(run.record.buffer_names) == 4 * 3
    assert len(run.record.public.names) == 4 * 2 + 4 * 3


@pytest.mark.parametrize("recipe", RECIPES, ids=["gradient", "model", "output"])
def test_gpt2_with_its_own_loss(recipe):
    model = make_gpt2()
    build = Initialisation(build=lambda: make_gpt2(None))
    run = unlearn(model, make_text(), recipe, centre=build)
    check(run, model, make_gpt2())
    assert run.model.lm_head.weight is run.model.transformer.wte.weight


def test_gpt2_in_bfloat16():
    model = make_gpt2().to(torch.bfloat16)
    with without_onednn():
        run = unlearn(model, make_text(), GRADIENT, centre="zero")
    check(run, model, make_gpt2().to(torch.bfloat16))
    assert run.record.dtype == "bfloat16"


def make_lora():
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        return get_peft_model(make_gpt2(), LoraConfig(r=2, target_modules=["c_attn"]))


def train_adapter(model):
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if "lora" in name:
                p.add_(torch.full_like(p, 0.3))
    return trained


def test_lora_adapter_around_the_zero_adapter():
    """B = 0 and A its public start: the centre is the base model itself."""
    fresh = make_lora()
    model = train_adapter(fresh)
    run = unlearn(model, make_text(), GRADIENT, centre=fresh.state_dict(), public=fresh)
    check(run, model, make_lora())
    assert run.record.public.compared
    assert all("lora" not in name for name in run.record.public.names)
    assert run.record.parameters == 2 * (2 * 16 + 48 * 2)
    assert run.record.centre is not None
    assert run.record.noise["releasable"]


def test_lora_restart_without_noise_is_the_base_model():
    fresh = make_lora().eval()
    still = replace(GRADIENT, start_clip=0.0, grad_clip=0.0, noise_std=0.0)
    start, text = fresh.state_dict(), make_text()
    run = unlearn(train_adapter(fresh), text, still, centre=start, public=fresh)
    ids = make_text()[0]["input_ids"]
    with torch.no_grad():
        base = make_gpt2().eval()(ids).logits
        assert torch.equal(run.model.eval()(ids).logits, base)
        assert not torch.allclose(train_adapter(fresh)(ids).logits, base, atol=1e-3)


def test_batch_norm_resnet_with_reset_statistics():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet(nn.BatchNorm2d)
    run = unlearn(model, make_images(), GRADIENT, loss_fn=cross_entropy, buffers="reset")
    assert run.record.buffers == "reset"
    x = make_images()[0][0]
    hidden = relu(run.model.stem(x)).detach()
    mean = run.model.blocks[0].first(hidden).mean((0, 2, 3))
    assert torch.allclose(run.model.blocks[0].norms[0].running_mean, mean, atol=1e-4)
    assert bool(torch.isfinite(run.model.eval()(x)).all())
