"""What records and certificates are made of: strict, closed, frozen models in canonical JSON.

Nothing unknown, nothing coerced, nothing changed later. All text can be seen: a control character
in a file's words would reach somebody's terminal. A radius that does not clip is written "inf".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

import rfc8785
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from expunge import recipes
from expunge.display import clean, is_visible
from expunge.errors import CertificateError, InputError
from expunge.files import is_inside, read_limited, refuse_twice, write_atomic
from expunge.recipes import Recipe

LARGEST = 2**53 - 1  # beyond it a number of JSON is not the same everywhere


class Model(BaseModel):
    """What every part has in common."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Document(Model):
    """A model that is a file of its own: one content, one sequence of bytes (RFC 8785)."""

    what: ClassVar[str]
    most_bytes: ClassVar[int]
    private: ClassVar[bool]

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        return serialise(self.model_dump(mode="json"))

    @property
    def sha256(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the canonical bytes; the file is either complete or not there."""
        write_atomic(path, self.to_bytes(), private=self.private)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote; whether it is true is for ``expunge.verify`` to say."""
        return cls.from_bytes(read_limited(path, cls.most_bytes, cls.what))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The document with exactly these bytes; one sentence says why there is none."""
        try:
            json.loads(data, object_pairs_hook=refuse_twice)
            found = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or f"the {cls.what}"
            reason = first["msg"].removeprefix("Value error, ")
            said = f"the {cls.what} is not usable: {place}: {reason[:1].lower()}{reason[1:]}"
            raise CertificateError(clean(said)) from None
        except (ValueError, RecursionError) as error:
            raise CertificateError(f"a {cls.what} must be JSON: {clean(str(error))}") from None
        if found.to_bytes() != data:
            raise CertificateError(f"the {cls.what} is not in canonical form (RFC 8785)")
        return found


def _check_text(text: str) -> str:
    if not is_visible(text):
        raise ValueError(f"{text!r} has characters that cannot be seen")
    return text


def _check_file(name: str) -> str:
    if not is_inside(_check_text(name)):
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    if len(name.encode()) > 255:
        raise ValueError(f"{name[:40]!r}... is longer than 255 bytes")
    return name


def _check_time(text: str) -> str:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = datetime.min
    if time.tzinfo is not UTC or time.isoformat(timespec="seconds") != text:
        raise ValueError(f"{text!r} must be a time in UTC, as 2026-01-01T00:00:00+00:00")
    return text


def _read_seed(seed: object) -> object:
    return str(seed) if type(seed) is int and abs(seed) > LARGEST else seed


def read_plain(value: Any) -> Any:
    """Plain data as JSON has it: tuples are lists, numpy's numbers are numbers; text that cannot be
    seen is written as Python writes it.

    >>> read_plain({"betas": (0.9, 0.999), "clip": math.inf, "label": "a\\n"})
    {'betas': [0.9, 0.999], 'clip': 'inf', 'label': "'a\\\\n'"}
    """
    match value:
        case str():
            return value if is_visible(value) else ascii(value)
        case bool() | None:
            return value
        case int():
            return _read_seed(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            items = cast(Mapping[str, Any], value).items()
            return {read_plain(str(key)): read_plain(item) for key, item in items}
        case list() | tuple():
            return [read_plain(item) for item in cast(list[Any], value)]
        case _ if hasattr(value, "item"):
            return read_plain(value.item())
        case _:
            raise ValueError(f"{value!r} is not plain: numbers, text, lists, mappings")


Text = Annotated[str, AfterValidator(_check_text)]
Time = Annotated[str, AfterValidator(_check_time)]  # one spelling: in order as text is
FileName = Annotated[str, AfterValidator(_check_file)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Real = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[
    int | Annotated[str, Field(pattern="^-?[1-9][0-9]{15,39}$")], BeforeValidator(_read_seed)
]
Plain = Annotated[dict[str, JsonValue], BeforeValidator(read_plain)]
Names = tuple[Text, ...]


def _read_recipe(given: Any) -> Recipe:
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, dict):
        raise InputError.of("recipe", given, "a method and its parameters")
    named = cast(dict[str, Any], given).items()
    return recipes.from_dict({key: math.inf if value == "inf" else value for key, value in named})


RecipeField = Annotated[
    Recipe,
    PlainValidator(_read_recipe, json_schema_input_type=dict[str, Any]),
    PlainSerializer(lambda recipe: read_plain(recipes.to_dict(recipe))),
]


def serialise(plain: Any) -> bytes:
    """Canonical JSON (RFC 8785)."""
    try:
        return rfc8785.dumps(plain)
    except (rfc8785.CanonicalizationError, UnicodeError) as error:
        raise CertificateError(f"it cannot be written as JSON: {error}") from None
