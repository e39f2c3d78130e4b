"""Files that are not what they should be, the hostile ones included."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsync.config import ConfigError, read
from kvsync.config.yamlfile import MAX_BYTES, parse_yaml
from tests.unit.config.conftest import Faults

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (BOMB, 1, "anchors (&a) are not read"),
        ("gateway: *x\n", 1, "aliases (*x) are not read"),
        ("gateway:\n  <<: {port: 1}\n", 2, "merge keys"),
        ("gateway: !!python/object/apply:os.system [id]\n", 1, "tags"),
        ("gateway:\n  port: !!binary aGk=\n", 2, "tags"),
        ("gateway: !x {port: 1}\n", 1, "tags"),
        ("gateway:\n\tport: 1\n", 2, "never with tabs"),
        ("gateway: {port: 1\nadmin: 2\n", 2, "is not YAML"),
        ("gateway:\n  port: 1\n port: 2\n", 3, "is not YAML"),
        ("- gateway\n", 1, "is not a mapping"),
        ("just text\n", 1, "is not a mapping"),
        ("a: 1\n---\nb: 2\n", 2, "more than one document"),
        ("? [a, b]\n: 1\n", 1, "not plain text"),
        ("gateway:\n  1: 2\n", 2, "the key 1 is not text"),
        ("yes: 1\n", 1, "the key yes is not text"),
        ("gateway: " + "[" * 50_000, 1, "levels deep"),
        ("x: " + "{a: " * 50_000, 1, "levels deep"),
        ("gateway:\n  port: !!int x\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: " + "9" * 5000 + "\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: 0x" + "f" * 20_000 + "\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: " + ":".join(["59"] * 3000) + "\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: 9223372036854775808\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: !!int ''\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: !!int '+'\n", 2, "is not a value of the type int"),
        ("gateway:\n  port: !!float ''\n", 2, "is not a value of the type float"),
        ("gateway:\n  port: " + ":".join(["59"] * 3000) + ".5\n", 2, "is not a value of the type float"),
        ("gateway:\n  port: !!bool ''\n", 2, "is not a value of the type bool"),
        ('gateway:\n  host: "\\U0011ffff"\n', 2, "no character"),
        ('gateway:\n  host: "\\UFFFFFFFF"\n', 2, "no character"),
        ('gateway:\n  host: "\\ud800"\n', 2, "half a character"),
        ('gateway:\n  "\\udfff": 1\n', 2, "half a character"),
        ('gateway:\n  engine_api_key_file: "a\\0b"\n', 2, "a NUL character"),
        ('gateway:\n  "a\\0b": 1\n', 2, "a NUL character"),
    ],
)
def test_what_is_not_read_is_named_with_its_line(faults: Faults, text: str, line: int, says: str) -> None:
    (fault,) = faults(text)
    assert fault.origin.endswith(f"kvsync.yaml:{line}")
    assert says in str(fault)


def test_duplicate_keys_are_faults_and_the_rest_is_still_judged(faults: Faults) -> None:
    found = faults("gateway:\n  port: 1\n  port: 2\n  hots: x\ngateway: {}\n")
    assert [(fault.path, fault.origin.rpartition(":")[2]) for fault in found] == [
        ("gateway.port", "3"),
        ("gateway", "5"),
        ("gateway.hots", "4"),
    ]
    assert "first in line 2" in found[0].message


def test_not_text(faults: Faults) -> None:
    (fault,) = faults(b"a: 1\nb: \xff\xfe\n")
    assert fault.origin.endswith(":2")
    assert "UTF-8" in fault.message
    (fault,) = faults(b"a: 1\nb: \x00\n")
    assert fault.origin.endswith(":2")
    assert "control character" in fault.message


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_bytes(b"\xef\xbb\xbfadmin:\r\n  port: 5\r\n")
    assert read(file, {}, {}).settings.admin.port == 5


def test_size_is_bounded(faults: Faults) -> None:
    (fault,) = faults(b"# " + b"x" * MAX_BYTES)
    assert "larger than" in fault.message


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    for file in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            read(file, {}, {})


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ('gateway:\n  port: "8080"\n', "gateway.port", "whole number"),
        ("gateway:\n  port: 8080.5\n", "gateway.port", "whole number"),
        ("gateway:\n  port: true\n", "gateway.port", "whole number"),
        ("gateway:\n  port: [1]\n", "gateway.port", "whole number"),
        ("gateway:\n  port:\n", "gateway.port", "whole number"),
        ("gateway:\n  host: 1\n", "gateway.host", "quotes"),
        ("events:\n  enabled: 1\n", "events.enabled", "true or false"),
        ("events:\n  poll_timeout: .nan\n", "events.poll_timeout", "finite"),
        ("routing:\n  decode_cost: .inf\n", "routing.decode_cost", "finite"),
        ("gateway: 5\n", "gateway", "mapping of settings"),
        ("models: {a: b}\n", "models", "list"),
        ("models:\n  - m\n", "models[0]", "mapping of settings"),
        ("models:\n  - name: no\n", "models[0].name", "quotes"),
        ("models:\n  - {}\n", "models[0].name", "add it"),
        ("models:\n  - {name: m, engines: {}}\n", "models[0].engines", "list"),
        ("models:\n  - {name: m, engines: [{name: e}]}\n", "models[0].engines[0].url", "add it"),
        ("gatway: {}\n", "gatway", "was 'gateway' meant?"),
        ("tokenizer: {remote: {time_out: 1}}\n", "tokenizer.remote.time_out", "was 'timeout' meant?"),
    ],
)
def test_wrong_types_are_faults_never_conversions(faults: Faults, text: str, path: str, says: str) -> None:
    (fault,) = faults(text)
    assert fault.path == path
    assert says in str(fault)


def test_long_values_are_not_repeated_in_full(faults: Faults) -> None:
    (fault,) = faults("gateway:\n  port: [" + "x, " * 1000 + "]\n")
    assert len(str(fault)) < 300


def test_lines_of_nested_values() -> None:
    document = parse_yaml(b"a:\n  - b: 1\n    c:\n      - 2\n      - 3\n", "f")
    assert document.faults == []
    assert document.value == {"a": [{"b": 1, "c": [2, 3]}]}
    assert document.lines[("a", 0, "c", 1)] == 5


def test_dates_and_equals_signs_are_text() -> None:
    assert parse_yaml(b"a: 2024-01-01\nb: =\nc: '1'\nd: ! 5\n", "f").value == {
        "a": "2024-01-01",
        "b": "=",
        "c": "1",
        "d": "5",
    }


def test_a_file_that_is_something_else_costs_little_and_shows_some_of_its_faults(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text("".join(f"k{n}: 1\n" for n in range(5000)) + "k0: 1\n" * 5000)
    with pytest.raises(ConfigError) as caught:
        read(file, {}, {})
    assert len(caught.value.faults) == 10_000
    lines = str(caught.value).splitlines()
    assert lines[0] == "10000 faults in the configuration:"
    assert lines[-1] == "  and 9950 more"
    assert len(lines) == 52


PIECES = [
    *("gateway", "models", "port", "host", "8080", "1e9", "0x", "1:2", ".inf", "2001-01-01", "~", "+", "-", ".", "_"),
    *(
        ": ",
        ":",
        "\n",
        "\n  ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        '"',
        "'",
        "\\",
        "\\U",
        "|",
        ">",
        "?",
        "#",
        "%",
        "@",
        "\t",
    ),
    *("!!int ", "!!float ", "!!bool ", "!!str ", "! ", "&a", "*a", "<<", "\u2028", "\x85"),
]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_whatever_the_file_holds_there_are_settings_or_faults(pieces: list[str]) -> None:
    with suppress(ConfigError):
        read(Path("kvsync.yaml"), {}, {}, content="".join(pieces).encode())
