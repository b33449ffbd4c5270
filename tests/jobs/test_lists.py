"""Lists of people, as spreadsheets and programs write them."""

from pathlib import Path

import pytest

from expunge.errors import InputError
from expunge.jobs.lists import read_list


def test_lists_are_read_as_text_csv_and_with_repeats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffanna \n\n bo\nanna\n", encoding="utf-8")
    assert read_list(tmp_path / "a.txt") == ["anna", "bo"]
    (tmp_path / "a.csv").write_text("person,row\nanna,1\nbo,2\nanna,3\n")
    assert read_list(tmp_path / "a.csv", "person") == ["anna", "bo"]
    with pytest.raises(InputError, match=r"column of .* is 'name'; it must be one of"):
        read_list(tmp_path / "a.csv", "name")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        read_list(tmp_path / "b.txt")


@pytest.mark.parametrize(
    "text",
    [
        "row;person\n1;anna\n2;bo\n", "row\tperson\n1\tanna\n2\tbo\n", "row,person\n1,anna\n2,bo\n",
        "\ufeffperson;row\r\nanna;1\r\nbo;2\r\n", "person\nanna\nbo\n",
        'note;person\n"a, b, c";anna\n"x;y";bo\n', "a,b;person\n1,2;anna\n1,2;bo\n",
    ],
)  # fmt: skip
def test_a_table_may_have_commas_semicolons_or_tabs(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    assert read_list(tmp_path / "a.csv", "person") == ["anna", "bo"]


@pytest.mark.parametrize(
    ("text", "column", "found"),
    [
        ('["anna", " bo ", "anna"]', None, ["anna", "bo"]),
        ('["anna", 12345678901234567890123]', "person", ["anna", "12345678901234567890123"]),
        ('[{"person": "anna", "row": 1}, {"person": 7}]', "person", ["anna", "7"]),
    ],
)
def test_a_json_list(tmp_path: Path, text: str, column: str | None, found: list[str]) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read_list(tmp_path / "a.json", column) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"anna": 1}', "is 'a JSON dict'; it must be a list of names"),
        ('["anna", null]', "item 1 of .*a.json is None; it must be a text or a whole number"),
        ("[true]", "item 0 of .* is True; it must be"),
        ("[1.5]", "item 0 of .* is 1.5; it must be"),
        ('[{"name": "anna"}]', "item 0 of .*; it must be a text or a whole number in 'person'"),
        ('[{"person": "anna", "person": "bo"}]', "cannot be read: .* the key 'person' twice"),
        ("[]", "names nobody"),
        ("anna\nbo\n", "cannot be read: Expecting value"),
        ("[" * 100_000, "cannot be read"),
        ("[" + "9" * 10_000 + "]", "cannot be read"),
    ],
)
def test_json_that_is_no_list_of_identifiers(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=sentence) as caught:
        read_list(tmp_path / "a.json", "person")
    assert "\n" not in str(caught.value)


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"person": ["anna", "bo", "anna"]}), tmp_path / "a.parquet")
    assert read_list(tmp_path / "a.parquet", "person") == ["anna", "bo"]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"b\.parquet cannot be read"):
        read_list(tmp_path / "b.parquet", "person")
