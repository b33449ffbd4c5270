"""A trained module as a release, and a release as a module.

Where the model can ``save_pretrained``, its configuration lies beside the weights, so that
``AutoModel….from_pretrained(run)`` loads the folder; a PEFT adapter lies in ``adapter/`` as PEFT
reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.hashes import combine_leaves, hash_file, hash_tensor
from expunge.certificates.record import Record, Tensors
from expunge.certificates.release import CERTIFICATE, WEIGHTS, Contents, Release, describe_contents
from expunge.errors import InputError, UnlearningError, VerificationError
from expunge.networks.adapters import FILE, find_adapter, list_adapters, list_file_names
from expunge.networks.building import call_build, check_extra_state
from expunge.networks.tensors import (
    find_nonfinite,
    list_published,
    list_tensors,
    name_first,
    read_extra_state,
    unwrap,
    walk_tensors,
)

ADAPTER = "adapter"


def hash_start(module: nn.Module) -> dict[str, bytes]:
    """The hash of every tensor of ``build()``'s module, before anything is trained.

    >>> list(hash_start(nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    return {name: hash_tensor(tensor, name) for name, tensor in list_tensors(module).items()}


def list_contents(module: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> Contents:
    """What is written of a module: its named tensors, configuration and adapter.

    ``tensors`` are the module's where they are not in it (a model that processes share out).
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("what was applied", type(module).__name__, "None or an nn.Module")
    named = dict(list_tensors(module) if tensors is None else tensors)
    if tensors is None:
        read_extra_state(module)
    if (wrong := find_nonfinite(named, list_published(module))) is not None:
        advice = "lower the learning rate, or mend what was applied"
        raise UnlearningError(f"{wrong} is not finite, so nothing is released; {advice}")
    files: dict[str, Any] = dict(_write_configs(module))
    hashes, adapter = find_adapter(module, named) or (None, {})
    files |= {f"{ADAPTER}/{name}": content for name, content in adapter.items()}
    return Contents(named, files, hashes)


def make_release(
    module: nn.Module,
    record: Record,
    *,
    start: Mapping[str, bytes] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    delta: float = 1e-5,
    compared_to: Literal["retrained", "centre"] = "retrained",
    releases: int = 1,
    parent: Certificate | None = None,
) -> Release:
    """The release of a trained module; ``record`` is completed by what is released.

    ``start`` is :func:`hash_start` of what ``build()`` gave: of the tensors that the record calls
    published, those are that training left as they were. ``tensors`` see :func:`list_contents`.
    """
    check_extra_state(module)
    contents = list_contents(module, tensors)
    leaves = {name: hash_tensor(tensor, name) for name, tensor in contents.tensors.items()}
    update = describe_contents(contents, combine_leaves(leaves.values()))
    published = record.weights.published
    if published is not None and start is not None:
        same = tuple(name for name in published.names if leaves.get(name) == start[name])
        root = combine_leaves(leaves[name] for name in same)
        kept = Tensors(names=same, hash=root, compared=published.compared)
        update["published"] = kept if same else None
    weights = record.weights.model_copy(update=update)
    record = record.model_copy(update={"weights": weights})
    terms: dict[str, Any] = {"compared_to": compared_to, "releases": releases, "parent": parent}
    certificate = certify(record, delta=delta, **terms)
    model = unwrap(module)  # a wrapper of DDP would outlive its process group
    for part in model.modules():  # to be used, not trained: by the flag, which moves no weights
        part.training = False
    return Release(model, certificate, record, contents.tensors, contents.files, list_contents)


def _write_configs(module: nn.Module) -> dict[str, bytes]:
    """config.json and generation_config.json of a model of transformers, as it saves them."""
    model: Any = unwrap(module)
    config: Any = getattr(model, "config", None)
    if (
        not hasattr(model, "save_pretrained")
        or not hasattr(config, "to_json_string")
        or list_adapters(module)
        or getattr(model, "_hf_peft_config_loaded", False)
    ):
        return {}
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    found = {"config.json": config.to_json_string().encode()}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        found["generation_config.json"] = generation.to_json_string().encode()
    return found


def load_model(run: str | Path, build: Callable[[], nn.Module]) -> nn.Module:
    """The released model: ``build()``, under the run's seed, with the tensors of ``run``.

    It is in eval mode. The file must be the one that the certificate names by hash. Where only the
    adapter of a PEFT model is there, ``build()``'s base is used. Numbers are verified by
    ``expunge.verify``.
    """
    folder = Path(run)
    certificate = Certificate.load(folder / CERTIFICATE)
    module, weights = call_build(build, int(certificate.seed)), certificate.weights
    own = list_tensors(module)
    if (folder / WEIGHTS).is_file():
        tensors = read_verified(folder / WEIGHTS, weights.after)
    elif weights.adapter is not None:
        hashes, _ = find_adapter(module) or (None, {})
        if (base := None if hashes is None else hashes.base) != weights.adapter.base:
            raise VerificationError(
                f"build() gives a base with the hash {base}; the adapter's certificate says "
                f"{weights.adapter.base}"
            )
        names = list_file_names(module)
        given = read_verified(folder / ADAPTER / FILE, weights.adapter.hash)
        tensors = own | {names.get(n, n): t for n, t in given.items()}
    else:
        raise InputError.of("run", str(run), f"a folder with {WEIGHTS}")
    shapes = [{name: t.shape for name, t in named.items()} for named in (own, tensors)]
    if wrong := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        raise InputError(
            f"build()'s module and {run} differ in the name or shape of {name_first(wrong)}; "
            "build() must be that of the run"
        )
    for name, tensor in walk_tensors(module):  # what was applied may have changed the dtype
        tensor.data = tensors[name].to(tensor.device, copy=True)
    return module.eval()


def read_verified(file: Path, expected: str) -> dict[str, Tensor]:
    """The tensors of a file, if they are those of the certificate."""
    from safetensors.torch import load_file

    found = hash_file(file)
    if found != expected:
        raise VerificationError(f"{file} has the hash {found}; its certificate says {expected}")
    return load_file(file)
