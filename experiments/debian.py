"""One-line descriptions of Debian's packages, by section: a real text-classification set.

61,690 descriptions of 58 sections from the package index of Debian 12. An identifier is a source
package, and stands on every binary package built from it: whoever asks that one be forgotten asks
for all of its samples. Parts are split by source package with a fixed seed. Inputs are the token
numbers of MiniLM, 0 where a text has ended.
"""

from __future__ import annotations

import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch

from download import check_digest, find
from features import find_minilm
from samples import VALIDATION_SEED, Samples, order_names, take_names

FILE = "debian-descriptions.tsv.xz"
DIGEST = "82aa9a7546816df8752db2d1d2e7f77a95e437677b97a2ae1dabd7a730f18ca5"
TOKENS = 64
VALIDATION, TEST = 0.05, 0.15


def load() -> tuple[Samples, Samples, Samples]:
    """(train, validation, test)."""
    from transformers import AutoTokenizer

    sources, sections, texts = zip(*read_lines(find_file()), strict=True)
    places = {name: k for k, name in enumerate(sorted(set(sections)))}
    targets = torch.tensor([places[section] for section in sections])
    tokenizer: Any = AutoTokenizer.from_pretrained(find_minilm(), local_files_only=True)
    found = tokenizer(list(texts), padding="max_length", truncation=True, max_length=TOKENS)
    tokens = torch.tensor(found["input_ids"], dtype=torch.int32)
    samples = Samples(tokens, targets, np.array(sources, dtype=np.str_))
    order = order_names(samples.ids, VALIDATION_SEED)
    ends = [round(len(order) * share) for share in (VALIDATION, VALIDATION + TEST)]
    held, tested, trained = (take_names(samples, names) for names in np.split(order, ends))
    return trained, held, tested


def find_file() -> Path:
    """In the folder beside the repository, or in that of the data."""
    beside = Path(__file__).parents[2] / "shared" / "data" / FILE
    return beside if beside.is_file() else find(FILE, "the package index of Debian 12")


def read_lines(path: Path) -> list[tuple[str, str, str]]:
    """(source, section, description) of every line, each once, in the file's order."""
    data = path.read_bytes()
    check_digest(data, DIGEST, path)
    with io.TextIOWrapper(lzma.LZMAFile(io.BytesIO(data)), encoding="utf-8") as file:
        _, *lines = (line.rstrip("\n").split("\t") for line in file)
    return list(dict.fromkeys((source, section, text) for _, source, section, text in lines))
