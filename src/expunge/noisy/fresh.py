"""A fresh initialisation: weights that follow from an architecture and a public seed alone.

Retraining starts at one, and a noisy run is pulled towards one (THEORY, section 9). Nothing of the
old model may be in it. So every parameter is wiped before a module may initialise itself, once
with NaN and once with another number, and both must give the same bits; a factory is called twice
under the same seed; and what does not change under another seed was there before, and is refused.
What no test can see is code that hides old weights under as much noise of its own.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from expunge.errors import InputError, UnlearningError
from expunge.noisy.model import CertifiedModel, reset_statistics
from expunge.processes.group import is_sharded
from expunge.processes.weights import has_same_bits, shorten
from expunge.training.randomness import derive_seed, seeded_random

PUBLIC_SEED = "expunge"
Drawing = Literal["reset_parameters of every module", "built by a factory"]
FEW, MANY = 8, 64
_ADVICE = (
    "pass centre=expunge.Initialisation(build=...) with a function that builds a fresh network, "
    "public weights as centre=, or centre='zero'"
)


@dataclass(frozen=True)
class Initialisation:
    """A fresh initialisation under a public seed: a text or a number that was written down before
    anybody looked at a trained weight.

    Without ``build`` every module with trainable parameters initialises itself by its
    ``reset_parameters()``; a LoRA layer of PEFT has A drawn and B = 0. ``build()`` returns a fresh
    module instead, whose trainable weights are taken.

    >>> Initialisation()
    Initialisation(seed='expunge', build=None)
    """

    seed: str | int = PUBLIC_SEED
    build: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        text = isinstance(self.seed, str) and 0 < len(self.seed) <= 1000
        if not number and not (text and cast(str, self.seed).isprintable()):
            raise InputError.of("seed", self.seed, "a public text of one line, or a whole number")
        if self.build is not None and not callable(self.build):
            raise InputError.of("build", self.build, "a function without arguments, or None")

    @property
    def how(self) -> Drawing:
        return "reset_parameters of every module" if self.build is None else "built by a factory"


def draw_fresh(certified: CertifiedModel, start: Initialisation) -> dict[str, Tensor]:
    """The fresh values of every certified parameter, on the CPU: a function of the architecture
    and the seed, whatever the module holds now.

    >>> from expunge.noisy.model import copy_model
    >>> one, two = (draw_fresh(copy_model(nn.Linear(2, 1)), Initialisation("s")) for _ in range(2))
    >>> torch.equal(one["weight"], two["weight"])
    True
    """
    if start.build is None and is_sharded(certified.model):
        raise UnlearningError(
            f"a sharded model cannot be copied to initialise it afresh; {_ADVICE}"
        )
    seed, other = f"initialisation {start.seed}", f"another initialisation than {start.seed}"
    drawn = _draw(certified, start, seed, math.nan)
    repeated = _draw(certified, start, seed, 1.0)
    differing = [name for name in drawn if not has_same_bits(drawn[name], repeated[name])]
    if differing:
        raise UnlearningError(
            f"{shorten(differing)} {'is' if len(differing) == 1 else 'are'} not the same when "
            "initialised twice under one seed, so something else is in there: the old weights, or "
            f"random numbers of its own; {_ADVICE}"
        )
    fixed = find_fixed(drawn, _draw(certified, start, other, math.nan))
    if fixed:
        raise UnlearningError(
            f"{shorten(fixed)} {'does' if len(fixed) == 1 else 'do'} not follow from the seed of "
            f"the fresh initialisation ({start.how}), so the old model could be in there; if these "
            "are public weights, give them all as the centre, else draw them from the global "
            "random state"
        )
    return drawn


def _draw(
    certified: CertifiedModel, start: Initialisation, seed: str, filling: float
) -> dict[str, Tensor]:
    with torch.no_grad(), _one_thread(), seeded_random(derive_seed(seed)):
        if start.build is not None:
            return take_weights(certified.certified, start.build, "build", _ADVICE)
        emptied = _empty(certified, filling)
        reset_modules(emptied.model, _ADVICE)
    check_fresh(emptied.certified, _ADVICE)
    return {name: p.detach().clone() for name, p in emptied.certified.items()}


def _empty(certified: CertifiedModel, filling: float) -> CertifiedModel:
    """A copy on the CPU in which every certified parameter holds ``filling``, statistics are
    reset, and whatever is public is what it is."""
    shared = dict[int, Any]()
    if certified.device.type == "cpu":
        shared = {id(p): p for p in certified.model.parameters() if not p.requires_grad}
    copied = copy.deepcopy(certified.model, shared).cpu()
    named = dict(copied.named_parameters())
    emptied = replace(certified, model=copied, certified={n: named[n] for n in certified.certified})
    wipe(emptied.certified, filling)
    reset_statistics(emptied)
    return emptied


def wipe(certified: Mapping[str, Tensor], filling: float = math.nan) -> None:
    """Nothing of the old values is left in the parameters."""
    for p in certified.values():
        p.data.fill_(filling)


def check_fresh(certified: Mapping[str, Tensor], advice: str) -> None:
    """Refuse a parameter that is still NaN: it was wiped, and never written."""
    for name, p in certified.items():
        if not bool(torch.isfinite(p).all()):
            raise UnlearningError(
                f"parameter {name} was not initialised afresh, so it would carry the old model; "
                f"{advice}"
            )


def reset_modules(model: nn.Module, advice: str) -> None:
    """``reset_parameters()`` of every module that has trainable parameters, inner ones first."""
    for path, module, adapted in _list_inner_first(model):
        if is_adapted(module):
            reset_adapters(module)
        if adapted or not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        reset = cast(
            object,
            getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None)),
        )
        if not callable(reset):
            raise UnlearningError(
                f"module {path or 'itself'} ({type(module).__name__}) has trainable parameters but "
                f"no reset_parameters(); {advice}"
            )
        reset()


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a LoRA layer of PEFT."""
    return callable(getattr(module, "reset_lora_parameters", None)) and hasattr(module, "lora_A")


def reset_adapters(module: Any) -> None:
    """As PEFT does when it makes them: A drawn, B = 0."""
    few = len(inspect.signature(module.reset_lora_parameters).parameters) == 1
    for adapter in (*module.lora_A.keys(), *module.lora_embedding_A.keys()):
        module.reset_lora_parameters(adapter, *(() if few else (True,)))


def _list_inner_first(
    module: nn.Module, path: str = "", adapted: bool = False, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module once, after those that it holds; and whether it is part of a LoRA layer."""
    seen = set[int]() if seen is None else seen
    inside = is_adapted(module)
    for name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            part = inside and name.startswith("lora_")
            yield from _list_inner_first(
                child, f"{path}.{name}" if path else name, adapted or part, seen
            )
    yield path, module, adapted


def take_weights(
    certified: Mapping[str, Tensor], build: Callable[[], object], field: str, advice: str
) -> dict[str, Tensor]:
    """The trainable parameters of the module that ``build()`` returns, by name, on the CPU."""
    built = build()
    if not isinstance(built, nn.Module):
        raise InputError.of(f"{field}()", type(built).__name__, "a torch module")
    theirs, found = dict(built.named_parameters(remove_duplicate=False)), dict[str, Tensor]()
    for name, p in certified.items():
        if name in theirs and is_lazy(theirs[name]):
            raise InputError(f"{field}() leaves {name} without a shape; run the module once in it")
        shape = tuple(theirs[name].shape) if name in theirs else None
        if shape != tuple(p.shape):
            raise InputError.of(f"shape of {name} in {field}()", shape, f"{tuple(p.shape)}")
        found[name] = theirs[name].detach().cpu().clone()
    check_fresh(found, advice)
    return found


def find_fixed(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The tensors that two seeds do not draw: public, or not explained.

    A constant of at most three digits (zeros, ones, 0.25) is hardly information. Whatever else is
    the same, or correlated, under two seeds was there before: weights of an earlier training, data,
    or a table.

    >>> w = torch.arange(3.0)
    >>> find_fixed({"w": w, "b": torch.ones(2)}, {"w": w, "b": torch.ones(2)})
    ('w',)
    """
    fixed = {name for name in one if _is_fixed(one[name], two[name])}
    for least in (FEW, 3):  # together they may have numbers enough to show a correlation
        small = [n for n, t in one.items() if n not in fixed and least <= t.numel() < MANY]
        pairs = [tuple(map(_standardise, _leave_constant(one[name], two[name]))) for name in small]
        if pairs and _agree(*(torch.cat(side) for side in zip(*pairs, strict=True))):
            fixed |= set(small)
    return tuple(name for name in one if name in fixed)


def _is_fixed(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.numel() == 0:
        return False
    x, y = _leave_constant(one, two)
    if x.numel() == 0:
        return False
    if int((x == y).sum()) * 4 >= x.numel() or _has_same_values(x, y):
        return True
    return x.numel() >= MANY and _agree(_standardise(x), _standardise(y))


def _leave_constant(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the one block that holds the same plain number: padding, a gate's bias."""
    x, y = one.detach().flatten(), two.detach().flatten()
    places = (x == y).nonzero().flatten()
    if places.numel() == 0:
        return x, y
    first, last = int(places[0]), int(places[-1])
    block = x[first : last + 1]
    if len(block) != places.numel() or not bool((block == block[0]).all()):
        return x, y
    if not _is_plain(block[0]):
        return x, y
    return tuple(torch.cat([t[:first], t[last + 1 :]]) for t in (x, y))  # pyright: ignore[reportReturnType]


def _has_same_values(x: Tensor, y: Tensor) -> bool:
    """Whether one is the other in another order: nothing but the order was drawn."""
    if len(x) < FEW or not bool((x.sort().values == y.sort().values).all()):
        return False
    return 2 * len(x.unique()) > len(x)


def _standardise(tensor: Tensor) -> Tensor:
    """Without its mean, and of squared length n - 1: as many numbers are free."""
    x = tensor.double().flatten()
    x = x - x.mean() if x.numel() else x
    return x * (math.sqrt(max(x.numel() - 1, 0)) / float(x.norm().clamp_min(1e-300)))


def _agree(x: Tensor, y: Tensor) -> bool:
    """Whether two draws are correlated: √(n-3) · artanh r of independent ones, where n numbers are
    free, is hardly above 6: once in 10^9 where n is large."""
    n = round(max(float(x @ x), float(y @ y)))
    r = min(abs(float(x @ y)) / max(n, 1), 1 - 1e-15)
    return n >= FEW and math.sqrt(n - 3) * math.atanh(r) > 6


def _is_plain(value: Tensor) -> bool:
    """Whether a number is one of at most three decimal digits, as its own dtype writes it."""
    return bool(torch.tensor(float(f"{float(value):.3g}"), dtype=value.dtype) == value)


@contextmanager
def _one_thread() -> Generator[None]:
    """Orthogonal initialisations have other bits with other numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
