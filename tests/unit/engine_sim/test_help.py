"""The faults that ``kvsync sim --help`` shows are bodies that the engine takes, and none is forgotten."""

from __future__ import annotations

import json
import re
from typing import get_args

from click.testing import CliRunner

from kvsync.cli.sim import sim
from kvsync.engine_sim.faults import Fault, FaultBody


def test_the_faults_in_the_help_text_are_taken_as_shown() -> None:
    text = CliRunner().invoke(sim, ["--help"]).output
    shown = [FaultBody.model_validate(json.loads(body)).root.kind for body in re.findall(r"-d '(.*)'", text)]
    found = re.search(r"nothing but their kind: (.*); and (\w+),", text)
    assert found
    bare = [FaultBody.model_validate({"kind": kind}).root.kind for kind in [*found[1].split(", "), found[2]]]
    assert sorted(shown + bare) == sorted(fault.model_fields["kind"].default for fault in get_args(Fault))
