"""One constituent of an ensemble: a function of a public string and of its own slices alone.

It starts from ``build()`` under a seed of the public string and is trained on slice 1, then on
slices 1-2, …, then on 1-R, each stage with a seed of its own and an optimizer made anew. After each
stage there is a checkpoint. A stage of fewer than two examples trains nothing, and a last batch of
one is left out: a batch normalisation has no statistics of one example. A checkpoint's *lineage*
says what it was made from:

    L_0 = SHA-256(settings ‖ shard)        L_j = SHA-256(L_{j-1} ‖ SHA-256(file of slice j))

A checkpoint whose lineage is not that of the slices that lie there now is stale and is not used:
whatever was interrupted, moved or put back, only training on what is held counts. Training runs on
one thread with deterministic arithmetic, so its bits depend neither on the number of threads nor on
how many constituents are trained at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from expunge.errors import ExpungeError, InputError, UnlearningError
from expunge.files import write_atomic
from expunge.forgettable.features import make_probe
from expunge.forgettable.folders import Folder
from expunge.forgettable.slices import Assignment, Examples
from expunge.processes.weights import hash_weights
from expunge.training.losses import check_loss
from expunge.training.randomness import derive_seed, seeded_random
from expunge.training.settings import Settings
from expunge.training.train import train

Build = Callable[[], nn.Module]
Train = Callable[[nn.Module, Examples, int], object]
Tensors = dict[str, Tensor]
_KEY = "expunge"
FEWEST = 2
_PROBE = 32


@dataclass(frozen=True)
class Plan:
    """What all constituents share: how examples are assigned, and how a network is made.

    ``settings`` are the options of :func:`expunge.train`, ``function`` another way to train, which
    is given the module, its examples and a seed. ``deterministic``: its bits can be had again.
    """

    assignment: Assignment
    build: Build
    settings: Settings | None
    function: Train | None = None
    deterministic: bool = True

    def describe(self) -> dict[str, Any]:
        """The training as data; functions by their names."""
        if self.settings is None:
            assert self.function is not None
            return {"train": _name(self.function)}
        s = self.settings
        told = {
            "epochs": float(s.epochs),
            "learning_rate": float(s.learning_rate),
            "batch_size": s.batch_size,
            "weight_decay": float(s.weight_decay),
            "momentum": float(s.momentum),
            "schedule": s.schedule,
        }
        functions = {n: getattr(s, n) for n in ("optimizer", "augment", "prepare", "loss_fn")}
        return told | {name: _name(f) for name, f in functions.items() if f is not None}

    def make(self, shard: int) -> nn.Module:
        """The network of a shard before any data."""
        with seeded_random(self._derive("build", shard)):
            built = self.build()
        if not isinstance(built, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError.of("build()", type(built).__name__, "a torch module")
        if any(is_lazy(p) for p in (*built.parameters(), *built.buffers())):
            raise InputError("build() has lazy parameters; give all sizes where it is built")
        return built

    def train_stage(
        self, before: Tensors | None, data: Examples, shard: int, stage: int
    ) -> Tensors:
        """The tensors after a stage (from 1) on the examples of slices 1 … stage."""
        with _exactly(self.deterministic):
            model = self.make(shard)
            if before is not None:
                put_tensors(model, before)
            frozen = hash_weights(_list_frozen(model))
            seed, held = self._derive("train", shard, stage), (self.settings, self.function)
            if len(data) >= FEWEST:
                with seeded_random(seed, held), torch.inference_mode(False), torch.enable_grad():
                    self._train(model, data, seed)
        if hash_weights(_list_frozen(model)) != frozen:
            raise UnlearningError("a frozen parameter changed in training; it must stay as built")
        return list_own(model)

    def train_finite(
        self, before: Tensors | None, data: Examples, shard: int, stage: int
    ) -> Tensors:
        """:meth:`train_stage`, refused where a number is not finite."""
        found = self.train_stage(before, data, shard, stage)
        for name, tensor in found.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise UnlearningError(
                    f"{name} of constituent {shard} is not finite after slice {stage}: training "
                    "diverged; lower the learning rate"
                )
        return found

    def _train(self, model: nn.Module, data: Examples, seed: int) -> None:
        if self.function is not None:
            returned = self.function(model, data, seed)
            if returned is not None and returned is not model:
                raise InputError(
                    f"train() returned a {type(returned).__name__}; it must train the model it is "
                    "given, and return nothing"
                )
            return
        s = cast(Settings, self.settings)
        passes = 2 * s.epochs / (self.assignment.slices + 1)
        batches = s.make_batches(data, torch.Generator().manual_seed(seed))
        batches.drop_last = len(data) > s.batch_size and len(data) % s.batch_size == 1
        options: dict[str, Any] = {name: getattr(s, name) for name in s.__dataclass_fields__}
        options |= {"epochs": passes, "seed": seed, "augment": None, "prepare": None}
        train(model, batches, **options)

    def _derive(self, purpose: str, *numbers: int) -> int:
        return derive_seed(f"shards {purpose} {numbers} {self.assignment.seed}")


def read_options(train: Train | None, options: Mapping[str, Any]) -> Settings | None:
    """The options of training; none where ``train`` is a function of its own."""
    if train is not None:
        if options:
            raise InputError.of(
                next(iter(options)), next(iter(options.values())), "left out: train= trains"
            )
        if not callable(train):
            raise InputError.of("train", train, "a function of (model, examples, seed)")
        return None
    for name in ("epochs", "learning_rate"):
        if name not in options:
            raise InputError(f"{name} is missing; give it, or train=")
    if options.get("compile", False) is not False:
        raise InputError.of("compile", options["compile"], "left out: constituents run plainly")
    check_loss(options.get("loss_fn"))
    given: dict[str, Any] = dict(options) | {"compile": False}
    return Settings(**given)


def _name(function: object) -> str:
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def list_every(model: nn.Module) -> Tensors:
    """Parameters and buffers by name, persistent or not."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in held.items()}


def list_own(model: nn.Module) -> Tensors:
    """What training may change: all but the frozen parameters."""
    frozen = _list_frozen(model)
    return {n: t.clone() for n, t in list_every(model).items() if n not in frozen}


def _list_frozen(model: nn.Module) -> Tensors:
    return {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}


def put_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a module of the same kind, by name."""
    held = list_every(model)
    for name, tensor in tensors.items():
        if name not in held or held[name].shape != tensor.shape:
            raise InputError(f"build() gives another network than before: {name} does not fit")
        held[name].copy_(tensor)


@contextmanager
def _exactly(deterministic: bool) -> Generator[None]:
    """One thread and deterministic arithmetic, then as it was."""
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
        exact = torch.are_deterministic_algorithms_enabled() or not deterministic
        if torch.get_num_threads() != 1 or not exact:
            raise UnlearningError(
                "the training changed the number of threads or the use of deterministic "
                "arithmetic; leave both as they are"
            )
    except RuntimeError as error:
        if isinstance(error, ExpungeError) or "deterministic" not in str(error):
            raise
        raise InputError(
            f"training is not deterministic ({str(error).splitlines()[0][:120]}); use another "
            "operation, or pass deterministic=False and let requests not depend on the models"
        ) from None
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before, warn_only=warn)


def find_behaviour(plan: Plan, like: Examples) -> str:
    """The hash of what a training makes of public noise of the shape of ``like``.

    It tells code apart that has the same name. What build or training keep from the first call to
    later ones (a cache of constants) is noise then, and not somebody's data: so this is the first
    thing they are called with in every process that trains. Refused if either is not a function of
    its arguments.
    """
    few = _draw_like(like)
    first = hash_weights(list_every(plan.make(0)))
    try:
        once = hash_weights(plan.train_stage(None, few, 0, 1))
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        if isinstance(error, ExpungeError):
            raise
        raise InputError(
            f"training fails on {_PROBE} rows of public noise of the shape of the examples, with "
            f"targets of zero, which tests it ({type(error).__name__}: {error})"
        ) from error
    if hash_weights(list_every(plan.make(0))) != first:
        raise InputError(
            "build() gives other weights when it is called again under the same seed; it must "
            "make a fresh network, and draw from torch's, NumPy's or Python's global generator"
        )
    if not plan.deterministic:
        return ""
    if hash_weights(plan.train_stage(None, few, 0, 1)) != once:
        raise InputError(
            "training gives other weights when it is run again with the same seed; draw from the "
            "seed only, or pass deterministic=False"
        )
    return once


def _draw_like(like: Examples) -> Examples:
    inputs = make_probe(like.inputs, _PROBE)
    targets = torch.zeros((_PROBE, *like.targets.shape[1:]), dtype=like.targets.dtype)
    names = torch.zeros((_PROBE, like.names.shape[1]), dtype=torch.uint8)
    return Examples(names, inputs, targets)


def _check_behaviour(plan: Plan, expected: str, like: Examples | None) -> None:
    """Before a training, and after it: what it makes of public noise is what it always did."""
    if like is None or not expected:
        return
    if hash_weights(plan.train_stage(None, _draw_like(like), 0, 1)) != expected:
        raise UnlearningError(
            "training behaves differently than when the state was opened: it keeps something from "
            "one call to the next, it is another in another process, or what it depends on was "
            "changed (autocast, a default dtype, a file)"
        )


def measure_work(sizes: Sequence[Sequence[int]], touched: Mapping[int, int]) -> float:
    """What training the ``touched`` shards again from their slice costs, as a part of training all.

    With n_i examples in slice i, stage j costs n_1 + … + n_j; ``touched`` is {shard: slice from 0}.

    >>> [measure_work([[10] * 4] * 8, {0: part}) for part in range(4)]
    [0.125, 0.1125, 0.0875, 0.05]
    """
    stages = [list(accumulate(of_shard)) for of_shard in sizes]
    again = sum(sum(stages[shard][first:]) for shard, first in touched.items())
    return again / max(sum(map(sum, stages)), 1)


def begin_lineage(settings: Mapping[str, Any], shard: int) -> bytes:
    """L_0."""
    text = json.dumps({**settings, "shard": shard}, sort_keys=True)
    return hashlib.sha256(b"expunge/constituent-1\0" + text.encode()).digest()


def list_lineages(settings: Mapping[str, Any], shard: int, digests: Iterable[bytes]) -> list[str]:
    """L_1 … L_R, from the SHA-256 of the slices' files."""
    at, found = begin_lineage(settings, shard), list[str]()
    for digest in digests:
        at = hashlib.sha256(at + digest).digest()
        found.append(at.hex())
    return found


def write_checkpoint(path: Path, tensors: Tensors, lineage: str) -> None:
    """A checkpoint with its lineage and the hash of its tensors; complete, or not there."""
    told = json.dumps({"lineage": lineage, "hash": hash_weights(tensors)}, sort_keys=True)
    given = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomic(path, safetensors.torch.save(given, {_KEY: told}))


def read_checkpoint(path: Path, lineage: str) -> Tensors | None:
    """The tensors, if the file is whole and was made from what this lineage says."""
    try:
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        told = json.loads(header["__metadata__"][_KEY])
        if told["lineage"] != lineage:
            return None
        found = safetensors.torch.load(raw)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
        return None
    return found if hash_weights(found) == told.get("hash") else None


def train_constituent(
    plan: Plan, settings: Mapping[str, Any], folder: Folder, shard: int, tested: bool = False
) -> tuple[int, int]:
    """Make every checkpoint of a shard that is missing or stale.

    ``tested``: the training before this one, in the same call, tested it after its last stage.
    Returns (the first stage that was trained, or 0; examples that went through training).
    """
    slices = plan.assignment.slices
    held = [folder.scan(plan.assignment, shard, part) for part in range(slices)]
    if not any(one.samples for one in held):
        return 0, 0
    lineages = list_lineages(settings, shard, (one.digest for one in held))
    valid, tensors = _find_last(folder, shard, lineages)
    seen, expected = 0, settings.get("behaviour", "")
    like = folder.find_example(plan.assignment)
    for stage in range(valid + 1, slices + 1):
        data = folder.read_slices(shard, stage)
        if stage == valid + 1 and not tested:
            _check_behaviour(plan, expected, like)
        tensors = plan.train_finite(tensors, data, shard, stage)
        _check_behaviour(plan, expected, like)
        seen += len(data)
        path = folder.path / folder.checkpoint_name(shard, stage - 1)
        write_checkpoint(path, tensors, lineages[stage - 1])
    return (valid + 1 if valid < slices else 0), seen


def _find_last(folder: Folder, shard: int, lineages: list[str]) -> tuple[int, Tensors | None]:
    """The last stage that has a valid checkpoint, and its tensors; 0 for none."""
    for stage in range(len(lineages), 0, -1):
        path = folder.path / folder.checkpoint_name(shard, stage - 1)
        tensors = read_checkpoint(path, lineages[stage - 1])
        if tensors is not None:
            return stage, tensors
    return 0, None
