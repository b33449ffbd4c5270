"""What the demonstration and the experiments run on: data, networks, features; plain functions.

>>> from expunge.tasks import digits, split_forget
>>> task = digits.load()
>>> retain, forget = split_forget(task.train, fraction=0.1, seed=0)
>>> len(retain), len(forget), task.train.inputs.dtype
(1170, 130, torch.uint8)
"""

from expunge.tasks import augmentation, cifar, digits, features, mnist, networks
from expunge.tasks.augmentation import Augmentation
from expunge.tasks.samples import (
    Samples,
    Task,
    normalise,
    number_ids,
    read_ids,
    split_forget,
    split_validation,
)

__all__ = [
    "Augmentation",
    "Samples",
    "Task",
    "augmentation",
    "cifar",
    "digits",
    "features",
    "mnist",
    "networks",
    "normalise",
    "number_ids",
    "read_ids",
    "split_forget",
    "split_validation",
]
