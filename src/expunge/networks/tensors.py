"""The tensors of a module by name.

A release is written from parameters and persistent buffers, under the names of ``state_dict`` and
without what wrappers put before them. Attributes, hooks and extra state are not looked at: the
module is a new one from ``build()``, so nothing of an old model is in them.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from expunge.errors import InputError

WRAPPERS: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, DataParallel, ``torch.compile``, FSDP and averages of torch.

    >>> layer = nn.Linear(1, 1)
    >>> unwrap(nn.DataParallel(torch.compile(layer, backend="eager"))) is layer
    True
    """
    while True:
        inner = [
            WRAPPERS[kind.__name__]
            for kind in type(module).__mro__
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch.")
        ]
        if not inner:
            return module
        module = cast(nn.Module, getattr(module, inner[0]))


def walk_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters and persistent buffers by the names, and in the order, of
    ``state_dict``: without ``module.`` or ``_orig_mod.``, tied ones under each of their names."""
    inner: Any = unwrap(module)
    own = inner._parameters | inner._buffers
    for name, tensor in own.items():
        if tensor is not None and name not in inner._non_persistent_buffers_set:
            yield f"{prefix}{name}", tensor
    for name, child in inner._modules.items():
        if child is not None:
            yield from walk_tensors(child, f"{prefix}{name}.")


def list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of :func:`walk_tensors`, detached.

    >>> list(list_tensors(nn.DataParallel(nn.BatchNorm1d(2))))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    return {name: tensor.detach() for name, tensor in walk_tensors(module)}


def read_extra_state(module: nn.Module) -> dict[str, Any]:
    """What ``state_dict`` has of ``get_extra_state``, which no release holds; any other value that
    is no tensor is refused: a release is named tensors.

    >>> read_extra_state(nn.Linear(1, 1))
    {}
    """
    found: dict[str, Any] = {}
    for name, value in unwrap(module).state_dict().items():
        if name.endswith("_extra_state"):
            found[name] = value
        elif not isinstance(value, Tensor) and value is not None:
            kind = type(value).__name__
            raise InputError(
                f"{name} in the model's state is a {kind}; a release is named tensors, so it would "
                "be lost"
            )
    return found


def list_trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take gradients, tied ones once, as ``named_parameters`` orders them.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> model[0].bias.requires_grad_(False).shape
    torch.Size([2])
    >>> list(list_trainable(model))
    ['0.weight', '1.bias']
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, tensor in walk_tensors(module):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            if isinstance(tensor, UninitializedParameter):
                raise InputError(
                    f"build() returned a module whose {name} has no shape yet; it must run one "
                    "batch through its lazy layers first"
                )
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def list_aliases(module: nn.Module) -> dict[str, str]:
    """Every name of a trainable parameter, and the one that :func:`list_trainable` gives it."""
    own = {id(parameter): name for name, parameter in list_trainable(module).items()}
    return {name: own[id(t)] for name, t in walk_tensors(module) if id(t) in own}


def list_published(module: nn.Module) -> dict[str, Tensor]:
    """What a release holds beside trained tensors: frozen parameters and persistent buffers.

    >>> list(list_published(nn.BatchNorm1d(2, affine=False)))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    trained = list_aliases(module)
    return {name: t for name, t in list_tensors(module).items() if name not in trained}


class Buffers:
    """All buffers of a module as they are now, to be restored any number of times.

    Values are copied back into the tensors that the module had: running statistics change without
    torch's version counter. A buffer that ``forward`` replaced or added is undone too.

    >>> norm = nn.BatchNorm1d(2)
    >>> before = Buffers(norm)
    >>> _ = norm(torch.randn(4, 2))
    >>> before.restore()
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, module: nn.Module) -> None:
        own = [cast(dict[str, Tensor | None], cast(Any, m)._buffers) for m in module.modules()]
        self._places = [(buffers, dict(buffers)) for buffers in own]
        every = [b for buffers in own for b in buffers.values() if b is not None]
        self._tensors = [tensor for tensor in every if not _is_expanded(tensor)]
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    def restore(self) -> None:
        """Every buffer as it was."""
        for buffers, before in self._places:
            buffers.clear()
            buffers.update(before)
        if self._tensors:
            with torch.no_grad():
                cast(Any, torch)._foreach_copy_(self._tensors, self._values)


def _is_expanded(tensor: Tensor) -> bool:
    """Of an expanded tensor several elements are one: no operation can write to it."""
    sizes = (
        zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    )
    return any(n > 1 and step == 0 for n, step in sizes)


def set_training_mode(module: nn.Module) -> None:
    """``module.train()``; a submodule whose parameters are all frozen keeps its mode, inside too.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Dropout())).eval()
    >>> _ = model[1].requires_grad_(False)
    >>> set_training_mode(model)
    >>> model.training, model[0].training, model[1].training, model[1][1].training
    (True, True, False, False)
    """
    frozen: dict[nn.Module, bool] = {}
    for part in module.modules():
        own = list(part.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            frozen |= {inner: inner.training for inner in part.modules()}
    module.train()
    for part, mode in frozen.items():
        part.training = mode


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """``module.eval()`` for a while; then every submodule is in its own mode again.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> [part.training for part in model]
    [True, False]
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def has_same_bits(one: Tensor, two: Tensor) -> bool:
    """The same shape, dtype and bytes, wherever they lie.

    >>> has_same_bits(torch.zeros(2), -torch.zeros(2)), has_same_bits(torch.ones(2), torch.ones(2))
    (False, True)
    """
    if one.shape != two.shape or one.dtype is not two.dtype:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
    return torch.equal(*flat)


def find_nonfinite(tensors: Mapping[str, Tensor], public: Collection[str] = ()) -> str | None:
    """The name of a tensor with NaN or infinity in it; a mask that is public may have infinity.

    >>> mask = torch.tensor([0.0, -torch.inf])
    >>> find_nonfinite({"mask": mask}, {"mask"}), find_nonfinite({"mask": mask})
    (None, 'mask')
    """
    real = {n: t.detach() for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    for name, own in real.items():
        # One sum finds it in a twentieth of the time; but large finite numbers may overflow it.
        wrong = not bool(torch.isfinite(own.sum())) and not bool(torch.isfinite(own).all())
        if wrong and (name not in public or bool(torch.isnan(own).any())):
            return name
    return None


def collect_tensors(module: nn.Module) -> dict[str, Tensor]:
    """:func:`list_tensors` of a model that several processes may share out (FSDP): whole, on the
    CPU, of rank 0 alone; every process must call it.

    >>> list(collect_tensors(nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    named = list_tensors(module)
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    dtensors = any(type(p.data).__name__ == "DTensor" for p in module.parameters())
    if not dtensors and "FullyShardedDataParallel" not in kinds:
        return named
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(module, options=options)
    return {name: t for name, t in found.items() if name in named and isinstance(t, Tensor)}


def name_first(names: Iterable[str]) -> str:
    """The first name and how many more there are, for a sentence.

    >>> name_first(["a", "b", "c"])
    'a and 2 more'
    """
    first, *more = names
    return f"{first} and {len(more)} more" if more else first
