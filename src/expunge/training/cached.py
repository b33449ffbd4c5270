"""The output of a frozen module, once per sample: epochs then run only what is trained.

Where ``model(x) = rest(frozen(x))`` and ``frozen`` neither learns nor draws, training on the pairs
(frozen(x), y) is training on (x, y). What is kept is a function of the data that the training is
given and of frozen tensors, and is gone when the training ends. The noisy steps never use it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from expunge.errors import InputError
from expunge.training.batches import Batches, gives_all, move_batch
from expunge.training.evaluation import in_eval_mode

_ALONE = "the only module that sees the model's input, and the first"
_MISFITS = (RuntimeError, ValueError, TypeError, IndexError)  # what torch says to other shapes


@contextmanager
def cached_features(
    model: nn.Module, name: str, loader: Iterable[Any], seed: int
) -> Generator[Batches]:
    """Batches of the output of the module ``name``, which passes them on in the meantime.

    Refused is a module that is trained, in train mode, or not the only one that sees the input;
    and data that are not the same when they are read again.

    >>> model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False).eval(), nn.Linear(3, 2))
    >>> rows = Batches(torch.eye(2), torch.tensor([0, 1]), batch_size=2)
    >>> with cached_features(model, "0", rows, seed=0) as batches:
    ...     x, y = next(iter(batches))
    ...     tuple(x.shape), model(x).shape == (2, 2), type(model[0]).__name__
    ((2, 3), True, 'Identity')
    """
    module = _find(model, name)
    rows = _in_order(loader)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    (first, target), again = _take(rows), _take(rows)
    if not (torch.equal(first, again[0]) and torch.equal(target, again[1])):
        raise _refuse(name, "left out: the data are not the same when they are read again")
    features, targets = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for batch in rows:
            x, y = _check(batch, name)
            try:
                found = cast(object, module(move_batch(x, device)))
            except _MISFITS as error:
                raise _refuse(name, _ALONE) from error
            if not isinstance(found, Tensor) or len(found) != len(x):
                raise _refuse(name, "a module that returns a tensor with one row for each sample")
            features.append(found.detach().cpu())
            targets.append(y)
        part = first[: len(first) // 2 or 1]
        if not _is_near(cast(Tensor, module(move_batch(part, device))), features[0][: len(part)]):
            raise _refuse(name, "a module that answers each sample alone, whatever else is there")
        with in_eval_mode(model):
            whole = cast(object, model(move_batch(first, device)))
    made = Batches(torch.cat(features), torch.cat(targets), **_keep_order(loader, seed))
    home, _, own = name.rpartition(".")
    parent = model.get_submodule(home)
    setattr(parent, own, nn.Identity().eval())
    try:
        _compare(model, name, whole, features[0].to(device))
        yield made
    finally:
        setattr(parent, own, module)


def _is_near(one: Tensor, two: Tensor) -> bool:
    """Other batches may give other last bits."""
    x, y = one.detach().cpu().double(), two.double()
    return bool((x - y).norm() <= 1e-3 * y.norm() + 1e-12)


def _refuse(name: str, valid: str) -> InputError:
    return InputError.of("features", name, valid)


def _find(model: nn.Module, name: str) -> nn.Module:
    known = dict(model.named_modules())
    if not name or name not in known:
        some = [path for path in known if path][:5]
        raise _refuse(name, f"the name of a module of the model, such as {', '.join(some)}")
    module = known[name]
    if any(p.requires_grad for p in module.parameters()):
        raise _refuse(name, "a frozen module: all its parameters with requires_grad=False")
    if any(part.training for part in module.modules()):
        raise _refuse(name, "a module in eval mode: what draws or counts cannot be kept")
    return module


def _in_order(loader: Iterable[Any]) -> Iterable[Any]:
    """The same samples one by one, each once."""
    match loader:
        case Batches() if gives_all(loader) and loader.augment is None:
            size = loader.batch_size
            return Batches(loader.inputs, loader.targets, batch_size=size, prepare=loader.prepare)
        case DataLoader() if gives_all(loader):
            given = cast(Any, loader)
            return DataLoader(
                given.dataset,
                batch_size=given.batch_size,
                collate_fn=given.collate_fn,
                num_workers=given.num_workers,
                worker_init_fn=given.worker_init_fn,
            )
        case _:
            raise InputError(
                "features needs samples in memory or a DataLoader that gives every sample of its "
                "data set (no sampler or loop of its own), without augment"
            )


def _keep_order(loader: Any, seed: int) -> dict[str, Any]:
    """How the given loader goes through its samples."""
    generator: torch.Generator | None = loader.generator
    if isinstance(loader, DataLoader) and isinstance(cast(Any, loader).sampler, SequentialSampler):
        generator = None
    elif isinstance(loader, DataLoader) and generator is None:
        generator = torch.Generator().manual_seed(seed)
    size, drop = loader.batch_size, loader.drop_last
    return {"batch_size": size, "drop_last": drop, "generator": generator}


def _take(rows: Iterable[Any]) -> tuple[Tensor, Tensor]:
    for batch in rows:
        return _check(batch, "")
    raise InputError("data is empty; it must yield at least one batch")


def _check(batch: Any, name: str) -> tuple[Tensor, Tensor]:
    pair = cast(list[object], batch) if isinstance(batch, tuple | list) else []
    if len(pair) == 2 and isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor):
        return pair[0], pair[1]
    raise InputError("features needs batches that are pairs of tensors, (inputs, targets)")


def _compare(model: nn.Module, name: str, whole: object, features: Tensor) -> None:
    """The rest alone must answer on the features as the whole model did on the inputs."""
    try:
        with torch.no_grad(), in_eval_mode(model):
            rest = cast(object, model(features))
    except _MISFITS:
        rest = None
    same = isinstance(rest, Tensor) and isinstance(whole, Tensor) and rest.shape == whole.shape
    if not same or not torch.allclose(
        cast(Tensor, rest), cast(Tensor, whole), rtol=1e-4, atol=1e-5, equal_nan=True
    ):
        raise _refuse(name, _ALONE)
