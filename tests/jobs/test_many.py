"""Many runs of one function: nothing twice, nothing lost, in sequence and on Ray."""

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import pytest

from expunge import InputError, run_many
from expunge.files import hold_lock
from expunge.jobs import many as rays
from expunge.jobs.many import Item, Pool

ROOT = str(Path(__file__).parents[2])


def note(path: str, text: str) -> int:
    """Append a line, and say how often it is there now: lines of a few bytes are not torn."""
    with Path(path).open("a") as file:
        file.write(text + "\n")
    return Path(path).read_text().splitlines().count(text)


def work(argument: dict) -> dict:
    """Does to itself what its argument says; notes each time that it is called."""
    time.sleep(argument.get("seconds", 0))
    name, log = argument["name"], argument["log"]
    times = note(log, name)
    match argument.get("act"):
        case "die" if times <= argument["deaths"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case "refuse":
            raise InputError("the seed of the shop is -1; it must be >= 0")
        case "fall":
            return {}[name]
        case "exit":
            sys.exit(7)
        case "interrupt" if times == 1:
            raise KeyboardInterrupt
        case "set":
            return {name}
        case "wait" if times == 1:
            try:
                note(log, f"{name} waits")
                for _ in range(600):
                    time.sleep(0.1)
            except KeyboardInterrupt:
                note(log, f"{name} stops")
                raise
    return {"name": name, "pid": os.getpid(), "pair": (1, 2)}


def make_items(folder: Path, names: str = "a b c d", **acts: dict) -> dict[str, dict]:
    log = str(folder / "log")
    return {name: {"name": name, "log": log, **acts.get(name, {})} for name in names.split()}


def count_calls(folder: Path) -> Counter[str]:
    return Counter((folder / "log").read_text().splitlines())


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_every_item_has_its_value_and_its_file_and_is_kept(tmp_path: Path) -> None:
    items, results = make_items(tmp_path), tmp_path / "deep" / "results"
    found = run_many(work, items, results)
    assert list(found) == list("abcd")
    assert all(o.value["pair"] == [1, 2] and o.error is None and not o.kept for o in found.values())
    assert list_names(results) == ["a.json", "b.json", "c.json", "d.json"]
    again = run_many(work, items | make_items(tmp_path, "e"), results)
    assert [o.kept for o in again.values()] == [True] * 4 + [False]
    assert again["b"].value == found["b"].value
    assert set(count_calls(tmp_path).values()) == {1}


def test_a_result_is_on_disk_before_the_next_item_begins(tmp_path: Path) -> None:
    def look(_: int) -> list[str]:
        return list_names(tmp_path / "results")

    found = run_many(look, {"a": 1, "b": 2, "c": 3}, tmp_path / "results")
    assert [len(o.value) for o in found.values()] == [0, 1, 2]


def test_ctrl_c_leaves_what_is_finished_and_the_next_call_does_the_rest(tmp_path: Path) -> None:
    items = make_items(tmp_path, c={"act": "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        run_many(work, items, tmp_path / "results")
    assert list_names(tmp_path / "results") == ["a.json", "b.json"]
    found = run_many(work, items, tmp_path / "results")
    assert [o.kept for o in found.values()] == [True, True, False, False]
    assert count_calls(tmp_path) == {"a": 1, "b": 1, "c": 2, "d": 1}


def test_a_killed_process_leaves_no_half_result_and_nothing_is_done_twice(tmp_path: Path) -> None:
    items = make_items(tmp_path, c={"act": "die", "deaths": 1})
    script = (
        f"import sys, json; sys.path.insert(0, {ROOT!r})\n"
        "from expunge import run_many; from tests.jobs.test_many import work\n"
        "run_many(work, json.loads(sys.argv[1]), sys.argv[2])"
    )
    call = [sys.executable, "-c", script, json.dumps(items), str(tmp_path / "results")]
    assert subprocess.run(call, check=False).returncode == -signal.SIGKILL
    assert list_names(tmp_path / "results") == ["a.json", "b.json"]
    found = run_many(work, items, tmp_path / "results")
    assert all(o.error is None for o in found.values())
    assert count_calls(tmp_path) == {"a": 1, "b": 1, "c": 2, "d": 1}


def test_what_fails_fails_alone_and_is_tried_by_the_next_call_only(tmp_path: Path) -> None:
    acts = {"a": {"act": "refuse"}, "b": {"act": "fall"}, "c": {"act": "exit"}, "d": {"act": "set"}}
    found = run_many(work, make_items(tmp_path, "a b c d e", **acts), tmp_path / "results")
    assert found["a"].error == "the seed of the shop is -1; it must be >= 0"
    assert found["b"].error.startswith("KeyError: 'b' (")
    assert "test_many.py, line " in found["b"].error
    assert found["c"].error.startswith("SystemExit: 7 (")
    assert found["d"].error.startswith("its result is not plain data: ")
    assert list_names(tmp_path / "results") == ["e.json"]
    assert set(count_calls(tmp_path).values()) == {1}
    run_many(work, make_items(tmp_path, "a e", a={"act": "refuse"}), tmp_path / "results")
    assert count_calls(tmp_path)["a"] == 2
    assert count_calls(tmp_path)["e"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-20],
        lambda raw: b"\xff" + raw,
        lambda raw: b"[1]",
        lambda raw: raw.replace(b'"seconds": ', b'"seconds": 1'),
        lambda raw: raw.replace(b'"name": "b"', b'"name": "c"'),
        lambda raw: b"[" * 100_000,
    ],
)
def test_a_damaged_result_is_made_anew(tmp_path: Path, damage, caplog) -> None:
    items, path = make_items(tmp_path), tmp_path / "results" / "b.json"
    run_many(work, items, tmp_path / "results")
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert path.read_bytes() != good
    found = run_many(work, items, tmp_path / "results")
    assert [o.kept for o in found.values()] == [True, False, True, True]
    assert count_calls(tmp_path) == {"a": 1, "b": 2, "c": 1, "d": 1}
    assert f"{path} cannot be read as a result; b is run again" in caplog.text
    assert run_many(work, items, tmp_path / "results")["b"].kept


def test_results_of_something_else_are_refused_and_left_alone(tmp_path: Path) -> None:
    items, results = make_items(tmp_path), tmp_path / "results"
    run_many(work, items, results, version={"code": 1})
    before = {name: (results / name).read_bytes() for name in list_names(results)}
    changed = make_items(tmp_path, "a b c d e", b={"seconds": 0.001}, d={"seconds": 0.001})
    with pytest.raises(InputError, match=r"another argument or version: b\.json, d\.json"):
        run_many(work, changed, results, version={"code": 1})
    with pytest.raises(InputError, match="another argument or version"):
        run_many(work, items, results, version={"code": 2})
    assert {name: (results / name).read_bytes() for name in list_names(results)} == before
    assert set(count_calls(tmp_path).values()) == {1}


def test_numbers_and_texts_come_back_as_they_were(tmp_path: Path) -> None:
    values = [math.nan, math.inf, 0.1 + 0.2, 10**30, "ε\ud800", None, {"a": [True]}]
    first = run_many(lambda i: values[i], {f"i{i}": i for i in range(7)}, tmp_path)
    second = run_many(lambda i: values[i], {f"i{i}": i for i in range(7)}, tmp_path)
    assert all(o.kept for o in second.values())
    for a, b, value in zip(first.values(), second.values(), values, strict=True):
        assert repr(a.value) == repr(b.value) == repr(value)


def test_unusable_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for name in ("", "../a", ".a", "a/b", "a b", "x" * 151):
        with pytest.raises(InputError, match="name of an item is"):
            run_many(work, make_items(tmp_path) | {name: 1}, results)
    with pytest.raises(InputError, match="the argument of item x must be plain data"):
        run_many(work, make_items(tmp_path) | {"x": {1, 2}}, results)
    for options in ({"workers": 0}, {"retries": -1}):
        with pytest.raises(InputError, match="it must be a whole number"):
            run_many(work, make_items(tmp_path), results, ray=True, **options)
    assert not list(tmp_path.iterdir())
    results.write_text("")
    with pytest.raises(InputError, match="is a file; name a directory"):
        run_many(work, make_items(tmp_path), results)


def test_two_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        hold_lock(tmp_path / ".lock", "held"),
        pytest.raises(InputError, match="another process is writing results"),
    ):
        run_many(work, make_items(tmp_path), tmp_path)
    assert list_names(tmp_path) == []
    assert len(run_many(work, make_items(tmp_path), tmp_path)) == 4


def test_progress_is_plain_lines_on_stderr_and_only_if_wanted(tmp_path: Path, capsys) -> None:
    items = make_items(tmp_path, b={"act": "refuse"})
    run_many(work, items, tmp_path / "results", progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert lines[0] == "0 of 4 done, 4 left"
    assert lines[1] == "1 of 4 done, 3 left"
    assert lines[2] == "b failed: the seed of the shop is -1; it must be >= 0"
    assert lines[-1] == "3 of 4 done, 1 failed, 0 left"
    run_many(work, items, tmp_path / "results")
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_on_ray_a_worker_that_dies_is_replaced_and_nothing_else_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    acts = {
        "b": {"act": "die", "deaths": 1},
        "c": {"act": "die", "deaths": 9},
        "d": {"act": "refuse"},
        "e": {"act": "exit"},
    }
    items = make_items(tmp_path, "a b c d e f g h", **acts)
    handler = signal.getsignal(signal.SIGTERM)
    found = run_many(work, items, tmp_path / "results", ray=True, workers=2, retries=1)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert {name for name, o in found.items() if o.error is None} == set("abfgh")
    assert found["c"].error.startswith("its worker died 2 times")
    assert found["d"].error == "the seed of the shop is -1; it must be >= 0"
    assert found["e"].error.startswith("SystemExit: 7")
    calls = {"a": 1, "b": 2, "c": 2, "d": 1, "e": 1, "f": 1, "g": 1, "h": 1}
    assert count_calls(tmp_path) == calls
    assert list_names(tmp_path / "results") == [f"{name}.json" for name in "abfgh"]
    assert os.getpid() not in {found[name].value["pid"] for name in "abfgh"}

    monkeypatch.setitem(sys.modules, "ray", None)
    good = {name: items[name] for name in "abfgh"}
    again = run_many(work, good, tmp_path / "results", ray=True)
    assert all(o.kept for o in again.values()), "no Ray is needed where nothing is left"
    with pytest.raises(InputError, match=r"Ray is not installed; .*pip install 'expunge\[ray\]'"):
        run_many(work, items, tmp_path / "results", ray=True)
    assert count_calls(tmp_path) == calls


@pytest.fixture(scope="module")
def cluster():
    """A Ray of another process, as on a cluster: its address."""
    script = (
        "import signal, sys, ray\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job behind &\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, logging_level='ERROR',\n"
        "         object_store_memory=80_000_000, log_to_driver=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | rays.QUIET | {"PYTHONPATH": ROOT, "RAY_AUTH_MODE": "token"},
    )
    yield process.stdout.readline().strip()
    process.communicate()


@pytest.mark.slow
def test_on_a_cluster_by_address_ctrl_c_stops_what_runs_and_keeps_what_is_done(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal goes to a process of its own, in a session of its own: never to this one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    items = make_items(tmp_path, "a b c d", b={"act": "wait"})
    script = (
        f"import sys, json, signal; sys.path.insert(0, {ROOT!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job behind &\n"
        "from expunge import run_many; from tests.jobs.test_many import work\n"
        "run_many(work, json.loads(sys.argv[1]), sys.argv[2], ray=sys.argv[3])"
    )
    results = tmp_path / "results"
    call = [sys.executable, "-c", script, json.dumps(items), str(results), cluster]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
        waits = (tmp_path / "log").exists() and "b waits" in count_calls(tmp_path)
        if waits and list_names(results) == ["a.json", "c.json", "d.json"]:
            break
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=600)[1]
    assert "KeyboardInterrupt" in told
    assert list_names(tmp_path / "results") == ["a.json", "c.json", "d.json"]
    assert count_calls(tmp_path)["b stops"] == 1
    found = run_many(work, items, tmp_path / "results", ray=cluster)
    assert [o.kept for o in found.values()] == [True, False, True, True]
    assert count_calls(tmp_path) == {"a": 1, "b": 2, "c": 1, "d": 1, "b waits": 1, "b stops": 1}


def test_a_task_that_nothing_here_can_hold_is_refused_instead_of_waiting(monkeypatch) -> None:
    class Small:
        @staticmethod
        def cluster_resources() -> dict[str, float]:
            return {"CPU": 2.0}

    rays._check_resources(Small, [Item("a", 1, cpus=2)])
    for task, sentence in (
        (Item("b", 1, cpus=3), "b asks for 3 CPU and Ray has 2 here"),
        (Item("c", 1, gpus=1), "c asks for 1 GPU and Ray has 0 here"),
    ):
        with pytest.raises(InputError, match=sentence):
            rays._check_resources(Small, [Item("a", 1), task])


@pytest.mark.slow
def test_a_cluster_that_asks_for_its_token_is_one_sentence(tmp_path: Path, cluster: str) -> None:
    """In a process of its own: Ray remembers a token that it was given."""
    script = f"from expunge import run_many; run_many(abs, {{'a': -1}}, 'results', ray={cluster!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("expunge.errors.InputError: Ray cannot be used: ConnectionError: ")
    assert cluster in told
    assert list_names(tmp_path / "results") == []


@pytest.mark.parametrize("address", ["nowhere", "host:", ":6379", "host:0", "host:65536", "[::1]"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="it must be HOST:PORT of the head node"):
        rays.check_address(address)


def test_an_address_where_nothing_listens_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(InputError, match=f"Ray address {address} does not answer: "):
            run_many(work, make_items(tmp_path), tmp_path / "results", ray=address)
    assert list_names(tmp_path / "results") == []
    assert not (tmp_path / "log").exists()


def test_the_pool_says_what_it_may_be() -> None:
    assert Pool().retries == 2
    with pytest.raises(InputError, match="workers is 0"):
        Pool(workers=0)


class FakeRay:
    """As much of Ray as is used here, in this process; ``dead`` are items whose worker dies."""

    class exceptions:  # noqa: N801
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

        class WorkerCrashedError(RayError): ...

        class NodeDiedError(RayError): ...

        class OutOfMemoryError(RayError): ...

    def __init__(self, dead: str) -> None:
        self.dead, self.options_given, self.asked = dead, [], []
        self.cloudpickle = pickle

    def is_initialized(self) -> bool:
        return True

    def remote(self, **options):
        self.options_given.append(options)
        return lambda function: types.SimpleNamespace(
            options=lambda name, **_: types.SimpleNamespace(
                remote=lambda places, packed: (name, function, tuple(places), packed)
            )
        )

    def wait(self, running, **_):
        return running[:1], running[1:]

    def get(self, reference):
        name, function, places, packed = reference
        if name in self.dead:
            raise self.exceptions.WorkerCrashedError
        return function(places, packed)

    def cancel(self, reference, **_) -> None:
        self.asked.append(reference[0])


def test_ray_itself_tries_again_and_what_it_gives_up_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(dead="b")
    monkeypatch.setattr(rays, "import_ray", lambda: fake)
    items = {"a": -1, "b": -2, "c": "no number"}
    found = run_many(abs, items, tmp_path, ray=True, workers=2, retries=4)
    assert fake.options_given == [{"max_retries": 4}]
    assert found["a"].value == 1
    assert found["b"].error.startswith("its worker died 5 times")
    assert found["c"].error == "TypeError: bad operand type for abs(): 'str'"
    assert list_names(tmp_path) == ["a.json"]


def test_what_runs_on_ray_is_asked_to_stop_when_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(dead="")
    monkeypatch.setattr(rays, "import_ray", lambda: fake)
    run = rays.perform(abs, [Item(name, -1) for name in "abc"], Pool(workers=2))
    assert next(run)[0].value == 1
    run.close()
    assert fake.asked[:1] == ["b"]
