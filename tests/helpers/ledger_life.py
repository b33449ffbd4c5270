"""A small state, a ledger beside it, and workers that die where a test says."""

from pathlib import Path

import torch

import expunge

PEOPLE = 30


class Killed(BaseException):
    """What nothing catches."""


def make_state(folder: Path, *, people: int = PEOPLE, rows: int = 2, seed: int = 0) -> Path:
    """A statistics head of a few people, ``rows`` examples each."""
    generator = torch.Generator().manual_seed(seed)
    count = people * rows
    x = torch.randn(count, 4, generator=generator)
    y = x[:, :3].argmax(1)
    head = expunge.StatisticsHead(expunge.Features(None), classes=3, state=folder)
    head.learn((x, y), ids=[f"person-{i // rows}" for i in range(count)])
    return folder


def learn_again(state: Path, *names: str) -> None:
    """Some people are learned, or learned again."""
    head = expunge.load(state)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(len(names), 4, generator=generator)
    head.learn((x, x[:, :3].argmax(1)), ids=list(names))


def let_lease_end(ledger: expunge.Ledger) -> None:
    """Workers that died are known to be dead."""
    from sqlalchemy import update

    from expunge.ledger.database import writing
    from expunge.ledger.schema import MODELS

    with writing(ledger.engine) as connection:
        connection.execute(update(MODELS).values(until="2000-01-01T00:00:00+00:00"))


def list_states(ledger: expunge.Ledger) -> dict[int, str]:
    return {request.number: request.state for request in ledger.requests()}


def check_answers(ledger: expunge.Ledger) -> None:
    """Nobody who was answered "forgotten" is held; every certificate verifies; the books agree."""
    assert ledger.verify().requests == len(ledger.requests())
    for model in ledger.models():
        assert not ledger.check(model.name).returned
        for release in model.releases:
            expunge.verify(
                release.directory / "certificate.json", record=release.directory / "record.json"
            )
    released = [event for event in ledger.events() if event.kind == "answered"]
    numbers = [event.body["request"] for event in released]
    assert len(numbers) == len(set(numbers))
