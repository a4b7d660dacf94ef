"""Whole training programs on this CPU, in turns: nanoGPT's `train.py`, Hugging Face's Trainer, and `lmtrain train`.

    git clone https://github.com/karpathy/nanoGPT
    .venv/bin/python tools/bench/peers.py nanoGPT [--steps 200] [--rounds 3]

All train a model of 4 layers of 128, batches of 12 x 64 bytes (nanoGPT's recipe for CPUs), as GPT-2 and as Llama, on
the source of Python's standard library, in float32 with AdamW. A program runs twice in each round, for `--steps` steps
and for twice as many: the difference gives its tokens per second, the rest of the first is its start and end. Medians
of the rounds, from process start to process end; no program evaluates in between.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

LAYERS, DIM, HEADS, LENGTH, BATCH, VOCAB = 4, 128, 4, 64, 12, 256
RATE, DECAY = 1e-3, 0.1
TEXT = "text.txt"
Command = Callable[[Path, int], tuple[list[str], Path]]


def text() -> bytes:
    """ASCII characters of modules of the standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(file.read_bytes() for file in files).decode("ascii", "ignore").encode()[:2_000_000]


def nanogpt(folder: Path, steps: int) -> tuple[list[str], Path]:
    settings = {
        "dataset": "bytes", "device": "cpu", "compile": False, "dtype": "float32", "out_dir": "out",
        "eval_interval": 10**9, "eval_iters": 1, "log_interval": 10, "always_save_checkpoint": False,
        "n_layer": LAYERS, "n_head": HEADS, "n_embd": DIM, "block_size": LENGTH, "batch_size": BATCH, "dropout": 0.0,
        "gradient_accumulation_steps": 1, "learning_rate": RATE, "min_lr": RATE / 10, "weight_decay": DECAY,
        "max_iters": steps - 1, "lr_decay_iters": steps, "warmup_iters": 10, "bias": True,
    }  # fmt: skip
    return [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())], folder / "nanoGPT"


def trainer(family: str) -> Command:
    def command(folder: Path, steps: int) -> tuple[list[str], Path]:
        return [sys.executable, __file__, "--hf", family, "--steps", str(steps)], folder

    return command


def lmtrain(family: str) -> Command:
    def command(folder: Path, steps: int) -> tuple[list[str], Path]:
        config = {
            "data": {
                "train_urls": [TEXT], "text_documents": "file", "tokenizer": "byte", "cache_dir": "cache",
                "enforce_eos": False, "mask_across_documents": False,
            },
            "model": {
                "type": family, "num_layers": LAYERS, "hidden_dim": DIM, "num_heads": HEADS, "seq_len": LENGTH,
                "scan_layers": False, "gradient_checkpointing": False,
                **({"intermediate_dim": 4 * DIM, "num_kv_heads": HEADS} if family == "llama" else {}),
            },
            "trainer": {
                "id": f"{family}-{time.time_ns()}", "num_train_steps": steps, "train_batch_size": BATCH,
                "steps_per_eval": None, "jax_compilation_cache_dir": "compiled",
            },
            "optimizer": {"learning_rate": RATE, "weight_decay": DECAY, "warmup": 10, "beta2": 0.95},
        }  # fmt: skip
        (folder / "run.yaml").write_text(json.dumps(config))
        return [sys.executable, "-m", "lmtrain", "train", "run.yaml"], folder

    return command


def run_trainer(family: str, steps: int) -> None:
    """Train with Hugging Face's Trainer, in the current folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    ids = torch.from_numpy(np.frombuffer(Path(TEXT).read_bytes(), np.uint8).astype(np.int64))
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    sizes = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        no_dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=LAYERS, n_embd=DIM, n_head=HEADS, n_positions=LENGTH, **sizes, **no_dropout)
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=LAYERS, hidden_size=DIM, num_attention_heads=HEADS, intermediate_size=4 * DIM,
                max_position_embeddings=LENGTH, **sizes,
            )
        )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="trainer", max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE, warmup_steps=10,
        weight_decay=DECAY, adam_beta2=0.95, lr_scheduler_type="cosine", use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=10, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()


PROGRAMS: dict[str, dict[str, Command]] = {
    "gpt2": {"nanoGPT": nanogpt, "Trainer": trainer("gpt2"), "lmtrain": lmtrain("gpt2")},
    "llama": {"Trainer": trainer("llama"), "lmtrain": lmtrain("llama")},
}


def seconds(command: Command, folder: Path, steps: int) -> float:
    arguments, where = command(folder, steps)
    began = time.perf_counter()
    done = subprocess.run(arguments, cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - began


def prepare(folder: Path, source: Path) -> None:
    content = text()
    (folder / TEXT).write_bytes(content)
    subprocess.run(["git", "clone", "-q", source.absolute(), folder / "nanoGPT"], check=True)
    data = folder / "nanoGPT/data/bytes"
    data.mkdir()
    for name in ("train.bin", "val.bin"):
        np.frombuffer(content, np.uint8).astype(np.uint16).tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB}))
    for family in PROGRAMS:
        seconds(lmtrain(family), folder, 20)  # tokenizes and compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nanogpt", nargs="?", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hf", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hf:
        run_trainer(arguments.hf, arguments.steps)
    elif arguments.nanogpt is None:
        parser.error("give the folder of a clone of nanoGPT")
    else:
        compare(arguments.nanogpt, arguments.steps, arguments.rounds)


def compare(source: Path, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, source)
        for family, programs in PROGRAMS.items():
            short: dict[str, list[float]] = {program: [] for program in programs}
            long: dict[str, list[float]] = {program: [] for program in programs}
            for _ in range(rounds):
                for program, command in programs.items():
                    short[program].append(seconds(command, folder, steps))
                    long[program].append(seconds(command, folder, 2 * steps))
            for program in programs:
                step = (median(long[program]) - median(short[program])) / steps
                whole, rest = median(short[program]), median(short[program]) - steps * step
                print(
                    f"{family:<6} {program:<8} {steps} steps in {whole:.1f} s: {BATCH * LENGTH / step:7,.0f} tokens/s, "
                    f"start and end {rest:4.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
