"""Who asks, and what they may do.

                 requester          operator    auditor
    file         yes                yes         no
    see          what it filed      all         all
    find, verify no                 yes         yes
    work, refuse, withdraw,
    read reasons, export  no        yes         no

A token for one model sees and touches only that model: of a request its own part, as if no other
model were asked. It ends only requests that ask this model alone. What a token may not see is not
there for it: the answer is the same 404 as for a number that was never given.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import select

from expunge import InputError, RunError
from expunge_ledger import records
from expunge_ledger.ledger import Ledger
from expunge_ledger.records import Model, Records, Role, Token, hash_token
from expunge_ledger.schema import FILINGS, REQUESTS
from expunge_ledger.server.background import Background
from expunge_ledger.server.gate import Rate, RefusedError

Act = Literal["file", "find", "models", "verify", "work", "end", "reason", "export"]
MAY: dict[Role, frozenset[Act]] = {
    "requester": frozenset[Act](("file",)),
    "operator": frozenset[Act](get_args(Act)),
    "auditor": frozenset[Act](("find", "models", "verify")),
}
MOST_TOKEN = 200
BEARER = HTTPBearer(auto_error=False, description="A token of expunge-ledger token.")


class Server:
    """What all requests share: the ledger, its worker, rates, and sessions that signed out."""

    def __init__(self, ledger: Ledger, background: Background, rate: tuple[float, float]) -> None:
        self.ledger, self.background = ledger, background
        self.ended = OrderedDict[str, None]()
        self._rates, self._verifying = Rate(rate), threading.Lock()

    def identify(self, secret: str, request: Request) -> Caller:
        """Whose token was sent."""
        caller = self.find(hash_token(secret), request) if len(secret) <= MOST_TOKEN else None
        if caller is None:
            raise RefusedError(401, "the token is not known here")
        return caller

    def find(self, hashed: str, request: Request) -> Caller | None:
        """Whose token has this hash, if it did not ask too often."""
        token = self.ledger.find_token(hashed)
        if token is None:
            return None
        request.state.token = token.name
        if wait := self._rates.take(token.name):
            raise RefusedError(429, "too many requests with this token", wait)
        return Caller(self, token)

    @contextmanager
    def verifying(self) -> Generator[None]:
        """One verification at a time: each may read all there is."""
        if not self._verifying.acquire(timeout=2):
            raise RefusedError(503, "another verification is running; try again later", 10)
        try:
            yield
        finally:
            self._verifying.release()

    def translate(self, error: Exception) -> RefusedError:
        """The status of an error of the library: bad input, not possible now, or try again."""
        if isinstance(error, RefusedError):
            return error
        if isinstance(error, RunError):
            return RefusedError(503, "the ledger does not answer; try again later", 5)
        return RefusedError(422 if isinstance(error, InputError) else 409, self.hide(str(error)))

    def hide(self, sentence: str) -> str:
        """A sentence without where anything lies."""
        places = {self.ledger.key_file.absolute().parent}
        for model in self.ledger.models() if "/" in sentence else ():
            places |= {model.path.parent, model.folder.parent}
        for place in sorted(map(str, places), key=len, reverse=True):
            sentence = sentence.replace(f"{place}/", "")
        return re.sub(r"(?:/[^\s/:;,'\"]+)+/", "", sentence)


@dataclass(frozen=True)
class Caller:
    """Whoever asks the server, by a token or in a session."""

    server: Server
    token: Token

    @property
    def ledger(self) -> Ledger:
        """The ledger, on behalf of the token."""
        return self.server.ledger.acting(self.token.name)

    def may(self, act: Act) -> bool:
        """Whether its role may do this."""
        return act in MAY[self.token.role]

    def need(self, act: Act) -> None:
        """Refuse what its role may not do."""
        if not self.may(act):
            raise RefusedError(403, f"a token of the role {self.token.role} may not do this")

    def need_model(self, model: str | None) -> None:
        """Refuse every model but the token's own; None is all models."""
        if self.token.model not in (None, model):
            raise RefusedError(403, f"this token is for the model {self.token.model} alone")

    def models(self) -> list[Model]:
        """The models that it may know of."""
        return [one for one in self.server.ledger.models() if self.token.model in (None, one.name)]

    def model(self, name: str) -> Model:
        """One of them."""
        for one in self.models():
            if one.name == name:
                return one
        raise RefusedError(404, "there is no such model")

    def requests(self, *where: Any) -> list[records.Request]:
        """The requests that it may see, of those that fit."""
        with self.server.ledger.reading() as tables:
            return self.show(tables, select(self.look_up(tables, *where).c.number))

    def look_up(self, tables: Records, *where: Any, model: str | None = None) -> Any:
        """The requests that it may see, to choose from."""
        if self.token.role == "requester":
            mine = select(FILINGS.c.request).where(FILINGS.c.token == self.token.name)
            where += (REQUESTS.c.number.in_(mine),)
        return tables.look_up(*where, own=self.token.model, model=model)

    def show(self, tables: Records, chosen: Any) -> list[records.Request]:
        """Requests in the order of the numbers ``chosen``; who filed them is proved by its row."""
        numbers: list[int] = list(tables.connection.execute(chosen).scalars())
        if self.token.role == "requester":
            numbers = [n for n in numbers if tables.get(FILINGS, self.token.name, n) is not None]
        return tables.show_requests(numbers, self.token.model)


def find_caller(
    request: Request, sent: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
) -> Caller:
    """Whose token was sent."""
    if sent is None:
        raise RefusedError(401, "send a token: Authorization: Bearer expunge_…")
    return request.app.state.server.identify(sent.credentials, request)


Asking = Annotated[Caller, Depends(find_caller)]
