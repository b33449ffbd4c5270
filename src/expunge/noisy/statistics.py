"""Running statistics of normalisations, estimated on retained data after the last noise."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from expunge.errors import UnlearningError
from expunge.networks.tensors import evaluating, find_nonfinite, list_tensors
from expunge.training.batches import Batches, move_batch
from expunge.training.losses import Loss, compute_loss


def list_normalisations(module: nn.Module) -> dict[str, nn.Module]:
    """Those that training would give running statistics, by name.

    >>> list(list_normalisations(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())))
    ['0']
    """
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.training and part.track_running_stats
    }


def estimate_statistics(
    module: nn.Module, batches: Batches, loss: Loss | None, device: torch.device
) -> tuple[str, ...]:
    """Set running statistics to the plain average over one pass; returns the buffers' names.

    The weights are noisy by now, and everything else is in eval mode: this is post-processing.

    >>> norm = nn.BatchNorm1d(1)
    >>> data = Batches((torch.tensor([[1.0], [3.0]]), torch.zeros(2)), batch_size=2, seed=0)
    >>> model, cpu = nn.DataParallel(norm), torch.device("cpu")  # names are those of the release
    >>> estimate_statistics(model, data, lambda output, target: output.sum(), cpu)
    ('running_mean', 'running_var', 'num_batches_tracked')
    >>> norm.running_mean
    tensor([2.])
    """
    found = list_normalisations(module)
    if not found:
        return ()
    momenta = {name: cast(Any, part).momentum for name, part in found.items()}
    with evaluating(module), torch.no_grad():
        for part in found.values():
            part.training = True
            cast(Any, part).reset_running_stats()
            cast(Any, part).momentum = None
        for number, batch in enumerate(batches.read(0), 1):
            compute_loss(module, move_batch(batch, device), loss)
            for name, part in found.items():
                wrong = find_nonfinite(dict(part.named_buffers(recurse=False)))
                if wrong is not None:
                    raise UnlearningError(
                        f"{wrong} of {name or 'the model'} is not finite after batch {number} of "
                        "the retained data; mend or leave out the sample that is not finite"
                    )
    for name, part in found.items():
        cast(Any, part).momentum = momenta[name]
    own = {buffer.data_ptr() for part in found.values() for buffer in part.buffers(recurse=False)}
    return tuple(name for name, tensor in list_tensors(module).items() if tensor.data_ptr() in own)
