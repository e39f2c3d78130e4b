"""``kvsync config``: look at a configuration without starting anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import BaseModel

from kvsync.config import ConfigError, EngineTlsSettings, Loaded, Settings, read
from kvsync.events.sync import unmet_conditions


@click.group()
def config() -> None:
    """Check and explain configurations."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
def check(file: Path | None) -> None:
    """Check FILE and the environment as `kvsync serve` would read them, and start nothing.

    Prints every fault at once, each with its place (file and line, or variable) and how to mend it, and exits with 1.
    Without faults it prints the effective settings, one a line, and behind those that are not defaults where they
    come from. Without FILE the environment alone is checked.

    \b
    Layers, the later winning:
      1. defaults
      2. ROUTING_ALGORITHM, for routing.policy only
      3. FILE
      4. AIBRIX_* variables that have a counterpart here; the others are named with the reason
      5. KVSYNC_<SECTION>_<FIELD>, such as KVSYNC_GATEWAY_PORT for gateway.port
      6. flags of `kvsync serve`

    \b
    A small FILE:
      models:
        - name: Qwen/Qwen3-8B
          engines:
            - name: engine-0
              url: http://10.0.0.5:8000
              events: tcp://10.0.0.5:5557
              replay: tcp://10.0.0.5:6557
    """
    try:
        loaded = read(file, os.environ, {})
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for warning in (*loaded.warnings, *_doubts(loaded.settings)):
        click.echo(f"Warning: {warning}", err=True)
    for line in _explained(loaded):
        click.echo(line)


def _doubts(settings: Settings) -> Iterator[str]:
    """What `kvsync serve` would start with and not do."""
    if not settings.models and not settings.kubernetes.enabled:
        yield "no model is configured: every request will be refused"
    urls = [engine.url for model in settings.models for engine in model.engines]
    urls.append(settings.tokenizer.remote.endpoint or "")
    if settings.gateway.engine_tls != EngineTlsSettings() and not any(url.startswith("https://") for url in urls):
        yield "gateway.engine_tls is not used: no engine has an https URL"
    if settings.events.enabled:
        yield from unmet_conditions(settings)


def _explained(loaded: Loaded) -> Iterator[str]:
    for path, value in _leaves(loaded.settings, ""):
        origin = loaded.origins.get(path)
        yield f"{path} = {value}" + (f"  # {origin}" if origin else "")


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for position, item in enumerate(value):
            yield from _leaves(item, f"{path}[{position}]")
    elif isinstance(value, bool):
        yield path, str(value).lower()
    elif value is None:
        yield path, "-"
    elif isinstance(value, tuple):
        yield path, f"[{', '.join(map(str, value))}]"
    else:
        yield path, str(value)
