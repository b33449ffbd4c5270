"""The second release beside a training without all three growers, in the usual way."""

from pathlib import Path

from own import build, load, train
from safetensors.torch import load_file

import expunge

chain = expunge.verify_chain(["release-1/certificate.json", "release-2/certificate.json"])
print(f"{len(chain)} certificates, each chained to the one before: they hold")

released = build()
released.load_state_dict(load_file("release-2/model.safetensors"))
gone = [
    name for path in ("monday.txt", "next_monday.txt") for name in Path(path).read_text().split()
]
found, other = (
    expunge.evaluate(m, *load()["test"].tensors) for m in (released, train(1, without=gone))
)
low, high = other.interval()
print(f"released: {found.accuracy:.1%} right of {found.count}")
print(f"retrained: {other.accuracy:.1%}, with 99 % confidence {low:.1%} to {high:.1%}")
print("level" if low <= found.accuracy else "not level")
