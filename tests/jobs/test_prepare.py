"""A job made ready: what is public, what was forgotten before, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.errors import InputError, UnlearningError
from expunge.jobs.jobfile import read_job
from expunge.jobs.loading import importing_from
from expunge.jobs.prepare import Prepared, prepare
from expunge.jobs.preview import preview_job
from job_folder import write_job

FROZEN = """
import torch
from torch import nn

from own import load


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model.register_buffer("scale", torch.ones(2))
    return model
"""


def write_frozen(folder: Path, **model: object) -> Path:
    """A job whose first layer is frozen, with weights of the second one only."""
    centre = {"kind": "zero"}  # build() seeds itself
    path = write_job(folder, model={"build": "frozen.py:build"} | model, centre=centre)
    (folder / "frozen.py").write_text(FROZEN)
    torch.manual_seed(1)
    head = {f"1.{name}": t for name, t in torch.nn.Linear(5, 3).state_dict().items()}
    save_file(head, folder / "weights.safetensors")
    return path


def make_ready(path: Path) -> Prepared:
    made = read_job(path)
    with importing_from(made.folder):
        return prepare(made)


def test_what_is_frozen_needs_a_word_about_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(UnlearningError, match=r"0\.weight"):
        make_ready(write_frozen(tmp_path))
    ready = make_ready(write_frozen(tmp_path, public="build"))
    assert ready.parameters == 18
    assert set(ready.public) == {"0.weight", "0.bias", "scale"}
    ready = make_ready(write_frozen(tmp_path, public=["0.*", "scale"]))
    assert ready.public == ["0.*", "scale"]
    with pytest.raises(UnlearningError, match="scale"):
        make_ready(write_frozen(tmp_path, public=["0.*"]))


def test_a_frozen_layer_that_was_trained_is_not_as_built(tmp_path: Path) -> None:
    path = write_frozen(tmp_path, public="build")
    weights = load_file(tmp_path / "weights.safetensors")
    save_file(weights | {"0.bias": torch.full((5,), 0.5)}, tmp_path / "weights.safetensors")
    with pytest.raises(UnlearningError, match=r"0\.bias differs from the public tensors"):
        make_ready(path)


def test_a_public_file_is_compared_by_name(tmp_path: Path) -> None:
    path = write_frozen(tmp_path, public="base.safetensors")
    with pytest.raises(InputError, match=r"model\.public is 'base\.safetensors'; there is no such"):
        read_job(path)
    built = make_ready(write_frozen(tmp_path, public="build")).public
    path = write_frozen(tmp_path, public="base.safetensors")
    save_file(built, tmp_path / "base.safetensors")
    assert make_ready(path).parameters == 18
    del built["scale"]
    save_file(built, tmp_path / "base.safetensors")
    with pytest.raises(UnlearningError, match="scale is not in the public tensors"):
        make_ready(path)


def test_a_dry_run_counts_and_times(tmp_path: Path) -> None:
    found = preview_job(write_job(tmp_path, evaluation={"control": True}))
    assert (found.retain, found.forget, found.steps) == (47, 3, 4)
    assert found.gradient_evaluations == 40
    assert found.seconds > 0
    assert not (tmp_path / "run").exists()
