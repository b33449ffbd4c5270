"""scikit-learn's digits: 1,797 grey images of 8 x 8 pixels, embedded, no download.

The set has one part only. A fixed seed puts 297 samples in the test set and 200 in validation, and
leaves 1,300 for training. Pixels are whole numbers from 0 to 16; the constants map that range to
[-1, 1], so they depend on the format and on no sample.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from expunge.errors import InputError
from expunge.tasks.samples import Samples, Task, number_ids, split_validation

TEST_SEED = 1_797
HALF_RANGE = 8 / 255


def load(*, validation: int = 200, test: int = 297) -> Task:
    """The digits as a task with 64 inputs and 10 classes.

    >>> task = load()
    >>> len(task.train), len(task.validation), len(task.test), tuple(task.train.inputs.shape[1:])
    (1300, 200, 297, (1, 8, 8))
    >>> str(task.train.ids[0])
    'digits/00000'
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("scikit-learn is not installed; pip install 'expunge[torch]'") from error
    bunch = cast(Any, load_digits())
    images: Any = np.asarray(bunch.images).astype(np.uint8)
    everything = Samples(
        torch.from_numpy(images[:, None].copy()),
        torch.from_numpy(np.asarray(bunch.target).astype(np.int64)),
        number_ids("digits/", np.arange(len(images))),
    )
    rest, tested = split_validation(everything, test, TEST_SEED)
    train, held = split_validation(rest, validation)
    return Task("digits", train, held, tested, tuple("0123456789"), (HALF_RANGE,), (HALF_RANGE,))
