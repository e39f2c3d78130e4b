"""Editing one field of a JSON object leaves every other byte alone, whatever the text looks like."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsync
from kvsync.requests.edit import edit_object, field_text

SALT = {"cache_salt": b'"new"'}


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (b"{}", b'{"cache_salt":"new"}'),
        (b" {\n} ", b' {"cache_salt":"new"\n} '),
        (b'{"a":1}', b'{"cache_salt":"new","a":1}'),
        (b'{ "cache_salt" :\t"old" , "a":1}', b'{ "cache_salt" :\t"new" , "a":1}'),
        (b'{"a":1e400,"cache_salt":null}', b'{"a":1e400,"cache_salt":"new"}'),
        (b'{"cache_salt":{"x":[[[[[[[[["]"]]]]]]]]]},"a":-0.0}', b'{"cache_salt":"new","a":-0.0}'),
        (
            b'{"cache_salt":"a","x":"cache_salt","cache_salt":1}',
            b'{"cache_salt":"new","x":"cache_salt","cache_salt":"new"}',
        ),
        (
            b'{"cache\\u005fsalt":1,"\\u0063ache_sal\\u0074":2}',
            b'{"cache\\u005fsalt":"new","\\u0063ache_sal\\u0074":"new"}',
        ),
        (b'{"\\"cache_salt\\"":1}', b'{"cache_salt":"new","\\"cache_salt\\"":1}'),
        (b'{"a":{"cache_salt":1}}', b'{"cache_salt":"new","a":{"cache_salt":1}}'),
        (
            b'{"a":"\\"},\\"cache_salt\\":\\"","b":"\\\\"}',
            b'{"cache_salt":"new","a":"\\"},\\"cache_salt\\":\\"","b":"\\\\"}',
        ),
        ('{"ключ":"é","a":123456789012345678901234567890}'.encode(), None),
    ],
)
def test_a_field_is_set_and_nothing_else_changes(text: bytes, after: bytes | None) -> None:
    assert edit_object(text, SALT) == (after or b'{"cache_salt":"new",' + text[1:])


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (b"{}", b"{}"),
        (b'{"cache_salt":1}', b"{}"),
        (b'{ "cache_salt":1 , "a" : 1 }', b'{ "a" : 1 }'),
        (b'{ "a" : 1 , "cache_salt":1 }', b'{ "a" : 1 }'),
        (b'{"a":1, "cache_salt":1, "cache_salt" : 2 ,"b":2}', b'{"a":1,"b":2}'),
        (b'{"a":1,"cache\\u005Fsalt":1,"cache_salt":2}', b'{"a":1}'),
        (b'{"cache_salt":[1],"cache_salt":{},"a":1,"a":1}', b'{"a":1,"a":1}'),
    ],
)
def test_a_field_is_removed_with_one_comma(text: bytes, after: bytes) -> None:
    assert edit_object(text, {"cache_salt": None}) == after


def test_fields_are_set_and_removed_together() -> None:
    text = b'{"a":1,"b":2,"c":3}'
    assert edit_object(text, {"a": None, "b": b"[]", "d": b"4", "e": None}) == b'{"d":4,"b":[],"c":3}'


def test_the_text_of_a_field_is_that_of_its_last_repetition() -> None:
    text = b'{"o":1,"p":{"o":5},"o" : { "x" : 1e400 } ,"q":2}'
    assert field_text(text, "o") == b'{ "x" : 1e400 }'
    assert field_text(text, "x") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":[}',
        b'{"a":[[[[[[[',
        b'{"a":1,}',
        b'{"a" 1}',
        b'{"a":"x}',
    ],
)
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        edit_object(text, {"a name that may be spelled with escapes": None})


# ---- whatever the text

_NAMES = st.one_of(st.sampled_from(["cache_salt", "stream", "", "a", "cache salt"]), st.text(max_size=4))
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=6),
        st.integers(),
        st.sampled_from(['{"', "]}", "\\", '"', ",:", "[" * 9]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_NAMES, inner, max_size=3)),
    max_leaves=12,
)


def _text(pairs: list[tuple[str, object]], chance: random.Random) -> bytes:
    """The object as text, with blanks and escapes anywhere and some values deep inside lists."""

    def blank() -> str:
        return chance.choice(["", "", " ", "\n\t", "\r\n "])

    def string(value: str) -> str:
        return (
            '"'
            + "".join(
                f"\\u{ord(c):04X}" if chance.random() < 0.2 and ord(c) < 0xD800 else json.dumps(c)[1:-1] for c in value
            )
            + '"'
        )

    members = []
    for name, value in pairs:
        depth = chance.choice([0, 0, 0, 3, 8])
        text = (
            "[" * depth
            + json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))
            + "]" * depth
        )
        members.append(f"{blank()}{string(name)}{blank()}:{blank()}{text}{blank()}")
    return (blank() + "{" + (",".join(members) or blank()) + "}" + blank()).encode()


_PAIRS = st.lists(st.tuples(_NAMES, _VALUES), max_size=6)


@given(_PAIRS, st.randoms(use_true_random=False), st.sampled_from([b'"new"', b"null", b"[1,{}]", None]))
def test_any_object_is_edited_and_every_other_byte_stays(
    pairs: list[tuple[str, object]], chance: random.Random, value: bytes | None
) -> None:
    text = _text(pairs, chance)
    msgspec.json.decode(text)
    edited = edit_object(text, {"cache_salt": value})
    before = json.loads(text, object_pairs_hook=tuple)
    after = json.loads(edited, object_pairs_hook=tuple)
    wanted = () if value is None else json.loads(value, object_pairs_hook=tuple)
    expected = [pair if pair[0] != "cache_salt" else (pair[0], wanted) for pair in before]
    if value is None:
        expected = [pair for pair in expected if pair[0] != "cache_salt"]
    elif len([pair for pair in before if pair[0] == "cache_salt"]) == 0:
        expected.insert(0, ("cache_salt", wanted))
    assert list(after) == expected
    if all(name != "cache_salt" for name, _ in pairs):
        added = b"" if value is None else b'"cache_salt":' + value + (b"," if pairs else b"")
        brace = text.index(b"{") + 1
        assert edited == text[:brace] + added + text[brace:]


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_an_object_or_are_refused(noise: bytes, at: int) -> None:
    text = b'{"a":[[[[[[{"b":"c"}]]]]]],"cache_salt":"x\\"y"}'
    for candidate in (noise, text[:at], text[:at] + noise + text[at:]):
        with contextlib.suppress(ValueError, msgspec.DecodeError):
            edit_object(candidate, SALT)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b'{"a":' + b"[1," * 500_000 + b"1" + b"]" * 500_000 + b"}",
        b'{"a":[' + b"[],[[[[[[[[1]]]]]]]]," * 100_000 + b"1]}",
        b"{" + b'"cache_salt":"x",' * 100_000 + b'"a":1}',
        b'{"' + b"k" * 2_000_000 + b'":' + b"9" * 2_000_000 + b"}",
        b'{"a":"' + b'\\"' * 1_000_000 + b'"}',
    ],
    ids=["deep", "deep with siblings", "many", "repeated", "huge key and number", "escapes"],
)
def test_a_hostile_text_costs_no_recursion_and_linear_time(text: bytes) -> None:
    """2 MB each. A quadratic scan of any of them would take hours; the bound leaves room for a busy machine."""
    began = time.process_time()
    edited = edit_object(text, SALT)
    assert time.process_time() - began < 10
    assert edited.count(b'"new"') == max(1, text.count(b"cache_salt"))


def test_no_group_is_repeated_possessively() -> None:
    """Up to Python 3.11.4 such repeats may keep what they should not (CPython issue 106052)."""
    package = Path(kvsync.__file__).parent
    found = [
        f"{file.relative_to(package)}:{number}"
        for file in package.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\)[*+?]\+(?!,)", line)
    ]
    assert not found, "repeat the group inside an atomic one: (?>(?:…)*)"
