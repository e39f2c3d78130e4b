"""``kvsync demo``: the main job, shown on simulated engines in a minute.

``workload`` makes the conversations, ``stage`` builds fleet and gateway, ``play`` sends the requests and measures,
``bound`` says what a router that knows everything could have reached, ``report`` prints, ``command`` is the command.
"""

import click

try:
    from kvsync.cli.demo.command import command as demo
except ModuleNotFoundError as missing:
    raise click.ClickException(f"{missing}: the demo needs the extra 'sim' (pip install 'kvsync[sim]')") from missing

__all__ = ["demo"]
