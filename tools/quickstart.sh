#!/usr/bin/env bash
# Quickstart: from a new clone to a trained model that generates text, offline after the install; three to six minutes on
# two cores. Run it again to resume; arguments are passed to `lmtrain train`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh
export HF_HUB_OFFLINE=1
lmtrain=.venv/bin/lmtrain
show() { printf '\n$ %s\n' "$*"; }

show python tools/demo_corpus.py demo
.venv/bin/python tools/demo_corpus.py demo

if [ ! -f demo/tokenizer/tokenizer.json ]; then
    show lmtrain tokenizer train 'demo/train.{1..8}-of-8.jsonl.gz' --output demo/tokenizer
    $lmtrain tokenizer train 'demo/train.{1..8}-of-8.jsonl.gz' --output demo/tokenizer
fi

show lmtrain preprocess configs/gpt2_nano.yaml
$lmtrain preprocess configs/gpt2_nano.yaml

show lmtrain train configs/gpt2_nano.yaml "$@"
$lmtrain train configs/gpt2_nano.yaml "$@"

show lmtrain export-hf configs/gpt2_nano.yaml --output exports/gpt2_nano
$lmtrain export-hf configs/gpt2_nano.yaml --output exports/gpt2_nano

show lmtrain generate configs/gpt2_nano.yaml --prompt "'class TestFile(unittest.TestCase): ...'"
$lmtrain generate configs/gpt2_nano.yaml --prompt $'class TestFile(unittest.TestCase):\n    def test_read(self):'

printf '\nCheckpoints: checkpoints/   Hugging Face model: exports/gpt2_nano/   Metrics: logs/\n'
printf 'To run lmtrain commands of your own: source .venv/bin/activate\n'
printf 'The export in transformers: pip install torch, then\n'
printf "  python -c \"from transformers import pipeline; print(pipeline('text-generation', 'exports/gpt2_nano')('import os'))\"\n"
