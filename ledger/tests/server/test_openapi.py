"""A client made from the OpenAPI document alone does what the pages do.

It knows only what the document says: paths, methods, parameters, bodies, answers and the scheme of
security. Whatever it is given or gets that the document does not say, is an error. A public
generator makes a client that does the same, all but the zip, whose type it does not know; it
needs more packages than these 60 lines are worth.
"""

import hashlib
import io
import json
import re
import time
import zipfile
from typing import Any
from urllib.parse import quote, urlencode

import expunge
from ledger.tests.server_run import Life

KINDS: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "array": list}
KINDS |= {"object": dict, "null": type(None)}


class Generated:
    """Each operation of the document is a method."""

    def __init__(self, document: dict[str, Any], life: Life, token: str) -> None:
        self.document, self.life = document, life
        self.operations = {
            operation["operationId"]: (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        }
        schemes = document["components"]["securitySchemes"]
        ((_, scheme),) = schemes.items()
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
        self.headers = {"Authorization": f"Bearer {token}"}

    def __getattr__(self, name: str) -> Any:
        method, path, operation = self.operations[name]

        def call(body: Any = None, **given: Any) -> Any:
            known = {p["name"]: p for p in operation.get("parameters", [])}
            assert set(given) <= set(known), "the document knows no such parameter"
            assert {n for n, p in known.items() if p["required"]} <= set(given)
            for parameter, value in given.items():
                assert self.fits(value, known[parameter]["schema"]), parameter
            place = re.sub(r"\{(\w+)\}", lambda m: quote(str(given[m[1]]), safe=""), path)
            query = urlencode({n: v for n, v in given.items() if known[n]["in"] == "query"})
            assert ("requestBody" in operation) == (body is not None)
            more: dict[str, Any] = {}
            if body is not None:
                content = operation["requestBody"]["content"]
                assert self.fits(body, content["application/json"]["schema"]), body
                more["json"] = body
            headers = self.headers if operation.get("security") else {}
            answer = self.life.client.request(
                method.upper(), f"{place}?{query}" if query else place, headers=headers, **more
            )
            told = operation["responses"][str(answer.status_code)]
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in told["content"], "the document knows no such answer"
            if kind != "application/json" or "schema" not in told["content"][kind]:
                return answer.content
            assert self.fits(answer.json(), told["content"][kind]["schema"]), answer.text
            return answer.json()

        return call

    def fits(self, value: Any, schema: dict[str, Any]) -> bool:
        """Whether a value is as a schema says."""
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/components/schemas/")
            return self.fits(value, self.document["components"]["schemas"][name])
        if "anyOf" in schema:
            return any(self.fits(value, one) for one in schema["anyOf"])
        good = isinstance(value, KINDS[schema["type"]]) if "type" in schema else True
        good = good and value in schema.get("enum", [value])
        if isinstance(value, dict):
            known, rest = schema.get("properties", {}), schema.get("additionalProperties")
            inner = [(one, known.get(name, rest)) for name, one in value.items()]
            good = good and set(schema.get("required", ())) <= set(value)
        else:
            inner = [(one, schema["items"]) for one in value] if isinstance(value, list) else []
        return good and all(
            one_schema is True or (one_schema and self.fits(one, one_schema))
            for one, one_schema in inner
        )


def test_a_client_made_from_the_document_files_works_downloads_and_verifies(life: Life) -> None:
    document = life.client.get("/api/openapi.json").json()
    desk, officer, auditor = (
        Generated(document, life, life.tokens[role])
        for role in ("requester", "operator", "auditor")
    )
    assert desk.show_me()["role"] == "requester"
    sent = {"person": "person-4", "model": "shop"}
    assert desk.file_request(sent)["new"]
    again = desk.file_request(sent)
    number = again["number"]
    assert (again["new"], desk.show_request(number=number)["state"]) == (False, "open")
    verified = auditor.verify_request(number=number)
    assert (verified["holds"], verified["releases"]) == (True, 0), "nothing answers it yet"
    assert verified["events"] == life.ledger.anchor().events
    assert "detail" in desk.work_on_model(model="shop")
    officer.work_on_model(model="shop")
    until = time.monotonic() + 120
    while not (now := officer.show_work()[0])["over"]:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert now["said"] == ""
    found = desk.show_request(number=number)
    assert (found["state"], found["answer"]) == ("answered", "forgotten")
    (answer,) = found["answers"]
    place = {"model": "shop", "number": answer["release"]}
    data = desk.download(**place, file="certificate.json")
    assert hashlib.sha256(data).hexdigest() == answer["certificate"]
    assert b"1 person" in desk.download(**place, file="statement.txt")
    path = life.folder / "certificate.json"
    path.write_bytes(data)
    weights = life.ledger.models("shop")[0].releases[0].directory / "model.safetensors"
    assert expunge.verify(path, weights).certificate.epsilon == 0
    verified = auditor.verify_request(number=number)
    assert (verified["holds"], verified["releases"]) == (True, 1)
    assert auditor.verify_model(model="shop")["releases"] == 1
    assert auditor.verify_ledger()["holds"]
    assert auditor.list_requests(state="answered", most=5)["total"] == 1
    assert auditor.list_events(number=number)[0]["kind"] == "requested"
    assert officer.find_requests({"person": "person-4"})["total"] == 1
    with zipfile.ZipFile(io.BytesIO(officer.export({"person": "person-4"}))) as archive:
        assert "README.txt" in archive.namelist()
    assert "person-77" not in officer.export({"person": "person-77"})["detail"]
    other = desk.file_request({"person": "person-5"})["number"]
    assert officer.show_reason(number=other) == {"reason": None}
    assert officer.refuse_request({"reason": "unknown"}, number=other)["state"] == "refused"
    third = desk.file_request({"person": "person-6"})["number"]
    assert officer.withdraw_request({}, number=third)["state"] == "withdrawn"
    assert [one["name"] for one in officer.list_models()] == ["shop", "search"]
    assert officer.show_model(model="shop")["open"] == 0
    assert officer.verify_model(model="shop", only=1)["holds"]


def test_the_document_is_whole_and_loads_nothing(life: Life) -> None:
    document = life.client.get("/api/openapi.json").json()
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    names = [one["operationId"] for one in operations]
    assert len(names) == len(set(names)) == 18
    for one in operations:
        assert one["security"] == [{"HTTPBearer": []}]
        assert one["description"]
        refused = {int(code): told for code, told in one["responses"].items() if code > "3"}
        assert {400, 401, 403, 404, 405, 413, 415, 422, 429, 500} <= set(refused)
        for told in refused.values():
            schema = told["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Refused"}
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used == set(document["components"]["schemas"])
    text = life.client.get("/api/openapi.json").text
    assert "http://" not in text
    assert "https://" not in text
    for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        assert life.client.get(path).status_code in (303, 404)
