"""Job files: twenty that are malformed, one sentence each, and what a valid one may hold."""

import re
from pathlib import Path

import pytest

from expunge.cli.jobs import TEMPLATES, write_template
from expunge.errors import InputError
from expunge.jobs.jobfile import find_lines, read_job
from expunge.jobs.methods import Settled, settle
from expunge.jobs.tables import RUNNABLE, TABLES, MethodTable, PlanTable

VALID = """\
[model]
build = "own.py:build"
weights = "weights.safetensors"
[data]
load = "own.py:load"
forget = "forget.txt"
[target]
epsilon = 1.0
delta = 1e-5
[method]
name = "gradient-clipping"
start_clip = 0.05
grad_clip = 1.0
learning_rate = 0.01
weight_decay = 10.0
steps = 20
[finetune]
epochs = 2
learning_rate = 0.05
[output]
dir = "run"
"""

# (what is replaced, by what, the one sentence that follows "job.toml")
MALFORMED = {
    "not TOML": ("[target]", "[target", r" is not valid TOML: .*line 7"),
    "a key twice": ("epsilon = 1.0", "epsilon = 1.0\nepsilon = 2.0", r" is not valid TOML: .*line"),
    "a table is missing": (
        "[target]\nepsilon = 1.0\ndelta = 1e-5\n",
        "",
        r": \[target\] is missing; a job needs it",
    ),
    "a table is misspelt": (
        "[finetune]",
        "[fine_tune]",
        r", line 17: \[fine_tune\] is not a table of a job; did you mean finetune\?",
    ),
    "a table is a number": (
        '[output]\ndir = "run"',
        "[output.dir]\nx = 1",
        r", line 20: output\.dir is \{'x': 1\}; it must be the path of a directory",
    ),
    "a key is missing": (
        'forget = "forget.txt"\n',
        "",
        r", line 4: data\.forget is missing; it must be the path of a text, CSV or Parquet file",
    ),
    "a key is misspelt": (
        "epochs = 2",
        "epoch = 2\nepochs = 2",
        r", line 18: finetune\.epoch is not a key of \[finetune\]; did you mean epochs\?",
    ),
    "no function": (
        '"own.py:build"',
        '"own.py"',
        r", line 2: model\.build is 'own\.py'; it must be \"module:function\" or \"path",
    ),
    "no such Python file": (
        '"own.py:build"',
        '"mine.py:build"',
        r", line 2: model\.build is 'mine\.py:build'; there is no such file in /",
    ),
    "no such module": (
        '"own.py:load"',
        '"shop_of_nobody.data:load"',
        r", line 5: data\.load is 'shop_of_nobody\.data:load'; there is no module shop_of_nobody",
    ),
    "no such weights": (
        "weights.safetensors",
        "old.safetensors",
        r", line 3: model\.weights is 'old\.safetensors'; there is no such file in /",
    ),
    "weights of another kind": (
        "weights.safetensors",
        "weights.npz",
        r", line 3: model\.weights is 'weights\.npz'; it must be the path of a \.safetensors",
    ),
    "a text for a number": (
        "epsilon = 1.0",
        'epsilon = "one"',
        r", line 8: target\.epsilon is 'one'; it must be a number > 0",
    ),
    "a delta above 1": (
        "delta = 1e-5",
        "delta = 1.5",
        r", line 9: target\.delta is 1\.5; it must be a number between 0 and 1",
    ),
    "an unknown method": (
        "gradient-clipping",
        "gradient-ascent",
        r", line 11: method\.name is 'gradient-ascent'; it must be one of gradient-clipping, ",
    ),
    "a method that cannot run on a trained model": (
        "gradient-clipping",
        "group-dp-sgd",
        r", line 11: method\.name is 'group-dp-sgd'; it must be one of gradient-clipping, ",
    ),
    "a parameter of another method": (
        "steps = 20",
        "steps = 20\nnoise_multiplier = 1.0",
        r", line 17: method\.noise_multiplier is not known to gradient-clipping; ",
    ),
    "a parameter is missing": (
        "grad_clip = 1.0\n",
        "",
        r", line 10: method\.grad_clip is missing; gradient-clipping needs it",
    ),
    "a negative clip": (
        "start_clip = 0.05",
        "start_clip = -0.05",
        r", line 12: method\.start_clip is -0\.05; it must be a number >= 0",
    ),
    "a schedule of the wrong length": (
        "learning_rate = 0.01",
        "learning_rate = [\n  0.01,\n  0.02,\n]",
        r", line 14: method\.learning_rate has 2 values; it must have one per step: 20",
    ),
    "steps that are not whole": (
        "steps = 20",
        "steps = 2.5",
        r", line 16: method\.steps is 2\.5; it must be a whole number >= 1",
    ),
    "a decay that is too strong": (
        "weight_decay = 10.0",
        "weight_decay = 100.0",
        r", line 10: method: learning_rate \* weight_decay is 1; it must be below 1",
    ),
    "too little noise": (
        "steps = 20",
        "steps = 20\nnoise_std = 0.02",
        r", line 17: method\.noise_std: this recipe certifies epsilon = [\d.]+ at delta = 1e-05, "
        r"and the target is 1; leave noise_std out",
    ),
    "a clip that nothing covers": (
        "start_clip = 0.05",
        "start_clip = inf",
        r", line 10: method: no value meets epsilon = 1, delta = 1e-05",
    ),
    "a CSV without a column": (
        '"forget.txt"',
        '"forget.csv"',
        r", line 6: data\.column is missing; forget\.csv needs the name of the column",
    ),
    "a parent without its list": (
        "[data]",
        'parent = "certificate.json"\n[data]',
        r", line 4: model\.parent is given, so data\.forgotten must name the lists",
    ),
    "momentum for Adam": (
        "epochs = 2",
        'epochs = 2\noptimizer = "adam"\nmomentum = 0.9',
        r", line 20: finetune\.momentum is 0\.9; it must be left out with optimizer = 'adam'",
    ),
    "a boolean for a number": (
        "epochs = 2",
        "epochs = true",
        r", line 18: finetune\.epochs is True; it must be a finite number > 0",
    ),
    "a loss nobody knows": (
        "[data]",
        'loss = "hinge"\n[data]',
        r", line 4: model\.loss is 'hinge'; it must be one of cross-entropy, mse, model, or a",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("own.py", "weights.safetensors", "weights.npz", "forget.txt", "forget.csv"):
        (tmp_path / name).write_text("")
    (tmp_path / "certificate.json").write_text("")
    return tmp_path


def refuse(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_job(path)
    return str(caught.value)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_job_gets_one_sentence_with_line_and_key(folder: Path, case: str) -> None:
    old, new, sentence = MALFORMED[case]
    assert VALID.count(old) == 1, "the case must change one place"
    message = refuse(folder, VALID.replace(old, new))
    assert re.search(r"job\.toml" + sentence, message), message
    assert "mistakes" not in message
    assert "\n" not in message


def test_all_mistakes_are_told_at_once_in_the_order_of_their_lines(folder: Path) -> None:
    text = VALID
    for case in ("no such weights", "a delta above 1", "a negative clip", "a boolean for a number"):
        old, new, _ = MALFORMED[case]
        text = text.replace(old, new)
    lines = refuse(folder, text).splitlines()
    assert lines[0].endswith("job.toml has 4 mistakes:")
    assert [line.split(":")[0] for line in lines[1:]] == [f"  line {n}" for n in (3, 9, 12, 18)]


def test_the_file_itself(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in _message(tmp_path)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * 100_001)
    assert "larger than 100,000 bytes" in _message(large)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in _message(binary)


def _message(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_job(path)
    return str(caught.value)


def test_a_valid_job_has_its_defaults_and_paths_of_its_own_folder(folder: Path) -> None:
    path = folder / "job.toml"
    path.write_bytes(VALID.replace("\n", "\r\n").encode("utf-8-sig"))
    made = read_job(path)
    assert made.locate("forget.txt") == folder / "forget.txt"
    assert made.locate("/srv/x.txt") == Path("/srv/x.txt")
    assert made.job.target.compared_to == "retrained"
    assert made.job.method.batch_size == 128
    assert made.job.evaluation.sets == ["retain", "forget", "test"]
    assert made.job.centre is None


def test_lines_are_found_where_values_span_several(folder: Path) -> None:
    text = '[a]\n# x = 1\nx = """\ny = 2\n"""\n\ny = [\n 1]\n[b]\nz.w = 1\n'
    found = find_lines(text)
    assert found == {
        ("a",): 1, ("a", "x"): 3, ("a", "y"): 7, ("b",): 9, ("b", "z"): 10,
    }  # fmt: skip


def settle_job(path: Path, parameters: int) -> Settled:
    job = read_job(path).job
    return settle(job.method, job.target, parameters)


@pytest.mark.parametrize("name", [*RUNNABLE, "plan"])
def test_the_settled_recipe_meets_the_target_on_a_real_machine(folder: Path, name: str) -> None:
    parameters = {
        "gradient-clipping": "start_clip = 0.05\ngrad_clip = 1.0\nlearning_rate = 0.01\n"
        "weight_decay = 10.0\nsteps = 20",
        "model-clipping": "model_clip = 0.5\nlearning_rate = 0.01\nweight_decay = 10.0\nsteps = 20",
        "output-perturbation": "start_clip = 0.05",
        "plan": 'choose = "model-clipping"\nsteps = 5',
    }[name]
    start, end = VALID.index("[method]"), VALID.index("[finetune]")
    method = f'[method]\nname = "{name}"\n{parameters}\n'
    path = folder / "job.toml"
    path.write_text(VALID[:start] + method + VALID[end:])
    settled = settle_job(path, 5000)
    assert 0.99 < settled.guarantee.epsilon <= 1.0
    assert settled.guarantee.delta == 1e-5
    assert settled.calibrated == (name != "plan")
    assert (settled.plan is not None) == (name == "plan")


def test_more_releases_need_more_noise(folder: Path) -> None:
    path = folder / "job.toml"
    noise = []
    for releases in (1, 4):
        path.write_text(VALID.replace("delta = 1e-5", f"delta = 1e-5\nreleases = {releases}"))
        noise.append(settle_job(path, 100).recipe.noise_std)
    assert noise[1] == pytest.approx(2 * noise[0], rel=1e-4)


def test_the_planner_takes_the_method_asked_for(folder: Path) -> None:
    start, end = VALID.index("[method]"), VALID.index("[finetune]")
    for choice in RUNNABLE:
        method = f'[method]\nname = "plan"\nchoose = "{choice}"\n'
        (folder / "job.toml").write_text(VALID[:start] + method + VALID[end:])
        settled = settle_job(folder / "job.toml", 100)
        assert [c.method for c in settled.plan.candidates if c.recipe == settled.recipe] == [choice]


def test_the_template_explains_every_key(tmp_path: Path) -> None:
    text = (TEMPLATES / "plain" / "job.toml").read_text()
    for table, kind in TABLES.items():
        assert f"[{table}]" in text
        for key in kind.model_fields:
            assert re.search(rf"^(# )?{key} = ", text, flags=re.MULTILINE), f"{table}.{key}"
    for key in {**PlanTable.model_fields, **MethodTable.model_fields}:
        assert re.search(rf"^(# )?{key} = ", text, flags=re.MULTILINE), key
    write_template(tmp_path)
    (tmp_path / "weights.safetensors").write_text("")
    read_job(tmp_path / "job.toml")


def test_a_template_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("mine")
    with pytest.raises(InputError, match=r"own\.py exists already; nothing was written"):
        write_template(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]
