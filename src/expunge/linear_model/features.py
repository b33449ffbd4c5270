"""A public frozen network as a map from an example to whole numbers: pooled activations of layers.

Convolutions are averaged over places, token models over the tokens that are not padding, and every
layer is scaled by itself (``numbers``). Which layers "auto" takes is decided by the network's tree
of modules alone: of its repeated blocks but the last one four, evenly spaced, and the output.

What an example becomes must not depend on its batch-mates, not even through the shape of a batch,
which shows how many there were. Either one real row is evaluated at a time (**by construction**),
or batches have one fixed shape, and a self-test on public noise found that moving a row, replacing
the others and shortening them to padding changes no bit (**tested**). Some machines pass it for
some networks and some do not, so it runs wherever features are computed. Either way the network
must keep nothing from one call to the next: a few rows are evaluated again after the last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from expunge.certificates.hashes import hash_tensors
from expunge.errors import InputError, UnlearningError
from expunge.linear_model.numbers import RowScaled
from expunge.progress import show_progress

if TYPE_CHECKING:
    from torch import nn

Array = npt.NDArray[Any]
Columns = dict[str, Any]  # tensors of one length by name, or one under ONLY
FORMAT = "expunge-features-2"
ONLY = ""  # the name of inputs that are one tensor, and of the network's output
_BLOCKS = 4
_MASK, _TOKENS = "attention_mask", "input_ids"


class Features:
    """Public features: ``network`` in eval mode, ``layers`` "auto", "last" or names of modules.

    ``lift`` adds random features of the integers, drawn from the public string ``seed``.

    >>> import torch
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> features = Features(network.eval())
    >>> features.layers, features.compute(torch.eye(4)).shape
    (('0', '1', ''), (4, 8))
    >>> Features(network.eval(), layers="last").layers
    ('',)
    """

    network: Any = None
    evaluation: Literal["by construction", "tested"] = "by construction"
    _widths: tuple[int, ...] | None = None

    def __init__(
        self,
        network: nn.Module,
        *,
        layers: str | Sequence[str] = "auto",
        bits: int = 8,
        lift: int = 0,
        seed: str = "",
        batch_size: int = 32,
        progress: bool = False,
    ) -> None:
        RowScaled((), bits, lift, seed)  # refuses what cannot be
        if type(batch_size) is not int or batch_size < 1:
            raise InputError.of("batch_size", batch_size, "a whole number >= 1")
        base = getattr(network, "base_model", None)  # of a transformers model with a head
        self.network = base if hasattr(base, "forward") else network
        self.bits, self.lift, self.seed = bits, lift, seed
        self.batch_size, self.progress = batch_size, progress
        self.layers = choose_layers(self.network, layers)
        self._passed: dict[object, bool] = {}
        self._described = {
            "format": FORMAT,
            "network": hash_tensors(_list_tensors(self.network)),
            "code": hash_code(self.network),
            "layers": list(self.layers),
            "pooling": "mean",
            "bits": bits,
            "lift": lift,
            "seed": seed,
        }
        self._versions = _read_versions(self.network)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_passed": {}}  # another machine tests anew

    def __sklearn_clone__(self) -> Self:
        return self  # public and frozen: nothing in it is fitted

    def describe(self) -> dict[str, Any]:
        """The map as data: one description is one function, up to a machine's rounding."""
        return dict(self._described)

    @property
    def numbers(self) -> RowScaled:
        """How pooled activations become integers; fixed by the first rows' shape."""
        if self._widths is None:
            raise InputError("features have not been computed yet; their widths are not known")
        return RowScaled(self._widths, self.bits, self.lift, self.seed)

    def compute(self, inputs: Any, *, single: bool = False, again: bool = True) -> Array:
        """The integers of every row; ``single`` never relies on the self-test.

        ``again`` evaluates the first batch a second time at the end.
        """
        if self.network is None:
            raise InputError("network is not given; features need it: load(path, network=...)")
        self._check_network()
        rows = read_inputs(inputs)
        count = len(next(iter(rows.values())))
        with _evaluate(self.network, self.layers) as run:
            size = self.batch_size if count and not single and self._passes(run, rows) else 1
            self.evaluation = "tested" if size > 1 else "by construction"
            shown = show_progress(range(0, count, size), count, "features", self.progress)
            parts = [self._quantise(run(*_take(rows, at, size))) for at in shown]
            once = parts[0] if again and parts else None
            if once is not None and (self._quantise(run(*_take(rows, 0, size))) != once).any():
                raise UnlearningError(
                    "network gives other features for the first rows when it is run again; a row "
                    "depends on the rows before it"
                )
        if _read_versions(self.network) != self._versions:
            raise UnlearningError(
                "the network's tensors changed while features were computed; a row would depend on "
                "the rows before it"
            )
        return np.concatenate(parts) if parts else np.empty((0, sum(self._widths or ())), np.int8)

    def _quantise(self, layers: list[Array]) -> Array:
        widths = tuple(layer.shape[1] for layer in layers)
        if self._widths not in (None, widths):
            raise InputError.of("X", widths, f"of a size that gives {self._widths} features")
        self._widths = widths
        return self.numbers.quantise(np.concatenate(layers, axis=1), "network")

    def _check_network(self) -> None:
        training = [name or "the network" for name, m in self.network.named_modules() if m.training]
        if training:
            raise InputError(f"network is in train mode ({training[0]}); call network.eval() first")
        changed = _read_versions(self.network) != self._versions
        if changed and hash_tensors(_list_tensors(self.network)) != self._described["network"]:
            raise InputError("network has other weights than when these features were made")

    def _passes(self, run: Any, rows: Columns) -> bool:
        """Whether batches of rows of this shape pass the self-test here."""
        import torch

        shape = tuple((name, t.shape[1:], t.dtype) for name, t in rows.items())
        key = shape, torch.get_num_threads()
        if self.batch_size > 1 and key not in self._passed:
            self._passed[key] = is_invariant(run, rows, self.batch_size, self.network)
        return self.batch_size > 1 and self._passed[key]


def restore(description: Mapping[str, Any] | None, network: Any = None) -> Features | None:
    """Features as described; without their network they cannot be computed."""
    if description is None:
        return None
    options = {name: description[name] for name in ("layers", "bits", "lift", "seed")}
    if network is not None:
        made = Features(network, **options)
        if made.describe() != description:
            raise InputError("network is not the one these features were made with: it differs")
        return made
    made = Features.__new__(Features)
    vars(made).update(options, layers=tuple(description["layers"]), _described=dict(description))
    return made


def _take(rows: Columns, at: int, size: int) -> tuple[Columns, int]:
    """A batch of ``size`` rows, and how many of them are real; the others are a constant."""
    import torch

    batch = {name: value[at : at + size] for name, value in rows.items()}
    real = len(next(iter(batch.values())))
    for name, part in batch.items() if real < size else ():
        added = part.new_full((size - real, *part.shape[1:]), int(name == _MASK))
        batch[name] = torch.cat([part, added])
    return batch, real


def read_inputs(given: Any) -> Columns:
    """Rows from a tensor, an array, lists of numbers, or a mapping of them as tokenizers return."""
    import torch

    if hasattr(given, "keys"):
        read = {str(name): read_inputs(given[name])[ONLY] for name in given.keys()}  # noqa: SIM118
        if len(lengths := {len(value) for value in read.values()}) != 1:
            raise InputError.of("X", sorted(lengths), "columns of one length")
        return read
    if isinstance(given, list | tuple) and given and hasattr(given[0], "__len__"):
        rows = cast(Sequence[Any], given)
        if isinstance(rows[0], str):
            raise InputError("X is texts; a network takes what its tokenizer makes of them")
        if len({len(row) for row in rows}) > 1:
            raise InputError(
                "X has rows of unequal lengths; pad them to one length that you fix in advance "
                "(tokenizers: padding='max_length') and give the attention_mask"
            )
        if isinstance(rows[0], torch.Tensor):
            given = torch.stack(list(rows))
    refused = InputError(
        f"X is a {type(given).__name__}; it must be a dense array or tensor of real numbers, or a "
        "mapping of such"
    )
    try:
        held = np.require(given, None, ["C", "W"]) if isinstance(given, np.ndarray) else given
        found = torch.as_tensor(held).detach()
    except (TypeError, ValueError, RuntimeError):
        raise refused from None
    if found.layout != torch.strided or found.is_complex() or found.ndim < 1:
        raise refused
    return {ONLY: found}


@contextmanager
def _evaluate(
    network: Any, layers: Sequence[str]
) -> Generator[Callable[[Columns, int], list[Array]]]:
    """The network with hooks on its layers; a call gives the pooled activations of real rows."""
    import torch

    seen = dict[str, Any]()

    def run(columns: Columns, real: int) -> list[Array]:
        seen.clear()
        device = next((t.device for t in network.parameters()), torch.device("cpu"))
        given = {name: value.to(device) for name, value in columns.items()}
        try:
            with torch.inference_mode():
                seen[ONLY] = network(given[ONLY]) if ONLY in given else network(**given)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"network cannot be run on these inputs: {reason}") from error
        mask, size = find_mask(given, network), len(next(iter(given.values())))
        return [_pool(name, find_tensor(seen.get(name)), mask, size, real) for name in layers]

    def keep(name: str) -> Any:
        return lambda _module, _inputs, out: seen.update({name: out})

    named = [name for name in layers if name]
    hooks = [network.get_submodule(name).register_forward_hook(keep(name)) for name in named]
    try:
        yield run
    finally:
        for hook in hooks:
            hook.remove()


def _pool(name: str, out: Any, mask: Any, size: int, real: int) -> Array:
    """The mean over places or tokens; one float64 row for each real row."""
    import torch

    if out is None or len(out) != size or out.ndim < 2 or not out.dtype.is_floating_point:
        what = f"layer {name!r}" if name else "the output of the network"
        raise InputError(f"{what} gives no row of numbers per example; name other layers")
    out = out[:real].to(torch.float32) if out.dtype.itemsize < 4 else out[:real]
    if out.ndim == 3 and mask is not None and mask.shape[1] == out.shape[1]:
        weight = mask[:real, :, None].to(out.dtype)
        out = (out * weight).sum(1) / weight.sum(1).clamp(min=1)
    elif out.ndim > 2:
        out = out.mean(1) if out.ndim == 3 else out.mean(tuple(range(2, out.ndim)))
    return out.to("cpu", torch.float64).numpy()


def find_tensor(output: Any) -> Any:
    """The activations in what a module returned: a tensor, the first of several, by their names."""
    if hasattr(output, "keys"):
        named = ("last_hidden_state", "hidden_states", "logits")
        output = next((output[n] for n in named if n in output), next(iter(output.values()), None))
    while isinstance(output, tuple | list) and output:
        output = output[-1] if not hasattr(output[0], "ndim") else output[0]
    return output if hasattr(output, "ndim") else None


def find_mask(given: Mapping[str, Any], network: Any) -> Any:
    """Which tokens are not padding: as the data say, or by the network's padding token."""
    if _MASK in given and given[_MASK].ndim == 2:
        return given[_MASK]
    tokens = given.get(_TOKENS, given.get(ONLY))
    padding = getattr(getattr(network, "config", None), "pad_token_id", None)
    if padding is None or tokens is None or tokens.ndim != 2 or tokens.dtype.is_floating_point:
        return None
    return tokens != padding


def choose_layers(network: Any, layers: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the modules whose outputs are pooled; "" is the network's own output."""
    if layers == "last":
        return (ONLY,)
    names = [name for name, _ in network.named_modules()]
    if layers != "auto":
        given = (layers,) if isinstance(layers, str) else tuple(layers)
        unknown = [name for name in given if name not in names]
        if unknown or not given or len(set(given)) < len(given):
            shown = unknown[0] if unknown else given
            raise InputError.of("layers", shown, '"auto", "last", or names of different modules')
        return given
    blocks = list(_list_blocks(network))
    count = min(_BLOCKS, len(blocks))
    chosen = [blocks[(k + 1) * len(blocks) // count - 1] for k in range(count)]
    return (*dict.fromkeys(chosen), ONLY)


def _list_blocks(network: Any) -> Iterator[str]:
    """Children of the outermost lists of modules; of a plain network its own children."""
    from torch import nn

    def is_list(module: Any) -> bool:
        trained = [child for child in module.children() if any(True for _ in child.parameters())]
        return isinstance(module, nn.Sequential | nn.ModuleList) and len(trained) > 1

    def walk(module: Any, at: str) -> Iterator[str]:
        for name, child in module.named_children():
            path = f"{at}.{name}" if at else name
            if is_list(child):
                yield from (f"{path}.{inner}" for inner, _ in child.named_children())
            else:
                yield from walk(child, path)

    found = [] if is_list(network) else list(walk(network, ONLY))
    yield from (found or [name for name, _ in network.named_children()])[:-1]


def _read_versions(network: Any) -> tuple[object, ...]:
    """What changes when a tensor of the network is replaced or written to."""
    return tuple((t.data_ptr(), t._version) for t in _list_tensors(network).values())


def _list_tensors(network: Any) -> dict[str, Any]:
    """Every tensor of a network, buffers that are not saved included."""
    return dict(network.named_parameters()) | dict(network.named_buffers())


def hash_code(network: Any) -> str:
    """SHA-256 of a network's tree of modules: names, names of classes, and what they print.

    It has ReLU and Tanh apart, which have the same tensors. It does not see the code behind the
    name of a class, nor numbers that a module has and does not print.
    """
    tree = [(at, type(m).__qualname__, m.extra_repr()) for at, m in network.named_modules()]
    return hashlib.sha256(json.dumps(["expunge/code-1", tree]).encode()).hexdigest()


def make_probe(
    rows: Columns, size: int, seed: int, network: Any, shortest: bool = False
) -> Columns:
    """Public noise of the shape and dtype of the rows, some of it padded at the end as text is."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    config = getattr(network, "config", None)
    tables = [m.num_embeddings for m in network.modules() if hasattr(m, "num_embeddings")]
    words = getattr(config, "vocab_size", None) or min(tables, default=2)
    padding = getattr(config, "pad_token_id", None) or 0
    found, lengths = dict[str, Any](), None
    for name, value in rows.items():
        shape = (size, *value.shape[1:])
        if value.dtype.is_floating_point:
            noise = torch.randn(shape, generator=generator).to(value.dtype)
        elif name == _MASK:
            noise = torch.ones(shape, dtype=value.dtype)
        else:
            least, most = (1, words) if name in (_TOKENS, ONLY) else (0, 1)
            least, most = (0, 256) if value.dtype == torch.uint8 else (least, most)
            noise = torch.randint(least, most, shape, generator=generator).to(value.dtype)
        if len(shape) == 2 and not value.dtype.is_floating_point:
            if lengths is None:
                lengths = torch.randint(1, shape[1] // 2 + 2, (size,), generator=generator)
                lengths[0] = shape[1]  # one row is as long as rows can be
                lengths = torch.ones_like(lengths) if shortest else lengths
            past = torch.arange(shape[1]) >= lengths[:, None]
            noise[past] = 0 if name != _TOKENS and name != ONLY else padding
        elif shortest:
            noise = torch.zeros_like(noise)
        found[name] = noise
    return found


def is_invariant(run: Any, rows: Columns, size: int, network: Any) -> bool:
    """Whether rows keep their bits when they move and the others are replaced or shortened."""
    import torch

    probe = make_probe(rows, size, 0, network)
    before = run(probe, size)
    for trial in (1, 2):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(trial))
        kept = (torch.arange(size) % (trial + 1) == 0) & (order > trial - 2)  # then without 0
        others = make_probe(rows, size, trial, network, shortest=trial == 2)
        moved = {
            name: torch.where(kept.reshape(-1, *[1] * (t.ndim - 1)), t[order], others[name])
            for name, t in probe.items()
        }
        pairs = zip(before, run(moved, size), strict=True)
        now, was = kept.numpy(), order[kept].numpy()
        if not all(np.array_equal(b[now], a[was], equal_nan=True) for a, b in pairs):
            return False
    return True
