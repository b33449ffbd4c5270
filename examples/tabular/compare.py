"""The released model beside one that is trained again, in the usual way, without these patients."""

from pathlib import Path

from own import build, load, train
from safetensors.torch import load_file

import expunge

released = build()
released.load_state_dict(load_file("run/model.safetensors"))
again = train(seed=1, without=Path("forget.txt").read_text().split())
found, other = (expunge.evaluate(m, *load()["test"].tensors) for m in (released, again))
low, high = other.interval()
print(f"released: {found.accuracy:.1%} right of {found.count}")
print(f"retrained: {other.accuracy:.1%}, with 99 % confidence {low:.1%} to {high:.1%}")
print("level" if low <= found.accuracy else "not level")
