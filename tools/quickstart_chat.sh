#!/usr/bin/env bash
# Quickstart of fine-tuning: from a new clone to a small chat model, offline after the install; five to ten minutes on two
# cores. A base model is pretrained on Python source, then taught with LoRA to answer questions about lines of it.
# configs/guide/finetuning.md explains the steps. Run it again to resume; arguments are passed to both `lmtrain train`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh eval
export HF_HUB_OFFLINE=1
lmtrain=.venv/bin/lmtrain
task=(--tasks line_kinds --include_path demo/chat/tasks)
show() { printf '\n$ %s\n' "$*"; }

show lmtrain train configs/llama_nano.yaml "$@"
$lmtrain train configs/llama_nano.yaml "$@"

show lmtrain export-hf configs/llama_nano.yaml --output exports/llama_nano
$lmtrain export-hf configs/llama_nano.yaml --output exports/llama_nano

show python tools/demo_chat.py
.venv/bin/python tools/demo_chat.py

if [ ! -f demo/chat/tokenizer/tokenizer.json ]; then
    show lmtrain tokenizer extend exports/llama_nano --chat_template chatml --output demo/chat/tokenizer
    $lmtrain tokenizer extend exports/llama_nano --chat_template chatml --output demo/chat/tokenizer
fi

show lmtrain eval --hf exports/llama_nano "${task[@]}"
$lmtrain eval --hf exports/llama_nano "${task[@]}"

show lmtrain train configs/llama_nano_chat.yaml "$@"
$lmtrain train configs/llama_nano_chat.yaml "$@"

show lmtrain eval configs/llama_nano_chat.yaml "${task[@]}" --apply_chat_template
$lmtrain eval configs/llama_nano_chat.yaml "${task[@]}" --apply_chat_template

show lmtrain export-hf configs/llama_nano_chat.yaml --output exports/llama_nano_chat
$lmtrain export-hf configs/llama_nano_chat.yaml --output exports/llama_nano_chat

show lmtrain export-hf configs/llama_nano_chat.yaml --merge --output exports/llama_nano_chat_merged
$lmtrain export-hf configs/llama_nano_chat.yaml --merge --output exports/llama_nano_chat_merged

show "lmtrain generate configs/llama_nano_chat.yaml --chat --temperature 0 --prompt 'What does this line do? import json'"
$lmtrain generate configs/llama_nano_chat.yaml --chat --temperature 0 --prompt $'What does this line do?\nimport json' < /dev/null

printf '\nAdapter: exports/llama_nano_chat/   Merged model: exports/llama_nano_chat_merged/\n'
printf 'In Python (source .venv/bin/activate; pip install torch):\n'
printf "  from transformers import pipeline; chat = pipeline('text-generation', 'exports/llama_nano_chat_merged')\n"
printf "  chat([{'role': 'user', 'content': 'What does this line do?\\\\nimport json'}])\n"
printf 'To talk to the model in the browser: source .venv/bin/activate; lmtrain generate configs/llama_nano_chat.yaml --chat --web\n'
