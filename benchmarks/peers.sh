#!/bin/bash
# The peers' environment, apart from Recurra's own: bash benchmarks/peers.sh [FOLDER]
# llama.cpp is compiled for this machine (cmake and a C++ compiler are needed, minutes); transformers and
# torch are those of Recurra's development environment.
set -eu
folder=${1:-.venv-peers}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet "llama-cpp-python==0.3.36" "gguf==0.19.0" safetensors numpy
"$folder/bin/python" -c "import llama_cpp, gguf; print('llama-cpp-python', llama_cpp.__version__)"
echo "now: python benchmarks/cpu_vs_peers.py --peers $folder/bin/python"
