"""Write tests/parity/fixtures/: small models of transformers, and their logits computed by transformers.

    .venv/bin/python tools/parity_fixtures.py [NAME ...]            write all, or those named
    .venv/bin/python tools/parity_fixtures.py --check [NAME ...]    exit with 1 if the existing files differ

With these, tests/parity/test_fixtures.py compares lmtrain with transformers without installing torch. transformers
builds and saves each model, with random parameters, and computes the logits. lmtrain defines only the sizes
(tests/parity/variants.py) and their names in a config.json. A second run writes the same bytes; logits can differ in
their last bits on another processor, which --check allows.

Folders named old-* hold files in formats from before transformers 5: other names, more tensors, several files.
"""

import os
import shutil
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # read when the libraries are imported

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "tests", "parity", "fixtures")
sys.path.insert(0, os.path.join(ROOT, "tests"))

import json  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers.dynamic_module_utils  # noqa: E402
from parity.variants import LENGTH, VARIANTS, VOCAB, make, tokens  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from lmtrain.models.registry import hf_family  # noqa: E402

IDS = tokens()[:1]  # one sequence; test_variants.py tests several

Tensors = dict[str, np.ndarray]
Values = dict[str, Any]


def main() -> int:
    names = [argument for argument in sys.argv[1:] if argument != "--check"] or [*VARIANTS, *OLD]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        # transformers copies a model's code before running it
        transformers.dynamic_module_utils.HF_MODULES_CACHE = os.path.join(temporary, "modules")
        for name in names:
            made = os.path.join(temporary, name)
            os.mkdir(made)
            if name in OLD:
                OLD[name](made)
            else:
                save_variant(name, made)
        if "--check" in sys.argv[1:]:
            stale = [line for name in names for line in differences(os.path.join(temporary, name), name)]
            print("\n".join(f"{line}, run tools/parity_fixtures.py" for line in stale) or "up to date")
            return 1 if stale else 0
        for name in names:
            shutil.rmtree(os.path.join(FOLDER, name), ignore_errors=True)
            shutil.copytree(os.path.join(temporary, name), os.path.join(FOLDER, name))
    return 0


def save_variant(name: str, folder: str) -> None:
    """Save a variant with transformers, without files that a comparison does not need."""
    model = random_model(config_values(name))
    model.save_pretrained(folder)
    for unused in ("generation_config.json", "modeling_backpack.py"):
        if os.path.exists(os.path.join(folder, unused)):
            os.remove(os.path.join(folder, unused))
    save_expected(folder, model)


def config_values(name: str) -> Values:
    """The values of our config.json of a variant."""
    config = make(name).config
    values: Values = hf_family(config.type).to_hf_config(config, VOCAB, eos_id=1, bos_id=0)
    return values


def random_model(values: Mapping[str, Any]) -> Any:
    """transformers' model with random parameters, including norms and biases: initial values would hide errors."""
    with tempfile.TemporaryDirectory() as folder:
        family = hf_family("backpack" if "num_senses" in values else "gpt2")
        for name, content in getattr(family, "extra_files", dict)().items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
        write_json(folder, "config.json", values)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager")
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for module in model.modules():
            norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.from_numpy(rng.normal(size=parameter.shape).astype(np.float32))
                if norm and name == "weight":  # around 1; in gemma around 0
                    parameter.add_(0.2 * noise)
                else:
                    parameter.copy_(0.3 * noise)
    model.tie_weights()
    return model.float().eval()


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(logits).max() > 1, "logits are too close to zero to show a difference"
    return logits


def save_expected(folder: str, model: Any) -> None:
    path = os.path.join(folder, "expected.npz")
    np.savez_compressed(path, ids=IDS.astype(np.int32), logits=logits_of(model))


def tensors_of(model: Any) -> Tensors:
    """The tensors of the model's file; a tied head is stored once."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items() if name not in tied}


def write_json(folder: str, name: str, values: Any) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2) + "\n")


# Formats from before transformers 5. -------------------------------------------------------------------------------


def save_old(folder: str, model: Any, config: Values, tensors: Tensors, readable: bool = True) -> None:
    """Write config.json, one safetensors file, logits; if `readable`, transformers 5 must give the same logits."""
    write_json(folder, "config.json", config)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    save_expected(folder, model)
    if readable:
        check_readable(folder, model)


def check_readable(folder: str, model: Any) -> None:
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert (logits_of(read) == logits_of(model)).all(), f"{folder}: transformers reads a different model"


def old_gpt2() -> tuple[Any, Values, Tensors]:
    """The first GPT-2 on the hub: names without `transformer.`, causal masks among the weights."""
    model = random_model(config_values("gpt2"))
    masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, LENGTH, LENGTH), np.float32)) for layer in range(2)}
    weights = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(model).items()}
    config = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 0,
        "embd_pdrop": 0.1,
        "eos_token_id": 1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": LENGTH,
        "n_embd": 16,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": LENGTH,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": VOCAB,
    }
    return model, config, masks | weights


def save_old_gpt2(folder: str) -> None:
    save_old(folder, *old_gpt2())


def save_old_gpt2_bin(folder: str) -> None:
    """In torch's format from before 1.6, which is not a zip file."""
    model, config, tensors = old_gpt2()
    write_json(folder, "config.json", config)
    flat = torch.from_numpy(np.concatenate([tensor.reshape(-1) for tensor in tensors.values()]))
    views, begin = {}, 0
    for name, tensor in tensors.items():
        views[name] = flat[begin : begin + tensor.size].view(tensor.shape)
        begin += tensor.size
    path = os.path.join(folder, "pytorch_model.bin")
    torch.save(views, path, _use_new_zipfile_serialization=False)
    with open(path, "rb") as file:
        content = file.read()
    # the name of the storage is its memory address, which differs between runs
    place = str(flat.untyped_storage()._cdata)
    assert pickled(place) in content
    with open(path, "wb") as file:
        file.write(content.replace(pickled(place), pickled("0")))
    save_expected(folder, model)
    check_readable(folder, model)


def pickled(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def save_old_llama(folder: str) -> None:
    """As saved by transformers 4.30: `rope_scaling` with "type" (here linear), tables of frequencies in the weights."""
    model = random_model(config_values("llama-linear"))
    frequencies = 10_000.0 ** (-np.arange(0, 4, 2, dtype=np.float32) / 4)
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": frequencies for layer in range(2)}
    config = llama_values(model) | {
        "_name_or_path": "acme/old-llama",
        "pretraining_tp": 1,
        "rms_norm_eps": model.config.rms_norm_eps,
        "rope_scaling": {"factor": 3.0, "type": "linear"},
        "transformers_version": "4.30.2",
    }
    save_old(folder, model, config, tables | tensors_of(model))


def save_old_llama3(folder: str) -> None:
    """As saved by transformers 4.43 for Llama 3.1: top-level `rope_theta` and `rope_scaling`; weights in 3 files."""
    model = random_model(config_values("llama-llama3"))
    rope = model.config.rope_parameters
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_type")
    config = llama_values(model) | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": [1, 2],
        "mlp_bias": False,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "rope_scaling": {name: rope[name] for name in names},
        "rope_theta": rope["rope_theta"],
        "transformers_version": "4.43.0.dev0",
    }
    write_json(folder, "config.json", config)
    tensors = tensors_of(model)
    where = {name: f"model-{1 + 3 * i // len(tensors):05d}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in dict.fromkeys(where.values()):
        held = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(held, os.path.join(folder, file), metadata={"format": "pt"})
    total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    write_json(folder, "model.safetensors.index.json", {"metadata": total, "weight_map": where})
    save_expected(folder, model)
    check_readable(folder, model)


def llama_values(model: Any) -> Values:
    """The values that all versions of transformers 4 write for a llama."""
    kept = ("bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range", "intermediate_size")
    kept += ("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size")
    values = {name: getattr(model.config, name) for name in kept}
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "use_cache": True}
    return values | fixed | {"tie_word_embeddings": False}


def save_old_mpt(folder: str) -> None:
    """As saved by llm-foundry: transformers refuses its `attn_pdrop` of 0.0, and ignores its `norm_eps`."""
    model = random_model(config_values("mpt-clip"))
    config = {
        "_name_or_path": "acme/old-mpt",
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0.0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": 0.5,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "auto_map": {
            "AutoConfig": "configuration_mpt.MPTConfig",
            "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
        },
        "d_model": 16,
        "emb_pdrop": 0.0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_config": {
            "emb_init_std": None,
            "emb_init_uniform_lim": None,
            "fan_mode": "fan_in",
            "init_div_is_residual": True,
            "init_gain": 0.0,
            "init_nonlinearity": "relu",
            "init_std": None,
            "name": "kaiming_normal_",
            "verbose": 0,
        },
        "init_device": "cpu",
        "learned_pos_emb": True,  # although with ALiBi there are none
        "logit_scale": None,
        "max_seq_len": LENGTH,
        "model_type": "mpt",
        "n_heads": 4,
        "n_layers": 2,
        "no_bias": True,
        "norm_eps": model.config.layer_norm_epsilon,
        "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0.0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1",
        "use_cache": False,
        "verbose": 0,
        "vocab_size": VOCAB,
    }
    save_old(folder, model, config, tensors_of(model), readable=False)


def save_old_backpack(folder: str) -> None:
    """As published: model_type gpt2, without default values, and with duplicate names of the embeddings."""
    model = random_model(config_values("backpack-n_inner") | {"scale_attn_by_inverse_layer_idx": True})
    weights, trunk = tensors_of(model), "backpack.gpt2_model."
    second = {
        "backpack.position_embeddings.weight": weights[trunk + "wpe.weight"],
        "backpack.word_embeddings.weight": weights[trunk + "wte.weight"],
        "lm_head.weight": weights[trunk + "wte.weight"],
    }
    kept = ("activation_function", "attn_pdrop", "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range")
    kept += ("layer_norm_epsilon", "n_embd", "n_head", "n_inner", "n_layer", "n_positions", "num_senses")
    kept += ("resid_pdrop", "sense_intermediate_scale", "vocab_size")
    config = {name: getattr(model.config, name) for name in kept} | {
        "architectures": ["BackpackGPT2LMHeadModel"],
        "auto_map": {
            "AutoConfig": "configuration_backpack_gpt2.BackpackGPT2Config",
            "AutoModelForCausalLM": "modeling_backpack_gpt2.BackpackGPT2LMHeadModel",
        },
        "model_type": "gpt2",
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": True,
        "torch_dtype": "float32",
        "transformers_version": "4.25.1",
    }
    save_old(folder, model, config, weights | second, readable=False)


OLD: dict[str, Callable[[str], None]] = {
    "old-gpt2": save_old_gpt2,
    "old-gpt2-bin": save_old_gpt2_bin,
    "old-llama": save_old_llama,
    "old-llama3-sharded": save_old_llama3,
    "old-mpt": save_old_mpt,
    "old-backpack": save_old_backpack,
}


# ---------------------------------------------------------------------------------------------------------------------


def differences(made: str, name: str) -> list[str]:
    """Files of a fixture that differ from the newly written ones."""
    kept = os.path.join(FOLDER, name)
    names = set(os.listdir(made)) | set(os.listdir(kept) if os.path.isdir(kept) else ())
    return [f"{name}/{file}: differs" for file in sorted(names) if not same(made, kept, file)]


def same(made: str, kept: str, file: str) -> bool:
    paths = [os.path.join(folder, file) for folder in (made, kept)]
    if not all(map(os.path.exists, paths)):
        return False
    if file == "expected.npz":
        one, other = (np.load(path) for path in paths)
        return bool((one["ids"] == other["ids"]).all()) and np.allclose(one["logits"], other["logits"], atol=1e-5)
    contents = []
    for path in paths:
        with open(path, "rb") as opened:
            contents.append(opened.read())
    return contents[0] == contents[1]


if __name__ == "__main__":
    sys.exit(main())
