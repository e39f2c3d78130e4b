"""Running a gateway in the foreground, whichever ports it opens: what ``kvsync serve`` and ``kvsync extproc`` share."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from importlib import import_module
from pathlib import Path

import click

from kvsync.cli.process import OTHER_FILES, allow_files, clients_within, settle_collector
from kvsync.config import ConfigError, Settings, load

log = logging.getLogger("kvsync")


def run(file: Path | None, flags: dict[str, object]) -> None:
    """Until SIGTERM or SIGINT.

    Raises:
        ClickException: it can't start.
    """
    try:
        settings = load(file, os.environ, flags)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if settings.extproc.enabled:
        try:
            import_module("grpc")
            import_module("google.protobuf")
        except ModuleNotFoundError as missing:
            raise click.ClickException(
                f"{missing}: Envoy's external processor needs the extra 'envoy' (pip install 'kvsync[envoy]')"
            ) from None
    import uvloop

    from kvsync.config.credentials import BadFile
    from kvsync.events.sync import KVSyncRefused
    from kvsync.telemetry import logs

    logs.setup(settings.telemetry.log_level, settings.telemetry.log_format)
    try:
        uvloop.run(_serve(settings, file, flags))
    except (BadFile, KVSyncRefused) as refused:
        raise click.ClickException(str(refused)) from None
    except OSError as error:
        raise click.ClickException(
            f"can't start: {error} (gateway.port, extproc.port and admin.port, or --port and --admin-port, choose "
            "other ports)"
        ) from None


async def _serve(settings: Settings, file: Path | None, flags: dict[str, object]) -> None:
    from kvsync.app import App

    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    app = App(settings, config_file=file, environ=os.environ, flags=flags)

    def asked_to_end() -> None:
        if end.is_set():
            log.info("asked again: open answers are ended")
            app.hurry()
        end.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end)
    if settings.gateway.enabled:
        clients = settings.gateway.max_connections
        allowed = allow_files(2 * clients + OTHER_FILES)
        if (room := clients_within(allowed)) < clients:
            log.warning(
                "only %d files may be open: at most %d client connections are taken, not gateway.max_connections = %d; "
                "allow more files (ulimit -Hn), or lower it",
                allowed,
                room,
                clients,
            )
            app.gateway.max_connections = room
    loop.add_signal_handler(signal.SIGHUP, app.reload)
    await app.start()
    settle_collector()
    if not settings.models and not settings.kubernetes.enabled:
        log.warning(
            "no model is configured, so every request is refused: list models and engines in the YAML file, or have "
            "them found (kubernetes.enabled)"
        )
    try:
        await end.wait()
        if settings.gateway.enabled and (delay := settings.gateway.drain_delay):
            log.info("stopping: /readyz says no, requests are still taken for %g s", delay)
        await app.leave()
        limit = settings.gateway.drain_timeout
        if settings.extproc.enabled:
            still = settings.extproc.drain_delay
            log.info(
                "stopping: Envoy's questions are still taken for %g s, open answers may run for %g s more", still, limit
            )
        else:
            log.info("stopping: no more requests are taken, open answers may run for up to %g s", limit)
    finally:
        await app.stop()
    log.info("stopped")


__all__ = ["run"]
