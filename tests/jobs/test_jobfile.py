"""Job files: what is malformed, one sentence each, and what a valid one may hold."""

import re
from pathlib import Path

import pytest

import expunge
from expunge.cli.runs import TEMPLATES, write_template
from expunge.errors import InputError
from expunge.jobs import tables
from expunge.jobs.jobfile import read_job
from expunge.jobs.options import list_options

START = """\
[model]
build = "own.py:build"
old = "weights.safetensors"
[data]
load = "own.py:load"
forget = "forget.txt"
"""
EXACT = f"""{START}\
[training]
epochs = 2
learning_rate = 0.05
[output]
dir = "run"
"""
NOISE = f"""{START}\
[method]
name = "gradient-clipping"
epsilon = 1.0
delta = 1e-5
start_clip = 0.05
grad_clip = 1.0
learning_rate = 0.01
weight_decay = 10.0
steps = 20
[training]
epochs = 2
learning_rate = 0.05
"""

# (the job, what is replaced, by what, the one sentence that follows "job.toml")
MALFORMED = {
    "not TOML": (EXACT, "[training]", "[training", r" is not valid TOML: .*line 7"),
    "a key twice": (EXACT, "epochs = 2", "epochs = 2\nepochs = 3", r" is not valid TOML: .*line"),
    "a table is missing": (EXACT, '[model]\nbuild = "own.py:build"\nold = "weights.safetensors"\n',
     "", r": \[model\] is missing; this job needs it"),
    "no training": (EXACT, "[training]\nepochs = 2\nlearning_rate = 0.05\n", "",
     r": \[training\] is missing; this job needs it"),
    "a table is misspelt": (NOISE, "[training]", "[trainings]",
     r": \[trainings\] is not a table of this job; did you mean training\?"),
    "a table of the second plan": (NOISE, "[training]", "[target]",
     r": \[target\] is not a table of this job; it may have model, data"),
    "a table is a number": (EXACT, '[output]\ndir = "run"', "[output.dir]\nx = 1",
     r": output\.dir is \{'x': 1\}; it must be the path of a folder"),
    "a key is missing": (EXACT, 'forget = "forget.txt"\n', "",
     r": data\.forget is missing; it must be the path of a text, CSV, JSON or Parquet"),
    "a key is misspelt": (EXACT, 'old = "weights', 'odl = "weights',
     r": model\.odl is not a key of \[model\]; did you mean old\?"),
    "an option of training is misspelt": (EXACT, "learning_rate", "learning_rat",
     r": training\.learning_rat is not an option of expunge\.Training; did you mean"),
    "an option is missing": (EXACT, "epochs = 2", "momentum = 0.9",
     r": training\.epochs is missing; expunge\.Training needs it"),
    "options beside a function": (EXACT, "learning_rate = 0.05\n", 'function = "own.py:train"\n',
     r": training\.epochs is given; it must be left out with training\.function"),
    "nothing that trains": (EXACT, "epochs = 2\nlearning_rate = 0.05\n", "seed = 3\n",
     r": training\.function is missing; name it, or give epochs and the like"),
    "no function": (EXACT, '"own.py:build"', '"own.py"',
     r": model\.build is 'own\.py'; it must be \"module:function\" or \"path"),
    "no such weights": (EXACT, "weights.safetensors", "old.safetensors",
     r": model\.old is 'old\.safetensors'; there is no such file in /"),
    "no such parent": (EXACT, "[output]", '[method]\nparent = "release-1"\n[output]',
     r": method\.parent is 'release-1'; there is no such file in /"),
    "noise for retraining": (EXACT, "[output]", "[method]\nepsilon = 1.0\n[output]",
     r": method\.epsilon is not a key of \[method\] with name = 'retraining', which"),
    "a text for a number": (NOISE, "epsilon = 1.0", 'epsilon = "one"',
     r": method\.epsilon is 'one'; it must be a number > 0"),
    "a delta above 1": (NOISE, "delta = 1e-5", "delta = 1.5",
     r": method\.delta is 1\.5; it must be a number between 0 and 1"),
    "no epsilon": (NOISE, "epsilon = 1.0\n", "",
     r": method\.epsilon is missing; give it, or noise_std and the recipe's"),
    "no old model": (NOISE, 'old = "weights.safetensors"\n', "",
     r": model\.old is missing; gradient-clipping starts from the weights that must"),
    "an unknown method": (NOISE, "gradient-clipping", "gradient-ascent",
     r": method\.name is 'gradient-ascent'; it must be one of retraining, gradient-"),
    "an unknown estimator": (
     '[data]\nload = "own.py:load"\n[method]\nname = "linear-model"\nestimator = "Lasso"\n',
     "Lasso", "Losso",
     r": method\.estimator is 'Losso'; it must be one of LogisticRegression, Ridge"),
    "a parameter of another method": (NOISE, "steps = 20", "steps = 20\nnoise_multiplier = 1.0",
     r": method\.noise_multiplier is not an option of gradient-clipping; "),
    "a parameter is missing": (NOISE, "grad_clip = 1.0\n", "",
     r": method\.grad_clip is missing; gradient-clipping needs it"),
    "a negative clip": (NOISE, "start_clip = 0.05", "start_clip = -0.05",
     r": method\.start_clip is -0\.05; it must be a number >= 0"),
    "a schedule of the wrong length": (NOISE, "learning_rate = 0.01",
     "learning_rate = [\n  0.01,\n  0.02,\n]",
     r": method\.learning_rate has 2 values; it must have one per step: 20"),
    "steps that are not whole": (NOISE, "steps = 20", "steps = 2.5",
     r": method\.steps is 2\.5; it must be a whole number >= 1"),
    "a decay that is too strong": (NOISE, "weight_decay = 10.0", "weight_decay = 100.0",
     r": method\.learning_rate \* weight_decay is 1; it must be below 1"),
    "a CSV without a column": (EXACT, '"forget.txt"', '"forget.csv"',
     r": data\.column is missing; forget\.csv needs the name of the column"),
    "momentum for Adam": (
     EXACT,
     "epochs = 2",
     'epochs = 2\noptimizer = "adam"\nmomentum = 0.9',
     r": training\.momentum is 0\.9; it must be 0 unless the optimizer is sgd",
    ),
    "a text for epochs": (EXACT, "epochs = 2", 'epochs = "two"',
     r": training\.epochs is 'two'; it must be a finite number"),
    "a loss nobody knows": (EXACT, "epochs = 2", 'epochs = 2\nloss = "hinge"',
     r": training\.loss is 'hinge'; it must be a name in torch\.nn\.functional"),
    "a seed beyond 2^53": (
     EXACT,
     "epochs = 2",
     f"epochs = 2\nseed = {2**70}",
     r": training\.seed is 1180591620717411303424; it must be a whole number",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("own.py", "weights.safetensors", "forget.txt", "forget.csv"):
        (tmp_path / name).write_text("")
    return tmp_path


def refuse(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_job(path)
    return str(caught.value)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_job_gets_one_sentence_with_its_key(folder: Path, case: str) -> None:
    text, old, new, sentence = MALFORMED[case]
    assert text.count(old) == 1, "the case must change one place"
    message = refuse(folder, text.replace(old, new))
    assert re.search(r"job\.toml" + sentence, message), message
    assert "mistakes" not in message
    assert "\n" not in message


def test_all_mistakes_at_once(folder: Path) -> None:
    text = NOISE
    for case in ("no such weights", "a delta above 1", "a negative clip", "a text for epochs"):
        _, old, new, _ = MALFORMED[case]
        text = text.replace(old, new)
    lines = refuse(folder, text).splitlines()
    assert lines[0].endswith("job.toml has 3 mistakes:"), "what depends on the method waits"
    assert [line.split()[0] for line in lines[1:]] == [
        "model.old", "training.epochs", "method.delta",
    ]  # fmt: skip


def test_all_wrong_options_at_once(folder: Path) -> None:
    text = EXACT.replace("epochs = 2", 'epochs = -2\nloss = "hinge"\nstepz = 3')
    lines = refuse(folder, text.replace("= 0.05", "= nan")).splitlines()
    found = [line.split()[0].removeprefix("training.") for line in lines[1:]]
    assert found == ["loss", "stepz", "epochs", "learning_rate"]


def test_a_valid_job_has_its_defaults_and_paths_of_its_own_folder(folder: Path) -> None:
    path = folder / "job.toml"
    path.write_bytes(EXACT.replace("\n", "\r\n").encode("utf-8-sig"))
    made = read_job(path).of(tables.UnlearnJob)
    assert made.locate("forget.txt") == folder / "forget.txt"
    assert made.locate("/srv/x.txt") == Path("/srv/x.txt")
    assert isinstance(made.job.method, tables.RetrainingTable)
    assert made.job.training is not None
    assert made.job.training.options == {"epochs": 2, "learning_rate": 0.05}
    assert made.job.training.seed == 0


def test_each_command_says_which_job_is_the_others(folder: Path) -> None:
    path = folder / "job.toml"
    path.write_text(EXACT)
    with pytest.raises(InputError, match="is a job for expunge unlearn: its method is 'retraining"):
        read_job(path).of(tables.LearnJob)
    path.write_text('[data]\nload = "own.py:load"\n[method]\nname = "linear-model"\n')
    with pytest.raises(InputError, match=r"for expunge learn: .* expunge forget state LIST"):
        read_job(path).of(tables.UnlearnJob)


def settle(folder: Path, text: str, parameters: int):
    path = folder / "job.toml"
    path.write_text(text)
    method = read_job(path).of(tables.UnlearnJob).job.method
    assert isinstance(method, tables.NoisyTable)
    return method.recipe and method.recipe(parameters)


def test_more_releases_need_more_noise(folder: Path) -> None:
    noise = [
        settle(
            folder, NOISE.replace("delta = 1e-5", f"delta = 1e-5\nreleases = {n}"), 100
        ).noise_std
        for n in (1, 4)
    ]
    assert noise[1] == pytest.approx(2 * noise[0], rel=1e-4)


def test_the_template_explains_every_key(tmp_path: Path) -> None:
    text = (TEMPLATES / "plain" / "job.toml").read_text()
    for kind in ("retraining", "gradient-clipping"):
        for table, columns in tables.list_tables(tables.JOBS[kind]).items():
            assert f"[{table}]" in text
            for key in columns.model_fields:
                assert re.search(rf"^(# )?{key} = ", text, flags=re.MULTILINE), f"{table}.{key}"
    for key in list_options(expunge.Training):
        assert re.search(rf"^(# )?{key} = ", text, flags=re.MULTILINE), key
    write_template(tmp_path)
    (tmp_path / "weights.safetensors").write_text("")
    read_job(tmp_path / "job.toml")


def test_a_template_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("mine")
    with pytest.raises(InputError, match=r"own\.py exists already; nothing was written"):
        write_template(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]
