"""A module of PEFT as PEFT's own files: the adapter's tensors, its configuration, the base's names.

An adapter is released alone only if it is all that is certified: one adapter, active and not merged
into the base, whose tensors are exactly those of the release that are not public. The file holds
these very tensors under PEFT's names; the configuration is written from the live one, field by
field, never copied from a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from expunge.certificates.record import Adapter, PublicTensors
from expunge.errors import InputError
from expunge.processes.group import is_sharded
from expunge.processes.weights import hash_weights, list_tensors

LOG = logging.getLogger("expunge")


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """What ``adapter_model.safetensors`` and ``adapter_config.json`` hold, and the base's tensors
    by the names they have in the base alone."""

    tensors: dict[str, Tensor]
    config: bytes
    base: dict[str, Tensor]

    def describe(self) -> Adapter:
        """Their hashes."""
        config = hashlib.sha256(self.config).hexdigest()
        return Adapter(hash_weights(self.tensors), hash_weights(self.base), config)


def list_adapters(model: nn.Module) -> Mapping[str, Any]:
    """The configurations of the adapters of a PEFT model, by name; none for any other module.

    >>> list_adapters(nn.Linear(1, 1))
    {}
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return {}
    return cast(Mapping[str, Any], cast(Any, model).peft_config)


def check_adapters(model: nn.Module) -> None:
    """Refuse a PEFT model of which no single adapter can be released."""
    adapters = list_adapters(model)
    if len(adapters) > 1:
        raise InputError(
            f"the model has the adapters {', '.join(map(repr, adapters))}; a release is one of "
            "them on a public base: delete the others (model.delete_adapter), or merge public ones "
            "into the base"
        )
    merged = [path for path, module in model.named_modules() if _is_merged(module)]
    if adapters and merged:
        raise InputError(
            f"the adapter is merged into {merged[0]}, so that its weights would be in the base; "
            "call model.unmerge_adapter() first"
        )


def describe_adapter(model: nn.Module, public: PublicTensors | None) -> Adapter | None:
    """The hashes of the adapter that a release can be, or None."""
    found = find_adapter(model, () if public is None else public.names)
    return None if found is None else found.describe()


def find_adapter(model: nn.Module, public: Collection[str]) -> AdapterFiles | None:
    """The adapter as PEFT's files, if it is all of the release but ``public`` tensors."""
    adapters = list_adapters(model)
    if not adapters or is_sharded(model):
        return None
    try:
        check_adapters(model)
        return _read_adapter(model, next(iter(adapters)), public)
    except InputError as error:
        LOG.info("no adapter is released alone: %s", error)
        return None


def _read_adapter(model: nn.Module, name: str, public: Collection[str]) -> AdapterFiles:
    from peft import get_peft_model_state_dict

    config = list_adapters(model)[name]
    if list(cast(Any, model).active_adapters) != [name] or config.is_prompt_learning:
        raise InputError("it is not active, or a prompt")
    held = list_tensors(model)
    places = {id(tensor): place for place, tensor in held.items()}
    saved: Mapping[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(held), adapter_name=name, save_embedding_layers=False
    )
    tensors = {place: tensor for place, tensor in saved.items() if id(tensor) in places}
    if tensors.keys() != saved.keys():
        raise InputError("PEFT saves tensors that are not those of the model")
    chosen = {places[id(tensor)] for tensor in tensors.values()}
    known = _list_names(model, public)
    left = [place for place in held if place not in chosen and place not in known]
    if left or chosen & known or len(chosen) < len(tensors):
        what = f"{left[0]} is certified too" if left else "it holds public tensors or some twice"
        raise InputError(f"the adapter is not what is certified: {what}")
    base = {name_base(place): tensor for place, tensor in held.items() if place in known}
    if len(base) < len(known & held.keys()):
        raise InputError("two tensors of the base have one name")
    return AdapterFiles(tensors, _write_config(config), base)


def _list_names(model: nn.Module, public: Collection[str]) -> set[str]:
    """All names of the public tensors, of which tied ones are told once."""
    every: list[tuple[str, Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    told = {id(tensor) for name, tensor in every if name in public}
    return {name for name, tensor in every if id(tensor) in told}


def _write_config(config: Any) -> bytes:
    """The fields of a configuration as canonical JSON, for inference."""
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    try:
        text = json.dumps(plain | {"inference_mode": True}, indent=2, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"its configuration cannot be written as JSON: {error}") from None
    return text.encode()


def name_base(name: str) -> str:
    """The name of a tensor of the base, in the base alone.

    >>> name_base("base_model.model.bert.query.base_layer.weight")
    'bert.query.weight'
    """
    bare = name.removeprefix("base_model.model.")
    return bare.replace(".base_layer.", ".").replace(".original_module.", ".")


def _is_merged(module: nn.Module) -> bool:
    return getattr(module, "merged", False) is True
