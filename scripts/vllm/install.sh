#!/usr/bin/env bash
# Real vLLM for CPU in a virtual environment of its own:  install.sh VENV
#
# Needs python3.11, uv, a C compiler, nm, readelf and libnuma.so.1 (Debian: libnuma1). Downloads 0.8 GB, takes 2 GB on
# disk. Does nothing when VENV already holds exactly this; an interrupted run is made anew from the start.
set -euo pipefail

venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wanted=$(cat "$here"/install.sh "$here"/cuda_stand_ins.py "$here"/requirements.txt | sha256sum)
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
for tool in uv cc nm readelf; do
  command -v "$tool" >/dev/null || { echo "install.sh: $tool is needed and not on the PATH" >&2; exit 1; }
done

uv venv -q --clear --no-python-downloads --python 3.11 "$venv"
uv pip install -q --no-deps --only-binary :all: --require-hashes -r "$here/requirements.txt" -p "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# `vllm serve` asks for the version of a package "vllm", and takes the CPU platform when that version says "cpu".
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"

"$venv/bin/python" "$here/cuda_stand_ins.py" "$site/torch/lib"
"$venv/bin/python" -c 'import torch; assert not torch.cuda.is_available(); assert torch.ones(4).sum().item() == 4'
echo "$wanted" >"$venv/installed"
