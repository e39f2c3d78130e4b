"""Let the plain build of torch load on a machine without CUDA:  cuda_stand_ins.py TORCH_LIB_FOLDER

The plain wheel is linked to some 14 CUDA libraries, 2.4 GB of packages, which a CPU never calls into. This puts a
library of a few kB beside torch for each of them: it has the names that torch's libraries import from it, and every
function answers 100, CUDA's "no device is detected". So ``torch.cuda.is_available()`` is false, truthfully.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

UNVERSIONED = {"libnccl": "nccl[A-Z]", "libcusparseLt": "cusparseLt", "libcufile": "cuFile"}
"""Libraries whose symbols carry no version: what the names of theirs begin with."""


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def source(names: set[str]) -> str:
    """C source with one function per name; the few that return text are told apart by how they are called."""
    text = [f'char *{n}(void){{return "no CUDA";}}' for n in sorted(names) if re.search("String|Name$", n)]
    code = [f"int {n}(void){{return 100;}}" for n in sorted(names) if not re.search("String|Name$", n)]
    return "\n".join([*text, *code, "int no_device;"]) + "\n"


def main(folder: Path) -> None:
    libraries = [str(p) for pattern in ("libtorch*.so", "libc10*.so") for p in folder.glob(pattern)]
    if not libraries:
        raise SystemExit(f"no torch libraries in {folder}")
    needed = {
        name
        for library in libraries
        for name in re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl).*?)\]", output("readelf", "-d", library))
    }
    imported: defaultdict[str, set[str]] = defaultdict(set)  # symbol version -> names
    for library in libraries:
        for line in output("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            imported[version].add(name)
    script = folder / "stand-in.map"
    for soname in sorted(needed):
        version = soname if soname in imported else "NVSHMEM" if "nvshmem" in soname else ""
        begins = UNVERSIONED.get(soname.split(".")[0])
        names = imported[version] if version else {name for name in imported[""] if begins and re.match(begins, name)}
        script.write_text(f"{version} {{ global: *; }};\n")
        linker = f"-Wl,-soname,{soname},--version-script={script}"
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-xc", "-", "-o", str(folder / soname), linker]
        subprocess.run(command, input=source(names), text=True, check=True)
    script.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
