#!/usr/bin/env bash
# Quickstart of preference tuning: from a new clone, offline after the install; five minutes on two cores. A small model
# is pretrained on Python source, then learns with DPO to prefer the lines that follow in it to lines of another place.
# configs/guide/finetuning.md explains it. Run it again to resume; arguments are passed to both `lmtrain train`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh
export HF_HUB_OFFLINE=1
lmtrain=.venv/bin/lmtrain
show() { printf '\n$ %s\n' "$*"; }

show lmtrain train configs/llama_nano.yaml "$@"
$lmtrain train configs/llama_nano.yaml "$@"

show lmtrain export-hf configs/llama_nano.yaml --output exports/llama_nano
$lmtrain export-hf configs/llama_nano.yaml --output exports/llama_nano

show python tools/demo_pairs.py
.venv/bin/python tools/demo_pairs.py

show lmtrain preprocess configs/llama_nano_dpo.yaml --show 1
$lmtrain preprocess configs/llama_nano_dpo.yaml --show 1

show lmtrain train configs/llama_nano_dpo.yaml "$@"
$lmtrain train configs/llama_nano_dpo.yaml "$@"

show lmtrain export-hf configs/llama_nano_dpo.yaml --output exports/llama_nano_dpo
$lmtrain export-hf configs/llama_nano_dpo.yaml --output exports/llama_nano_dpo
