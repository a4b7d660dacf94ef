"""The parts of tools/check_clients.sh, which run in different environments.

check_clients.py export FOLDER [NAME ...]      with lmtrain: write exports, our logits and our ids to FOLDER/<variant>/
check_clients.py CLIENT FOLDER                 with a client: compare them with its own and print a table
"""

import contextlib
import json
import os
import sys
from typing import Any

import numpy as np

TESTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests")
# The source of llama.cpp, which has the converter; check_clients.sh puts it there.
CONVERTER = os.path.join(sys.prefix, "source", "vendor", "llama.cpp")
LOGITS, IDS = "our_logits.npz", "our_ids.json"
# Largest difference of logits, as a share of the largest logit. llama.cpp has GELU as a table of float16 on CPUs.
TOLERANCE = {"transformers4": 1e-4, "mlx": 1e-4, "llama.cpp": 2e-3}
# What clients lack, and the models that show it; configs/guide/use_exports.md names them.
LIMITS: dict[str, dict[str, list[str]]] = {
    "transformers4": {},
    "mlx": {
        "no such model": [
            *("arcee", "arcee, published", "backpack", "backpack-divided", "backpack-n_inner"),
            *("mpt", "mpt-6-heads", "mpt-clip", "mpt-clip, published", "mpt-softmax_scale", "mpt-untied"),
        ],
        "no windows": ["mistral", "mixtral-windows", "qwen2-max_window_layers", "qwen3-layer_types", "gemma2"],
        "GPT-2 as published only": [
            *("gpt2-gelu", "gpt2-inverse", "gpt2-mlp_scale", "gpt2-n_inner", "gpt2-relu", "gpt2-untied", "gpt2-upcast")
        ],
        "Llama has SiLU": ["llama-gelu", "llama-relu2"],
        "Gemma has the exact GELU": ["gemma"],
        "Gemma 2 has caps": ["gemma2-without-caps"],
    },
    "llama.cpp": {
        "no such model": ["backpack", "backpack-divided", "backpack-n_inner"],
        "no windows": [
            *("mistral", "mixtral-windows", "qwen2-max_window_layers", "qwen3-layer_types", "smollm3-windows")
        ],
        "GPT-2 as published only": ["gpt2-inverse", "gpt2-mlp_scale", "gpt2-n_inner", "gpt2-relu", "gpt2-upcast"],
        "Llama has SiLU": ["llama-gelu", "llama-relu2"],
        "Arcee has no biases": ["arcee"],
        "MPT has an epsilon of 1e-5 and the scale of its heads": ["mpt-clip", "mpt-softmax_scale"],
        "Gemma has the published scale and local theta": ["gemma2", "gemma2-without-caps", "gemma3", "gemma3-linear"],
        "heads have hidden_dim / num_heads": ["olmo3-yarn"],
        "no dense layers in Qwen3-MoE": ["qwen3_moe-mixed"],
        "unigram has no byte fallback": ["llama, unigram"],
    },
}
# Small enough for the texts of the tests.
VOCAB = 350
TEXTS = (
    "The robot counts 1234 stars, doesn't it?",
    "def f(x1):\n    return {'a': [1, 2.50]}\n\n\tpass  # end",
    "Gr\u00fc\u00dfe, \u0421\u043b\u043e\u0432\u043e, \u4e2d\u6587\u3002 \u0627\u0644 \u2460 \uff21 \U0001f642",
    " leading,   more   and trailing  ",
    "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
    "",
)

# The tokenizers of variants, by the beginning of their names; others have BPE.
TOKENIZERS = {
    "mistral": "sentencepiece",
    "mixtral": "sentencepiece",
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), "gemma"),
}
# Further models: a variant with another tokenizer, and those whose clients know the published values only.
FURTHER: dict[str, tuple[str | None, dict[str, Any]]] = {
    "llama, sentencepiece": ("sentencepiece", {}),
    "llama, unigram": ("unigram", {}),
    "llama, sentencepiece-chat": ("sentencepiece-chat", {}),
    "llama, bpe-chat": ("bpe-chat", {}),
    "mistral, long window": (None, {"sliding_window": 64}),
    "arcee, published": (None, {"use_mlp_bias": False}),
    "gemma2, published": (
        None,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 64,
            "attention_logit_cap": 50.0,
            "final_logit_cap": 30.0,
        },
    ),
    "gemma3, published": (
        None,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "rope": {"theta": 1e6, "local_theta": 1e4}},
    ),
    "olmo3-yarn, published": (None, {"head_dim": 4}),
    "mpt-clip, published": (None, {"layer_norm_epsilon": 1e-5}),
}


def export(folder: str, names: list[str]) -> int:
    sys.path.insert(0, TESTS)
    from conftest import VALIDATION_FILES
    from parity.variants import LENGTH, VARIANTS, make

    from lmtrain.hf.extend_tokenizer import extend_tokenizer
    from lmtrain.hf.find_tokenizer import open_tokenizer
    from lmtrain.preprocess.learn import learn_from_files
    from lmtrain.sharding.config import PartitioningConfig
    from lmtrain.sharding.mesh import build_layout
    from lmtrain.weights.load_checkpoint import gather_tensors
    from lmtrain.weights.write_export import build_export, write_export

    tokenizers = os.path.join(folder, "tokenizers")
    files = list(map(str, VALIDATION_FILES))
    for kind, model_type in {"bpe": None, "sentencepiece": "bpe", "unigram": "unigram"}.items():
        base = os.path.join(tokenizers, kind)
        learn_from_files(files, "text", VOCAB, base, model_type=model_type)
        extend_tokenizer(base, [], "chatml").save(f"{base}-chat", overwrite=False)
    write_gemma_tokenizer(os.path.join(tokenizers, "sentencepiece"), os.path.join(tokenizers, "gemma"))
    layout = build_layout(PartitioningConfig())
    for name in names or [*VARIANTS, *FURTHER]:
        variant_name = name.split(",")[0]
        kind, changes = FURTHER.get(name, (None, {}))
        tokenizer = open_tokenizer(os.path.join(tokenizers, kind or TOKENIZERS.get(variant_name.split("-")[0], "bpe")))
        variant = make(variant_name, vocab_size=tokenizer.vocab_size, **changes)
        plan = build_export(variant.config, variant.model, tokenizer, "float32")
        tensors = gather_tensors(variant.params, plan.pieces, layout, variant.model.vocab_size)
        path = os.path.join(folder, "models", name)
        write_export(path, plan, tensors)
        tokens = np.random.default_rng(3).integers(0, tokenizer.vocab_size, (2, LENGTH))
        np.savez(os.path.join(path, LOGITS), ids=tokens, logits=variant.logits(tokens))
        ids = [[text, tokenizer.backend.encode(text, add_special_tokens=False).ids] for text in TEXTS]
        with open(os.path.join(path, IDS), "w") as file:
            json.dump(ids, file)
    return 0


def write_gemma_tokenizer(source: str, folder: str) -> None:
    """A model of sentencepiece that writes no space before a text, which llama.cpp takes for granted next to Gemma."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    with open(os.path.join(source, "tokenizer.model"), "rb") as file:
        proto.ParseFromString(file.read())
    proto.normalizer_spec.add_dummy_prefix = False
    os.makedirs(folder)
    with open(os.path.join(folder, "tokenizer.model"), "wb") as file:
        file.write(proto.SerializeToString())


def check(client: str, folder: str) -> int:
    client_class = {"transformers4": Transformers, "mlx": Mlx, "llama.cpp": LlamaCpp}[client]
    limits = {name: reason for reason, names in LIMITS[client].items() for name in names}
    models = os.path.join(folder, "models")
    names = sorted(os.listdir(models))
    width = max(map(len, names))
    print(client_class.versions())
    print(f"{'model':{width}}  logits differ by  of at most")
    wrong = []
    for name in names:
        path = os.path.join(models, name)
        try:
            line, agrees = compare(client_class(path), path, TOLERANCE[client])
        except (Exception, SystemExit) as error:  # continue with the others
            line, agrees = f"  {type(error).__name__}: {str(error).strip().splitlines()[-1][:120]}", False
        limit = limits.get(name)
        if agrees != (limit is None):
            wrong.append(name)
        print(f"{name:{width}}{line}{f'  ({limit})' if limit else ''}", flush=True)
    print(f"not as expected: {'; '.join(wrong)}" if wrong else f"all {len(names)} as expected")
    return 1 if wrong else 0


def compare(loaded: Any, path: str, tolerance: float) -> tuple[str, bool]:
    """-> what to print about a model, and whether its logits and ids are ours"""
    stored = np.load(os.path.join(path, LOGITS))
    with open(os.path.join(path, IDS)) as file:
        texts = [text for text, ids in json.load(file) if loaded.encode(text) != ids]
    found = np.stack([loaded.logits(row) for row in stored["ids"]])
    difference, largest = (float(np.abs(values).max()) for values in (found - stored["logits"], stored["logits"]))
    others = f"  other ids for {len(texts)} texts, such as {texts[0]!r}" if texts else ""
    return f"  {difference:16.2g}  {largest:10.3g}{others}", not texts and difference <= tolerance * largest


class Transformers:
    """Both implementations of attention; the one with the larger difference counts."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.models = []
        for options in ({"attn_implementation": "eager"}, {}):
            model, loading = AutoModelForCausalLM.from_pretrained(
                path, torch_dtype=torch.float32, output_loading_info=True, trust_remote_code=True, **options
            )
            if left := {what: sorted(map(str, tensors)) for what, tensors in loading.items() if tensors}:
                raise ValueError(f"tensors missing or left over: {left}")
            self.models.append(model.eval())
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @staticmethod
    def versions() -> str:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def logits(self, ids: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            eager, default = (model(torch.from_numpy(ids[None])).logits[0].numpy() for model in self.models)
        if not np.abs(eager - default).max() <= TOLERANCE["transformers4"]:
            raise ValueError("eager and default attention differ")
        return eager

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Mlx:
    def __init__(self, path: str) -> None:
        import mlx_lm

        self.model, self.tokenizer = mlx_lm.load(path)

    @staticmethod
    def versions() -> str:
        import mlx.core
        import mlx_lm

        return f"mlx-lm {mlx_lm.__version__}, mlx {mlx.core.__version__}"

    def logits(self, ids: np.ndarray) -> np.ndarray:
        import mlx.core as mx

        return np.array(self.model(mx.array(ids[None])).astype(mx.float32))[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class LlamaCpp:
    """Converted to GGUF with float32 weights, and run with float32 keys and values."""

    def __init__(self, path: str) -> None:
        import llama_cpp

        sys.path.insert(0, CONVERTER)
        import convert_hf_to_gguf
        from conversion import TextModel

        # The converter knows rules of BPE by hashes of the ids of one text, so no new vocabulary. Ours are GPT-2's.
        TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
        gguf = os.path.join(path, "model.gguf")
        sys.argv = ["convert_hf_to_gguf.py", path, "--outtype", "f32", "--outfile", gguf]
        with open(os.path.join(path, "convert.log"), "w") as log, contextlib.redirect_stderr(log):
            convert_hf_to_gguf.main()
        float32 = llama_cpp.GGML_TYPE_F32
        self.model: Any = llama_cpp.Llama(
            gguf, n_ctx=64, logits_all=True, type_k=float32, type_v=float32, verbose=False
        )

    @staticmethod
    def versions() -> str:
        import llama_cpp
        import transformers

        return f"llama-cpp-python {llama_cpp.__version__}, transformers {transformers.__version__}"

    def logits(self, ids: np.ndarray) -> np.ndarray:
        self.model.reset()
        self.model.eval(ids.tolist())
        return self.model.scores[: len(ids)].copy()

    def encode(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=False, special=True)


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    sys.exit(export(where, rest) if what == "export" else check(what, where))
