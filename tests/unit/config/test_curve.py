"""Keys of ZMQ CURVE: all or none, each of them a key, and no secret in any message."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsync.config import load
from kvsync.config.curve import BadKey, secret_key
from tests.unit.config.conftest import Faults

PUBLIC = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
SECRET = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    return file


def keys(file: Path) -> dict[str, str]:
    return {
        "KVSYNC_EVENTS_CURVE_SERVER_KEY": PUBLIC,
        "KVSYNC_EVENTS_CURVE_PUBLIC_KEY": PUBLIC,
        "KVSYNC_EVENTS_CURVE_SECRET_KEY_FILE": str(file),
    }


def test_all_of_them(secret_file: Path) -> None:
    curve = load(None, keys(secret_file), {}).events.curve
    assert (curve.server_key, curve.public_key, curve.secret_key_file) == (PUBLIC, PUBLIC, secret_file)
    assert SECRET not in repr(curve)


def test_none_of_them() -> None:
    curve = load(None, {}, {}).events.curve
    assert (curve.server_key, curve.public_key, curve.secret_key_file) == (None, None, None)


def test_all_that_is_missing_is_named_at_once(faults: Faults) -> None:
    found = faults(f"events: {{curve: {{server_key: '{PUBLIC}'}}}}\n")
    assert [(fault.path, fault.message) for fault in found] == [
        ("events.curve.public_key", "is missing beside server_key"),
        ("events.curve.secret_key_file", "is missing beside server_key"),
    ]
    assert {fault.mend for fault in found} == {"CURVE needs all three: add it, or remove the others"}


@pytest.mark.parametrize("key", ["", "x" * 39, "x" * 41, "x" * 39 + "~", "é" * 40, SECRET + "\n" + SECRET])
def test_what_is_no_key_is_refused(faults: Faults, secret_file: Path, key: str) -> None:
    text = f"events: {{curve: {{server_key: {key!r}, public_key: '{PUBLIC}', secret_key_file: '{secret_file}'}}}}\n"
    (fault,) = faults(text)
    assert (fault.path, fault.mend) == (
        "events.curve.server_key",
        "write its 40 characters of Z85 text, in quotes (zmq.curve_keypair())",
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, SECRET[:-1].encode(), (SECRET * 2).encode(), b"x" * 100_000])
def test_what_is_no_secret_key_is_refused_and_not_shown(faults: Faults, secret_file: Path, content: bytes) -> None:
    secret_file.write_bytes(content)
    (fault,) = faults("", keys(secret_file))
    assert fault.message == f"{secret_file} is not a CURVE secret key"


def test_a_file_that_can_not_be_read(faults: Faults, tmp_path: Path) -> None:
    (fault,) = faults("", keys(tmp_path / "nowhere"))
    assert (fault.path, fault.message) == (
        "events.curve.secret_key_file",
        f"{tmp_path / 'nowhere'} can't be read: No such file or directory",
    )
    with pytest.raises(BadKey, match="can't be read"):
        secret_key(tmp_path)
