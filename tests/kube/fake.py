"""An API server of the tests' own: namespaces and pods over HTTP, lists in pages, watches, and faults on demand.

It behaves as a real kube-apiserver was seen to (the same tests run against both): revisions are of the whole server and
move on with any write; a watch from a revision that is not kept is 200 and then an ERROR event; an old ``continue``
token is status 410; a revision from the future is silence; a pod that leaves a selector is DELETED as it was; a deleted
pod that has a node terminates and stays; bookmarks come before a watch's end, if anything was written meanwhile, and
have ``spec.containers`` null. What it refuses, it refuses with a Status.

Faults: :attr:`FakeApiServer.next` for the next requests of a kind, and methods for what happens to open watches.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from aiohttp import web

from tests.certificates import Authority

from .pods import Json

ADMIN: Final = "admin-token"
Key: TypeAlias = tuple[str, str]
What: TypeAlias = Literal["list", "watch"]
Misdeed: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class _Written:
    """One write to one pod."""

    revision: int
    key: Key
    before: Json | None
    after: Json | None
    """``None``: it is gone."""
    last: Json
    """As it is told to those who watch."""


@dataclass(eq=False)
class _Watch:
    """An open watch."""

    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """Bytes to send; ``None`` ends it properly."""
    transport: asyncio.Transport | None = None
    silent: bool = False


@dataclass
class Account:
    """What a token may do: list and watch of pods in these namespaces (``*``: in all)."""

    namespaces: frozenset[str] = frozenset()
    verbs: frozenset[str] = frozenset({"list", "watch"})


class FakeApiServer:
    """See the module. Use it as an asynchronous context manager.

    Args:
        folder: for its certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder, "kube-ca")
        self.ca_file = self._authority.file
        self.token = ADMIN
        self.accounts: dict[str, Account] = {}
        """By token; the administrator's may do everything."""
        self.next: dict[What, deque[Misdeed]] = {"list": deque(), "watch": deque()}
        """What happens to the next requests, one each, in place of an answer."""
        self.always: dict[What, Misdeed | None] = {"list": None, "watch": None}
        self.asked: Counter[str] = Counter()
        """Lists and watches that arrived."""
        self.queries: list[dict[str, str]] = []
        """Of lists and watches, in their order."""
        self._namespaces = {"default"}
        self._pods: dict[Key, Json] = {}
        self._history: list[_Written] = []
        self._revision = 100
        self._floor = 0
        """Watches from before it have expired."""
        self._tokens_from = 0
        self._watches: dict[_Watch, tuple[str, str]] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def watching(self) -> int:
        """Open watches."""
        return len(self._watches)

    async def __aenter__(self) -> FakeApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to listen; a later start has the same port and, as a real one, has forgotten its history."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/api/v1/namespaces", self._make_namespace)
        app.router.add_get("/api/v1/pods", self._collection)
        app.router.add_get("/api/v1/namespaces/{ns}/pods", self._collection)
        app.router.add_post("/api/v1/namespaces/{ns}/pods", self._create)
        app.router.add_get("/api/v1/namespaces/{ns}/pods/{name}", self._get)
        app.router.add_patch("/api/v1/namespaces/{ns}/pods/{name}", self._patch)
        app.router.add_patch("/api/v1/namespaces/{ns}/pods/{name}/status", self._patch)
        app.router.add_delete("/api/v1/namespaces/{ns}/pods/{name}", self._delete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        tls = self._authority.server("127.0.0.1", "localhost")
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=tls)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._revision += 7  # leases, nodes and the rest
        self._floor = self._tokens_from = self._revision

    async def stop(self, *, kill: bool = False) -> None:
        """End properly (open watches end, too), or as SIGKILL does: connections are cut without another byte."""
        runner, self._runner = self._runner, None
        for watch in list(self._watches):
            if kill:
                self._abort(watch)
            else:
                watch.queue.put_nowait(None)
        if runner is not None:
            await runner.cleanup()
        self._watches.clear()

    # ---- faults

    def cut(self) -> None:
        """Open watches break off without their last chunk."""
        for watch in list(self._watches):
            self._abort(watch)

    def end(self) -> None:
        """Open watches end properly."""
        for watch in self._watches:
            watch.queue.put_nowait(None)

    def say(self, raw: bytes, *, then: Literal["go on", "end"] = "go on") -> None:
        """These bytes to all open watches."""
        for watch in self._watches:
            watch.queue.put_nowait(raw)
            if then == "end":
                watch.queue.put_nowait(None)

    def silence(self) -> None:
        """Watches that are open now say nothing any more, and stay open."""
        for watch in self._watches:
            watch.silent = True

    def error(self, code: int, reason: str = "Expired") -> None:
        """An ERROR event to all open watches, which end after it."""
        self.say(_line("ERROR", _status(code, reason, "injected")), then="end")

    def forget(self) -> None:
        """Drop the history: watches from where it was, and pages that are not fetched yet, have expired."""
        self._revision += 1
        self._floor = self._tokens_from = self._revision

    def rewind(self) -> None:
        """The store comes back from a backup: revisions go back, so those that were told are of the future."""
        self._revision -= 50
        self._floor = 0
        self._history.clear()

    def write_elsewhere(self) -> None:
        """Something that is no pod is written."""
        self._revision += 1

    def fill(self, namespace: str, count: int, **metadata: object) -> None:
        """So many pods that are nobody's engine, without a request for each."""
        for n in range(count):
            made: Json = {"metadata": {"name": f"filler-{n:05}", "namespace": namespace, "uid": str(uuid.uuid4())}}
            made["metadata"] |= metadata
            self._write((namespace, made["metadata"]["name"]), made | {"spec": {}, "status": {"phase": "Running"}})

    def replace(self, namespace: str, name: str, path: str, value: object) -> None:
        """Put something into a pod that no API server would let in; watches are told."""
        found = copy.deepcopy(self._pods[namespace, name])
        *above, last = path.split(".")
        node = found
        for part in above:
            node = node[part]
        node[last] = value
        self._write((namespace, name), found)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """As if there were no misdeed."""
        return await self._list(request, request.match_info.get("ns", "*"))

    # ---- writing

    async def _make_namespace(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request, "create", "*")) is not None:
            return refused
        self._namespaces.add((await request.json())["metadata"]["name"])
        self._revision += 1
        return web.json_response({"kind": "Namespace"}, status=201)

    async def _create(self, request: web.Request) -> web.Response:
        namespace = request.match_info["ns"]
        if (refused := self._refused(request, "create", namespace)) is not None:
            return refused
        made: Json = await request.json()
        name = made["metadata"]["name"]
        if namespace not in self._namespaces:
            return _answer(404, "NotFound", f'namespaces "{namespace}" not found')
        if (namespace, name) in self._pods:
            return _answer(409, "AlreadyExists", f'pods "{name}" already exists')
        made["metadata"] |= {
            "namespace": namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": f"2026-01-01T00:00:{self._revision % 60:02}Z",
        }
        made["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        return web.json_response(self._write((namespace, name), made), status=201)

    async def _get(self, request: web.Request) -> web.Response:
        key = (request.match_info["ns"], request.match_info["name"])
        if (refused := self._refused(request, "get", key[0])) is not None:
            return refused
        if key not in self._pods:
            return _answer(404, "NotFound", f'pods "{key[1]}" not found')
        return web.json_response(self._pods[key])

    async def _patch(self, request: web.Request) -> web.Response:
        key = (request.match_info["ns"], request.match_info["name"])
        if (refused := self._refused(request, "patch", key[0])) is not None:
            return refused
        if key not in self._pods:
            return _answer(404, "NotFound", f'pods "{key[1]}" not found')
        before = self._pods[key]
        patch: Json = await request.json()
        after = _merged(before, patch)
        ip = after.get("status", {}).get("podIP")
        if ip and not _sound_address(ip):
            return _answer(422, "Invalid", f"status.podIP: Invalid value: {ip!r}")
        return web.json_response(before if after == before else self._write(key, after))

    async def _delete(self, request: web.Request) -> web.Response:
        key = (request.match_info["ns"], request.match_info["name"])
        if (refused := self._refused(request, "delete", key[0])) is not None:
            return refused
        if key not in self._pods:
            return _answer(404, "NotFound", f'pods "{key[1]}" not found')
        grace = (await request.json()).get("gracePeriodSeconds", 30) if request.can_read_body else 30
        found = self._pods[key]
        if found["spec"].get("nodeName"):
            after = copy.deepcopy(found)
            after["metadata"] |= {"deletionTimestamp": "2026-01-01T00:10:00Z", "deletionGracePeriodSeconds": grace}
            found = self._write(key, after)
            if grace:
                return web.json_response(found)
        self._write(key, None)
        return web.json_response(found)

    def _write(self, key: Key, after: Json | None) -> Json:
        self._revision += 1
        before = self._pods.get(key)
        last = copy.deepcopy(after if after is not None else before)
        assert last is not None
        last["metadata"]["resourceVersion"] = str(self._revision)
        if after is None:
            del self._pods[key]
        else:
            self._pods[key] = last
        written = _Written(self._revision, key, before, None if after is None else last, last)
        self._history.append(written)
        for watch, (namespace, selector) in self._watches.items():
            if not watch.silent and (line := _told(written, namespace, selector)) is not None:
                watch.queue.put_nowait(line)
        return last

    # ---- reading

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info.get("ns", "*")
        what: What = "watch" if request.query.get("watch") == "true" else "list"
        self.asked[what] += 1
        self.queries.append(dict(request.query))
        misdeed = self.next[what].popleft() if self.next[what] else self.always[what]
        if misdeed is not None:
            return await misdeed(request)
        if (refused := self._refused(request, what, namespace)) is not None:
            return refused
        return await (self._watch if what == "watch" else self._list)(request, namespace)

    async def _list(self, request: web.Request, namespace: str) -> web.StreamResponse:
        selector = request.query.get("labelSelector", "")
        start, revision = ("", ""), self._revision
        if token := request.query.get("continue"):
            told, start = int(json.loads(token)[0]), tuple(json.loads(token)[1])
            if told < self._tokens_from:
                body = _status(410, "Expired", "The provided continue parameter is too old")
                body["metadata"] = {"continue": json.dumps([self._revision, start])}
                return web.json_response(body, status=410)
            revision = told
        keys = sorted(
            key
            for key, found in self._pods.items()
            if namespace in ("*", key[0]) and key > start and _fits(found, selector)
        )
        limit = int(request.query.get("limit", "0")) or len(keys)
        meta: Json = {"resourceVersion": str(revision)}
        if len(keys) > limit:
            meta |= {"continue": json.dumps([revision, keys[limit - 1]]), "remainingItemCount": len(keys) - limit}
        items = [self._pods[key] for key in keys[:limit]]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, namespace: str) -> web.StreamResponse:
        query = request.query
        selector, since = query.get("labelSelector", ""), int(query["resourceVersion"])
        timeout = float(query.get("timeoutSeconds", "1800"))
        response = await opened(request)
        watch = _Watch(transport=request.transport)
        if since < self._floor:
            await response.write(_line("ERROR", _status(410, "Expired", f"too old resource version: {since}")))
            await response.write_eof()
            return response
        for written in self._history:
            if written.revision > since and (line := _told(written, namespace, selector)) is not None:
                watch.queue.put_nowait(line)
        self._watches[watch] = (namespace, selector)
        watch.silent = since > self._revision
        loop = asyncio.get_running_loop()
        bookmark = None
        if query.get("allowWatchBookmarks") == "true" and timeout > 2:
            bookmark = loop.call_later(timeout - 1.5, self._bookmark, watch, since)
        ending = loop.call_later(timeout, watch.queue.put_nowait, None)
        try:
            while (piece := await watch.queue.get()) is not None:
                await response.write(piece)
            await response.write_eof()
        except ConnectionError:  # who watched is gone
            pass
        finally:
            self._watches.pop(watch, None)
            ending.cancel()
            if bookmark is not None:
                bookmark.cancel()
        return response

    def _bookmark(self, watch: _Watch, since: int) -> None:
        if not watch.silent and self._revision > since:
            meta = {"resourceVersion": str(self._revision), "creationTimestamp": None}
            pod = {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": {"containers": None}, "status": {}}
            watch.queue.put_nowait(_line("BOOKMARK", pod))

    def _abort(self, watch: _Watch) -> None:
        self._watches.pop(watch, None)
        if watch.transport is not None:
            watch.transport.abort()

    def _refused(self, request: web.Request, verb: str, namespace: str) -> web.Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer" and token == self.token:
            return None
        account = self.accounts.get(token)
        if scheme != "Bearer" or account is None:
            return _answer(401, "Unauthorized", "Unauthorized")
        if verb in account.verbs and ("*" in account.namespaces or namespace in account.namespaces):
            return None
        where = "at the cluster scope" if namespace == "*" else f'in the namespace "{namespace}"'
        return _answer(403, "Forbidden", f'pods is forbidden: User "gateway" cannot {verb} resource "pods" {where}')


# ---- misdeeds


def status(code: int, reason: str = "InternalError", **headers: str) -> Misdeed:
    """An error, properly said."""

    async def answer(_: web.Request) -> web.StreamResponse:
        response = _answer(code, reason, "injected")
        response.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
        return response

    return answer


def raw(body: bytes, *, code: int = 200) -> Misdeed:
    """These bytes for a body."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=code, content_type="application/json")

    return answer


async def stall(request: web.Request) -> web.StreamResponse:
    """Not one byte, until the client gives up."""
    await asyncio.sleep(3600)
    raise AssertionError(request)


async def reset(request: web.Request) -> web.StreamResponse:
    """The connection is reset before one byte."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def trickle(pause: float) -> Misdeed:
    """A body that never ends, a blank at a time."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await opened(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b" ")
                await asyncio.sleep(pause)
        return response

    return answer


def endless(piece: bytes) -> Misdeed:
    """A body that never ends, as fast as it is taken."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await opened(request)
        with suppress(ConnectionError):
            while request.transport is not None and not request.transport.is_closing():
                await response.write(piece)
                await asyncio.sleep(0)
        return response

    return answer


async def opened(request: web.Request) -> web.StreamResponse:
    """The head of an answer in chunks."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


# ---- objects


def _line(kind: str, what: Json) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode() + b"\n"


def _told(written: _Written, namespace: str, selector: str) -> bytes | None:
    """What a watch with this selector is told of a write."""
    if namespace not in ("*", written.key[0]):
        return None
    was = written.before is not None and _fits(written.before, selector)
    now = written.after is not None and _fits(written.after, selector)
    if not was and not now:
        return None
    if was and not now:
        assert written.before is not None
        last = copy.deepcopy(written.before)
        last["metadata"]["resourceVersion"] = str(written.revision)
        return _line("DELETED", last)
    return _line("MODIFIED" if was else "ADDED", written.last)


def _fits(found: Json, selector: str) -> bool:
    labels = found["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        name, equals, value = part.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = _merged(found.get(name), value)
    return found


def _sound_address(text: str) -> bool:
    from ipaddress import IPv6Address, ip_address

    try:
        address = ip_address(text)
    except ValueError:
        return False
    return not (isinstance(address, IPv6Address) and address.ipv4_mapped)


def _status(code: int, reason: str, message: str) -> Json:
    said = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


def _answer(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status(code, reason, message), status=code)


@asynccontextmanager
async def fake_api_server(folder: Path) -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer(folder) as server:
        yield server
