"""A module of PEFT as PEFT's own files: the adapter's tensors, its configuration, the base's names.

An adapter is released alone only if it is all that was trained: one adapter, active and not merged
into the base, whose tensors are exactly the trainable ones. The configuration is written from the
live one, field by field, never copied from a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from expunge.certificates.hashes import hash_tensors
from expunge.certificates.record import Adapter
from expunge.networks.tensors import list_aliases, list_tensors, unwrap

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def list_adapters(module: nn.Module) -> Mapping[str, Any]:
    """The configurations of a PEFT model's adapters, by name; none for any other module.

    >>> list_adapters(nn.Linear(1, 1))
    {}
    """
    peft: Any = sys.modules.get("peft")
    inner: Any = unwrap(module)
    if peft is None or not isinstance(inner, peft.PeftModel):
        return {}
    return cast(Mapping[str, Any], inner.peft_config)


def list_file_names(module: nn.Module) -> dict[str, str]:
    """The module's own names, by those that PEFT writes into an adapter's file.

    PEFT leaves out the adapter's name, and the wrapper of a module that is saved whole.
    """
    found: dict[str, str] = {}
    for adapter in list_adapters(module):
        from peft import get_peft_model_state_dict

        tensors = list_tensors(module)
        places = {id(tensor): name for name, tensor in tensors.items()}
        saved: Mapping[str, Tensor] = get_peft_model_state_dict(
            unwrap(module), state_dict=tensors, adapter_name=adapter, save_embedding_layers=False
        )
        for name, tensor in saved.items():
            if id(tensor) in places:
                found.setdefault(name, places[id(tensor)])
    return found


def name_base(name: str) -> str:
    """The name of a tensor of the base, in the base alone.

    >>> name_base("base_model.model.bert.query.base_layer.weight")
    'bert.query.weight'
    """
    bare = name.removeprefix("base_model.model.")
    return bare.replace(".base_layer.", ".").replace(".original_module.", ".")


def find_adapter(
    module: nn.Module, tensors: Mapping[str, Tensor] | None = None
) -> tuple[Adapter, dict[str, Any]] | None:
    """The adapter's hashes and PEFT's two files, if it is all that the module trains; else None.

    ``tensors`` are those of the module, where they are not in it (a model shared out by FSDP).
    """
    adapters = list_adapters(module)
    if len(adapters) != 1:
        return None
    (name, config), *_ = adapters.items()
    inner: Any = unwrap(module)
    merged = any(getattr(part, "merged", False) is True for part in inner.modules())
    if merged or config.is_prompt_learning or list(inner.active_adapters) != [name]:
        return None
    own = list_tensors(module) if tensors is None else tensors
    names, trained = list_file_names(module), list_aliases(module)
    base = {name_base(n): t for n, t in own.items() if n not in trained}
    if set(names.values()) != trained.keys() or len(base) != len(own) - len(trained):
        return None
    adapter = {n: own[place] for n, place in names.items()}
    settings = config.to_dict() | {"inference_mode": True}
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)  # sets of names
    hashes = Adapter(hash=hash_tensors(adapter), base=hash_tensors(base))
    return hashes, {CONFIG: text.encode(), FILE: adapter}


def list_base_names(names: Iterable[str]) -> dict[str, str]:
    """A PEFT model's own names by those of its base, where only one tensor has that name."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name_base(name), []).append(name)
    return {short: own[0] for short, own in found.items() if len(own) == 1 and own[0] != short}
