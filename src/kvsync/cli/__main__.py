"""``python -m kvsync.cli``."""

from kvsync.cli import main

main(prog_name="kvsync")
