"""The state of a training on disk, replaced in one rename: what is needed to go on where it stood.

Weights and buffers, the optimizer's moments, the losses so far, and where the data and the random
generators stood. All of it is a function of the training's data and of its seed, and so is what a
resumed training ends in: on one machine, the same bits as without a stop. It belongs to one
training, whose ``identity`` it repeats; anything else is refused.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from expunge.errors import InputError, RunError
from expunge.processes.weights import hash_weights, save_weights

FORMAT = "expunge-training-1"
_MODEL, _OPTIMIZER, _PLACE = "model.", "optimizer.", "place."


@dataclass(frozen=True)
class Standing:
    """Where a training stood: steps ``done``, examples seen, ``resumed`` so often before."""

    done: int
    gradient_evaluations: int
    resumed: int
    losses: tuple[Tensor, ...]
    place: dict[str, Tensor]


class Keeper:
    """Keeps the state of one training in a file, every so many seconds.

    >>> Keeper("training.safetensors", {"seed": 0}, every=-1.0)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: every is -1.0; it must be a number of seconds >= 0
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any], every: float = 30.0) -> None:
        if not 0 <= every <= math.inf:
            raise InputError.of("every", every, "a number of seconds >= 0")
        self.path, self.every = Path(path), every
        self.identity = json.loads(json.dumps(dict(identity)))
        self.resumed, self._saved = 0, time.monotonic()

    def bind(self, **more: Any) -> None:
        """What else says which training it is, whether the caller named it or not."""
        told = {f"with {name}": value for name, value in more.items()}
        self.identity = {**self.identity, **json.loads(json.dumps(told))}

    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved >= self.every

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, now: Standing) -> None:
        """Write everything; the state before stays until the new one is complete."""
        tensors = {_MODEL + name: t for name, t in list_changing(model).items()}
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in cast(dict[str, object], state).items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIMIZER}{number}.{name}"] = value
                elif value is not None:
                    kind = type(optimizer).__name__
                    raise InputError.of(
                        f"state of {kind}", name, "tensors, to be saved and resumed"
                    )
        if now.losses:
            tensors["losses"] = torch.stack(now.losses).cpu()
        tensors |= {_PLACE + name: t for name, t in now.place.items()}
        about = {
            "format": FORMAT,
            "identity": self.identity,
            "done": now.done,
            "gradient_evaluations": now.gradient_evaluations,
            "resumed": now.resumed,
            "hash": hash_weights(tensors),
        }
        try:
            save_weights(self.path, tensors, {"expunge": json.dumps(about, sort_keys=True)})
        except OSError as error:
            raise RunError(
                f"checkpoint {self.path} cannot be written: {error.strerror}; the state saved "
                "before it is still there, and --resume goes on from it"
            ) from error
        self._saved = time.monotonic()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Standing | None:
        """Put back what ``save`` wrote, if there is something and it is of this training."""
        for leftover in self.path.parent.glob(f".{self.path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["expunge"])
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            if about["format"] != FORMAT:
                raise InputError.of("checkpoint format", about["format"], repr(FORMAT))
            saved = cast(dict[str, Any], about["identity"])
            done, seen = int(about["done"]), int(about["gradient_evaluations"])
            before, told = int(about["resumed"]), str(about["hash"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"checkpoint {self.path} cannot be read: {error}") from None
        for name in sorted(saved.keys() | self.identity.keys()):
            if saved.get(name) != self.identity.get(name):
                raise InputError(
                    f"checkpoint {self.path} belongs to another training: its {name} is "
                    f"{saved.get(name)!r}, here it is {self.identity.get(name)!r}"
                )
        self._check_tensors(model, tensors, told)
        self._put_back(model, optimizer, tensors)
        losses = tuple(tensors["losses"]) if "losses" in tensors else ()
        self.resumed = before
        return Standing(done, seen, before, losses, _cut(tensors, _PLACE))

    def _check_tensors(self, model: nn.Module, tensors: Mapping[str, Tensor], told: str) -> None:
        own, found = list_changing(model), _cut(tensors, _MODEL)
        wrong = [n for n in own.keys() | found.keys() if _shape(own, n) != _shape(found, n)]
        if wrong:
            raise InputError(
                f"checkpoint {self.path} is damaged: {min(wrong)} has the shape "
                f"{_shape(found, min(wrong))}; it must be {_shape(own, min(wrong))}"
            )
        if hash_weights(tensors) != told:
            raise InputError(f"checkpoint {self.path} was changed after it was saved; remove it")

    def _put_back(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
    ) -> None:
        found = _cut(tensors, _MODEL)
        with torch.no_grad():
            for name, tensor in list_changing(model).items():
                tensor.copy_(found[name])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _cut(tensors, _OPTIMIZER).items():
            number, _, what = name.partition(".")
            state.setdefault(int(number), {})[what] = tensor
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def list_changing(model: nn.Module) -> dict[str, Tensor]:
    """What training may change: trainable parameters and all buffers, tied ones once.

    >>> list(list_changing(nn.BatchNorm1d(2)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return trained | {name: b.detach() for name, b in model.named_buffers()}


def _cut(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
