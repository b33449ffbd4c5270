"""A state from a backup must not bring anybody back: who of the forgotten is held again?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select, update

from expunge.errors import InputError
from expunge.ledger.chain import append
from expunge.ledger.clocks import read_now
from expunge.ledger.database import reading, writing
from expunge.ledger.fulfilment import (
    Done,
    begin_replay,
    finish_begun,
    list_forgotten,
    read_finished,
)
from expunge.ledger.holding import find_standing
from expunge.ledger.leases import Worker, holding_model
from expunge.ledger.models import find_model, identify
from expunge.ledger.schema import MODELS, WORK
from expunge.ledger.telling import check_tables


@dataclass(frozen=True)
class Checked:
    """``forgotten`` people were ever forgotten in a model; ``returned`` are the requests of those
    who are held in the state at ``path`` again. Names are not told: requests are."""

    model: str
    path: Path
    forgotten: int
    returned: tuple[int, ...]


def check_state(worker: Worker, state: str | Path) -> Checked:
    """Compare who is held in a state, or a copy of it, with everybody the model ever forgot.

    ``state`` is a folder, or the name of a model.
    """
    with reading(worker.engine) as connection:
        rows = {row.name: row for row in connection.execute(select(MODELS))}
    path = Path(state).absolute()
    if str(state) in rows and not Path(state).exists():
        path = Path(rows[str(state)].path)
    known = [row for row in rows.values() if row.path == str(path)]
    if not known and path.is_dir():
        identity = identify("state", path)
        known = [row for row in rows.values() if row.identity == identity]
    if not known:
        raise InputError.of("state", str(state), "of a registered model, or a copy of one")
    model = known[0]
    if model.kind == "job":
        raise InputError.of("state", str(state), "one with a state: a job keeps the forgotten out")
    with reading(worker.engine) as connection:
        forgotten = list_forgotten(read_finished(connection, worker.key, model))
    held = find_standing(model.kind, path, sorted(forgotten)).held if forgotten else frozenset()
    numbers = sorted({number for name in held for _, number in forgotten[name]})
    return Checked(model.name, path, len(forgotten), tuple(numbers))


def replay(worker: Worker, name: str) -> Done:
    """Forget everybody again who came back into a model's state; a release says so."""
    with holding_model(worker, name) as model:
        if model.kind == "job":
            raise InputError.of("model", name, "one with a state: a job keeps the forgotten out")
        if model.retired is not None:
            raise InputError.of("model", name, f"another: it was retired on {model.retired[:10]}")
        done = Done(name)
        for _ in range(2):  # a release that was on disk already names nobody more: the next does
            if returned := check_state(worker, model.path).returned:
                with writing(worker.engine) as connection:
                    begin_replay(connection, model, list(returned))
            done = finish_begun(worker, model) or done
        return done


def readmit(worker: Worker, number: int, model: str) -> None:
    """Say that somebody who was forgotten is back on purpose, and may stay.

    Only of somebody who is back: else a backup could bring them back later, and nobody would ask.
    """
    with reading(worker.engine) as connection:
        check_tables(connection, worker.key, worker.book)
        row = find_model(connection, model)
        forgotten = list_forgotten(read_finished(connection, worker.key, row))
    last = {name: pairs[-1][1] for name, pairs in forgotten.items()}
    names = [name for name, request in last.items() if request == number]
    if row.kind == "job" or not names:
        raise InputError.of("request", number, f"the last one by which {model} forgot somebody")
    if not find_standing("state", Path(row.path), names).held:
        raise InputError.of("request", number, f"of somebody who is in {model} again")
    with writing(worker.engine) as connection:
        chosen = (WORK.c.request == number) & (WORK.c.model == row.id)
        if connection.execute(select(WORK.c.readmitted).where(chosen)).scalar_one() is None:
            append(connection, "readmitted", request=number, model=model)
            now = read_now().isoformat()
            connection.execute(update(WORK).where(chosen).values(readmitted=now))
