"""Faults that show only when settings are held beside each other, and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsync.config import Settings, load, read
from kvsync.config.addresses import BadAddress, http_address, tcp_address
from tests.unit.config.conftest import Faults


def fleet(*engines: str, model: str = "m", more: str = "") -> str:
    return f"models:\n  - name: {model}\n{more}    engines:\n" + "".join(
        f"      - {{{engine}}}\n" for engine in engines
    )


A = "name: a, url: 'http://h1:8000'"
B = "name: b, url: 'http://h2:8000'"


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (fleet(A, A.replace("h1", "h3")), "models[0].engines[1].name", "'a' is taken (models[0].engines[0])"),
        (fleet(A) + fleet(B)[8:], "models[1].name", "listed already (models[0])"),
        (fleet(A, B + ", adapters: [m]"), "models[0].engines[1].adapters[0]", "has the name of a model"),
        (fleet(A + ", adapters: [x, x]"), "models[0].engines[0].adapters[1]", "listed twice"),
        (
            fleet(A + ", adapters: [x]") + fleet(B + ", adapters: [x]", model="n")[8:],
            "models[1].engines[0].adapters[0]",
            "belongs to the model 'm'",
        ),
        (fleet(A, B.replace("h2", "H1")), "models[0].engines[1].url", "port 8000 of h1 is taken: url of 'a'"),
        (fleet(A + ", events: 'tcp://h1:8000'"), "models[0].engines[0].events", "port 8000 of h1 is taken"),
        (
            fleet(A + ", events: 'tcp://h1:5557', replay: 'tcp://h1:5558', data_parallel_size: 2"),
            "models[0].engines[0].replay",
            "port 5558 of h1 is taken: events of 'a', rank 1",
        ),
        (
            fleet(A + ", events: 'tcp://[::1]:5557', data_parallel_size: 4", B + ", events: 'tcp://[0::1]:5560'"),
            "models[0].engines[1].events",
            "port 5560 of ::1 is taken: events of 'a', rank 3",
        ),
        (
            fleet(A + ", events: 'tcp://h:65535', data_parallel_size: 2"),
            "models[0].engines[0].events",
            "rank 1 would be at port 65536",
        ),
        (fleet(A + ", replay: 'tcp://h:5558'"), "models[0].engines[0].replay", "without `events`"),
        (fleet(A, more="    tokenizer: nowhere\n"), "models[0].tokenizer", "tokenizer.json"),
        ("gateway: {port: 9}\nadmin: {port: 9}\n", "admin.port", "gateway's port too"),
        ("gateway: {host: h, port: 9}\nadmin: {host: h, port: 9}\n", "admin.port", "gateway's port too"),
        ("gateway: {port: 9}\nextproc: {port: 9, enabled: true}\n", "extproc.port", "gateway's port too"),
        ("extproc: {port: 9, enabled: true}\nadmin: {port: 9}\n", "admin.port", "external processor's port too"),
        ("gateway: {enabled: false}\n", "gateway.enabled", "no port takes requests"),
        ("extproc: {tls: {cert: nowhere, key: nowhere}}\n", "extproc.tls.cert", "can't be read"),
        *(
            (
                fleet(f"name: a, url: 'http://{url}:8000'") + f"gateway: {{host: {host}, port: 8000}}\n",
                "models[0].engines[0].url",
                "own data port",
            )
            for host, url in [
                ("0.0.0.0", "127.0.0.1"),
                ("0.0.0.0", "localhost"),
                ("'::'", "[::1]"),
                ("127.0.0.1", "localhost"),
                ("10.0.0.5", "10.0.0.5"),
            ]
        ),
        ("gateway: {extra_paths: [/v1/models]}\n", "gateway.extra_paths[0]", "answered by the gateway itself"),
        ("gateway: {extra_paths: [/v1/score, /v1/models/x]}\n", "gateway.extra_paths[1]", "by the gateway itself"),
        *(
            (f"gateway: {{extra_paths: ['{path}']}}\n", "gateway.extra_paths[0]", "no / at the end")
            for path in ("/v1/score/", "/v1//score", "/v1/../score", "/./v1", "/")
        ),
        (fleet(A + ", spec_decode: ngram"), "models[0].engines[0].spec_decode", "'eagle'"),
        (fleet("name: 'a b', url: 'http://h'"), "models[0].engines[0].name", "pattern"),
        (fleet("name: 'a#0', url: 'http://h'"), "models[0].engines[0].name", "pattern"),
        (fleet(A + ", labels: {version: 1}"), "models[0].engines[0].labels.version", "quotes"),
    ],
)
def test_what_does_not_fit_together(faults: Faults, text: str, path: str, says: str) -> None:
    (fault,) = faults(text)
    assert fault.path == path
    assert says in str(fault)
    assert fault.origin.rpartition(":")[2].isdigit()


def test_checks_run_beside_other_faults(faults: Faults) -> None:
    found = faults(fleet(A, A, "name: c") + "gateway: {port: 5, hots: x}\nadmin: {port: 5}\n")
    assert {fault.path for fault in found} == {
        "models[0].engines[2].url",
        "models[0].engines[1].name",
        "models[0].engines[1].url",
        "gateway.hots",
    }


@pytest.mark.parametrize(
    "text",
    [
        "gateway: {port: 0}\nadmin: {port: 0}\n",
        "gateway: {host: 10.0.0.1, port: 9}\nadmin: {port: 9}\n",
        fleet("name: a, url: 'http://127.0.0.1:9'") + "gateway: {host: 10.0.0.1, port: 9}\n",
        fleet("name: a, url: 'http://10.0.0.2:9'") + "gateway: {port: 9}\n",
        "gateway: {extra_paths: [/v1/score, /rerank, /a.b/~c_d-e]}\n",
        fleet(A + ", adapters: [x]", B + ", adapters: [x]"),
        fleet(A + ", events: 'tcp://h1:5557', replay: 'tcp://h1:5657', data_parallel_size: 8"),
        fleet(A + ", kv_events: false"),
    ],
)
def test_what_fits(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text(text)
    assert isinstance(load(file, {}, {}), Settings)


def test_a_model_without_engines_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text("models: [{name: m}]\n")
    assert read(file, {}, {}).warnings == ("the model 'm' has no engines: requests for it can't be served",)


def test_a_tokenizer_folder_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    file = tmp_path / "kvsync.yaml"
    file.write_text("models: [{name: m, tokenizer: tok}]\n")
    assert load(file, {}, {}).models[0].tokenizer == tmp_path / "tok"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("http://h", "http://h:80"),
        ("https://H.Example./", "https://h.example.:443"),
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://[2001:DB8::1]:8000", "http://[2001:db8::1]:8000"),
        ("http://vllm_0.ns.svc:1", "http://vllm_0.ns.svc:1"),
    ],
)
def test_http_addresses(text: str, form: str) -> None:
    assert str(http_address(text)) == form
    assert str(http_address(form)) == form


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an address"),
        ("h:8000", "does not begin with"),
        ("//h:8000", "does not begin with"),
        ("ftp://h", "does not begin with"),
        ("http:/h", "does not begin with"),
        ("http:h", "does not begin with"),
        ("tcp://h:1", "does not begin with"),
        ("http://", "names no host"),
        ("http://:80", "names no host"),
        ("http://u:p@h", "user name or password"),
        ("http://h@", "user name or password"),
        ("http://h/v1", "carries a path"),
        ("http://h?x", "query or fragment"),
        ("http://h#", "query or fragment"),
        ("http://h:0", "names no port"),
        ("http://h:65536", "not an address"),
        ("http://h:x", "not an address"),
        ("http://h:-1", "not an address"),
        ("http://[::1", "not an address"),
        ("http://::1:80", "not an address"),
        ("http://h h", "not an address"),
        ("http://h\n", "not an address"),
        ("http://h\x00", "not an address"),
        ("http://*:80", "what an engine listens on"),
        ("http://0.0.0.0:80", "any address"),
        ("http://[::]:80", "any address"),
        ("http://224.0.0.1", "multicast"),
        ("http://[fe80::1%25eth0]:80", "zone"),
        ("http://010.0.0.1", "neither a host name"),
        ("http://1.2.3", "neither a host name"),
        ("http://-h", "neither a host name"),
        ("http://a..b", "neither a host name"),
        ("http://" + "a" * 300, "neither a host name"),
    ],
)
def test_what_is_no_http_address(text: str, says: str) -> None:
    with pytest.raises(BadAddress) as caught:
        http_address(text)
    assert says in str(caught.value)
    assert caught.value.mend


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(BadAddress) as caught:
        http_address("http://u:s3cret@h")
    assert "s3cret" not in str(caught.value)


def test_tcp_addresses() -> None:
    assert str(tcp_address("tcp://[::1]:5557")) == "tcp://[::1]:5557"
    assert str(tcp_address("tcp://Host:5557")) == "tcp://host:5557"
    for text in ("tcp://*:5557", "tcp://h", "ipc:///x", "tcp://h:1/x", "tcp://::1:5557", "http://h:1"):
        with pytest.raises(BadAddress):
            tcp_address(text)


def test_a_tokenizer_endpoint_may_have_a_path_and_may_be_the_engines() -> None:
    for text, form in (("http://h/base/", "http://h:80/base"), ("engines", "engines")):
        environ = {"KVSYNC_TOKENIZER_REMOTE_ENDPOINT": text}
        assert load(None, environ, {}).tokenizer.remote.endpoint == form
