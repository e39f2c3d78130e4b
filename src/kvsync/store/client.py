"""redis-py as it is used here: no retries of its own, no questions that nobody asked, our TLS, secrets as they are now.

Importing this module imports redis-py, which is an extra (``kvsync[redis]``).

What must always hold: nothing in here holds up the event loop. Contexts and passwords are handed in, made elsewhere;
replies are read by the parser in Python, since hiredis makes a list of the length that a reply declares, whatever comes
of it (2³¹: seven seconds). And no reply is read that is longer than ``LONGEST_REPLY``, whatever stands in a key.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import InvalidResponse

from kvsync.config.addresses import redis_address
from kvsync.config.redis import RedisSettings

Client: TypeAlias = Redis | RedisCluster

LONGEST_REPLY: Final = 8 << 20
"""Bytes. The longest that is wanted is the hash of loads: a quarter of a megabyte for 16 replicas of 1,000 workers."""
SLOTS: Final = 16384
"""Of a cluster."""
ITEM: Final = 256
"""Bytes that each part of a reply counts for, beside its own: what it costs to be read."""


class TooLarge(InvalidResponse):
    """A reply that is longer than any that is wanted. Its connection is closed."""


class Parser(_AsyncRESP2Parser):
    """That of redis-py, with an end."""

    _left = LONGEST_REPLY

    async def read_response(self, disable_decoding: bool = False) -> Any:
        self._left = LONGEST_REPLY
        return await super().read_response(disable_decoding)

    async def _read(self, length: int) -> bytes:
        self._spend(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        self._spend(ITEM)
        return await super()._readline()

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooLarge(f"a reply of more than {LONGEST_REPLY} bytes")


class Credentials(CredentialProvider):
    """Those in force now, looked up whenever a connection is made."""

    def __init__(self, username: str | None, password: Callable[[], str | None]) -> None:
        self._username = username
        self._password = password

    @property
    def given(self) -> bool:
        return self._username is not None or self._password() is not None

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password() or ""
        return (password,) if self._username is None else (self._username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _Tls:
    """Beside a connection's class: TLS by a context of ours. (redis-py's own reads files for each connection, 50 ms of
    the event loop, and trusts the system's authorities whatever it is given.)"""

    def __init__(self, *, context: Callable[[], ssl.SSLContext], server_name: str | None, **arguments: Any) -> None:
        self._context = context
        self._server_name = server_name
        super().__init__(**arguments)

    def _connection_arguments(self) -> Mapping[str, object]:
        plain: Mapping[str, object] = super()._connection_arguments()  # type: ignore[misc]
        named = {"server_hostname": self._server_name} if self._server_name else {}
        return {**plain, "ssl": self._context(), **named}


class TlsConnection(_Tls, Connection):
    pass


class TlsManagedConnection(_Tls, SentinelManagedConnection):
    pass


def _slots(response: Any, **kwargs: Any) -> Any:
    """What a cluster says of its slots, if it can be so: redis-py goes through them one by one, and believes any."""
    slots = 0
    for first, last, *_ in response:
        if not 0 <= first <= last < SLOTS:
            raise InvalidResponse(f"a cluster with slots from {first} to {last}")
        slots += last - first + 1
    if slots > SLOTS:
        raise InvalidResponse(f"a cluster of {slots} slots, and {SLOTS} is what there are")
    return response


def connect(settings: RedisSettings, credentials: Credentials, context: Callable[[], ssl.SSLContext]) -> Client:
    """A client that has not connected yet. Call it on the event loop that uses it."""
    assert settings.url is not None
    address = redis_address(settings.url)
    common: dict[str, Any] = {
        "socket_timeout": None,  # whoever asks has limits of its own, for whole calls
        "socket_connect_timeout": settings.timeout,
        "driver_info": None,
        "protocol": 2,
    }
    parser: dict[str, Any] = {"parser_class": Parser}
    secured: dict[str, Any] = {"context": context, "server_name": settings.tls.server_name} if address.tls else {}
    with_secrets = {**common, "credential_provider": credentials if credentials.given else None}
    once = Retry(NoBackoff(), 0)
    connections = settings.connections + 1  # one to look whether it is there
    if settings.mode == "cluster":
        # One more try, with the nodes as they are then: how a client learns that they changed.
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        cluster = RedisCluster(
            startup_nodes=nodes,
            retry=Retry(NoBackoff(), 1),
            max_connections=connections,
            **with_secrets,
        )
        cluster.set_response_callback("CLUSTER SLOTS", _slots)
        for arguments in (cluster.connection_kwargs, *(node.connection_kwargs for node in cluster.startup_nodes)):
            arguments.update({**secured, **parser})
        if address.tls:
            cluster.connection_kwargs["connection_class"] = TlsConnection
            for node in cluster.startup_nodes:
                node.connection_class = TlsConnection
        return cluster
    pooled: dict[str, Any] = {**with_secrets, **secured, **parser, "retry": once, "db": address.db}
    pooled["max_connections"] = connections
    if settings.mode == "sentinel":
        plain = TlsConnection if address.tls else Connection
        unnamed = {**common, **secured, **parser, "retry": once}
        sentinel = Sentinel([])  # type: ignore[no-untyped-call]
        sentinel.sentinels = [
            Redis(connection_pool=ConnectionPool(plain, host=h, port=p, **unnamed)) for h, p in address.nodes
        ]
        managed = TlsManagedConnection if address.tls else SentinelManagedConnection
        pool = SentinelConnectionPool(settings.sentinel_service, sentinel, connection_class=managed, **pooled)  # type: ignore[no-untyped-call]
        return Redis.from_pool(pool)
    (host, port), *_ = address.nodes
    return Redis.from_pool(ConnectionPool(TlsConnection if address.tls else Connection, host=host, port=port, **pooled))


async def renew(client: Client) -> None:
    """Have the next calls make connections of their own. A cluster's nodes say themselves where to go."""
    if isinstance(client, Redis):
        await client.connection_pool.disconnect(inuse_connections=False)


async def close(client: Client) -> None:
    """Close all connections, those to sentinels too."""
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


__all__ = ["LONGEST_REPLY", "Client", "Credentials", "TooLarge", "close", "connect", "renew"]
