"""The proxy's file that the documents give: it parses, and says what the server leaves to it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "nginx.conf"


def parse(tokens: list[str]) -> list[tuple[list[str], list]]:
    """nginx's own grammar: words that end with ; or with a block."""
    found, words = list[tuple[list[str], list]](), list[str]()
    while tokens:
        match tokens.pop(0):
            case ";":
                assert words, "a directive has no name"
                found.append((words, []))
                words = []
            case "{":
                found.append((words, parse(tokens)))
                words = []
            case "}":
                assert not words, words
                return found
            case word:
                words.append(word)
    assert not words, words
    return found


def test_the_proxys_file() -> None:
    text = re.sub(r"#.*", "", FILE.read_text())
    assert text.count("{") == text.count("}")
    top = parse(re.findall(r'"[^"]*"|[{};]|[^\s{};]+', text))
    (_, plain), (_, secure) = [one for one in top if one[0] == ["server"]]
    assert (["return", "301", "https://$host$request_uri"], []) in plain
    facts = {words[0]: words[1:] for words, _ in secure}
    assert facts["listen"] == ["443", "ssl"]
    assert facts["client_max_body_size"] == ["64k"]
    assert {"client_header_timeout", "client_body_timeout", "limit_req", "limit_conn"} <= set(facts)
    assert (facts["large_client_header_buffers"], facts["gzip"]) == (["4", "4k"], ["on"])
    (place,) = [block for words, block in secure if words == ["location", "/"]]
    inner = {tuple(words[:2]): words[2:] for words, _ in place}
    assert ("proxy_pass", "http://127.0.0.1:8000") in inner
    assert inner["proxy_set_header", "Host"] == ["$host"]
    zones = {words[2].partition("=")[2].partition(":")[0] for words, _ in top if "zone" in words[0]}
    assert facts["limit_req"][0] == "zone=ledger_address"
    assert zones == {"ledger_address", "ledger_connections"}


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed here")
def test_nginx_takes_it(tmp_path: Path) -> None:
    text = re.sub(r"\s*ssl_certificate.*", "", FILE.read_text()).replace("443 ssl", "8443")
    (tmp_path / "nginx.conf").write_text(f"events {{}}\nhttp {{\n{text}\n}}\n")
    subprocess.run(["nginx", "-t", "-p", tmp_path, "-c", "nginx.conf"], check=True)
