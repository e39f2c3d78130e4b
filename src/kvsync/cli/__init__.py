"""The command ``kvsync``: one group, one module per command, each imported only when it is asked for."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

_COMMANDS = {
    "serve": "Run the gateway.",
    "extproc": "Run Envoy's external processor.",
    "demo": "Show the main job on simulated engines.",
    "sim": "Run a simulated vLLM engine.",
    "watch": "Print an engine's KV events as they come.",
    "config": "Check and explain configurations.",
}


class _Lazy(click.Group):
    """Loads a command's module when it is used: ``kvsync config check`` needs neither ZMQ nor an event loop."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
                raise
            # What is still buffered can't be written either, and Python would say so once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"Error: the output can't be written: {error.strerror}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"kvsync.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvsync", message="kvsync %(version)s")
def main() -> None:
    """A gateway for vLLM fleets that follows each engine's KV-cache events and sends every request where its prefix is
    already cached.

    \b
    A minute's look (with the extra 'sim'):   kvsync demo
    Two engines and one file:                 kvsync serve -c fleet.yaml
    """
