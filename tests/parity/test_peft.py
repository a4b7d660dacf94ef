"""Adapters in PEFT's format: PEFT computes the logits of this model with them, and this model with those of PEFT."""

import warnings

import numpy as np
import pytest
import torch
from conftest import TOKENIZER
from lora.exported import FAMILIES, Exported, config_of, load_adapter
from parity.variants import VARIANTS as MODELS
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.lora.model import ADAPTERS, BASE
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # used by PEFT
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # Backpack has layers of both kinds
]

TABLES = ["embed_tokens", "lm_head"]
ARCEE, GEMMA2, MIXTURE, NEXT = (MODELS[name][2] for name in ("arcee", "gemma2", "qwen3_moe-mixed", "qwen3_next"))
# model settings and `lora` sections
VARIANTS = {
    "gpt2 with trained tied tables": ("gpt2", {}, {"modules_to_save": TABLES}),
    "llama with trained tables": ("llama", {}, {"modules_to_save": TABLES, "target_modules": ["q_proj", "v_proj"]}),
    "llama with trained tied tables": ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
    "llama with rslora": ("llama", {}, {"use_rslora": True, "target_modules": "all-linear"}),
    "gemma2": ("llama", GEMMA2, {}),
    "attention of a mixture": ("llama", MIXTURE, {}),
    "joined layers by key heads": ("llama", NEXT, {}),
    "joined layers": ("llama", MODELS["qwen3_5"][2], {"target_modules": ["in_proj_qkv", "o_proj", "out_proj"]}),
    "latent attention": ("llama", MODELS["deepseek_v3"][2] | {"num_kv_heads": None}, {}),
    "arcee with a pattern of targets": ("llama", ARCEE, {"target_modules": ["up_proj", "k_proj"]}),
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """transformers copies the code of a folder, here of Backpack, to a folder of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def torch_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def agree(ours, theirs):
    print(f"difference {np.abs(ours - theirs).max():.2g} of logits with a spread of {np.std(theirs):.2g}")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


SUITE = ("gpt2", "llama with trained tied tables", "llama with rslora")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SUITE else pytest.mark.long) for case in (*FAMILIES, *VARIANTS)]
)
def test_peft_and_merged_weights_give_the_logits_of_the_adapters(tmp_path, modules, case):
    family, model, lora = VARIANTS.get(case, (case, {}, {}))
    exported = Exported(tmp_path, family, model, lora)
    ours = exported.logits()
    base = torch_model(tmp_path / "base")
    without = torch_logits(base, exported.tokens())
    assert np.abs(ours - without).max() > 0.1
    agree(ours, torch_logits(torch_model(tmp_path / "merged"), exported.tokens()))
    agree(ours, torch_logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), exported.tokens()))


def test_an_adapter_that_peft_has_initialized_and_saved_gives_its_logits(tmp_path):
    exported = Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj", "down_proj"]})
    settings = PeftConfig(r=4, lora_alpha=24, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(torch_model(tmp_path / "base"), settings)
    torch.manual_seed(0)
    for name, values in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    program = build_program(exported.reading("theirs"), exported.model.vocab_size)
    params = {BASE: exported.params[BASE], ADAPTERS: load_adapter(program, str(tmp_path / "theirs"))}
    agree(exported.logits(params), torch_logits(theirs.eval(), exported.tokens()))


def test_tables_that_peft_has_resized_are_read(tmp_path):
    """PEFT then writes each table three times."""
    tables = {"modules_to_save": TABLES, "target_modules": ["q_proj"]}
    exported = Exported(tmp_path, "llama", {}, tables)
    model = torch_model(tmp_path / "base")
    rows = exported.model.vocab_size + 2
    model.resize_token_embeddings(rows, mean_resizing=False)
    settings = PeftConfig(r=4, lora_alpha=24, **tables, task_type="CAUSAL_LM")
    theirs = get_peft_model(model, settings)
    with torch.no_grad():
        for name, values in theirs.named_parameters():
            if "modules_to_save" in name:
                values.mul_(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of saving resized embeddings, which is intended
        theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    names = load_file(tmp_path / "theirs/adapter_model.safetensors")
    assert any("original_module" in name for name in names)
    config = config_of("llama", {}, {**tables, "initialize_from": str(tmp_path / "theirs")})
    read = load_adapter(build_program(config, rows), str(tmp_path / "theirs"))
    np.testing.assert_array_equal(read["unembed"]["embedding"][:rows], names["base_model.model.lm_head.weight"])
    with pytest.raises(UserError, match=r"386 .* 390 .*data.tokenizer"):
        load_adapter(build_program(config, rows + 4), str(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "input_layernorm.weight"),
    ],
)
def test_layers_that_cannot_be_trained_here_are_refused_by_name(tmp_path, settings, message):
    Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"]})
    theirs = get_peft_model(
        torch_model(tmp_path / "base"), PeftConfig(r=4, lora_alpha=24, task_type="CAUSAL_LM", **settings)
    )
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    config = config_of("llama", {}, {"target_modules": ["q_proj"], "initialize_from": str(tmp_path / "theirs")})
    program = build_program(config, load_tokenizer(str(TOKENIZER)).vocab_size)
    with pytest.raises(UserError, match=message):
        load_adapter(program, str(tmp_path / "theirs"))


def test_new_adapters_are_distributed_as_those_of_peft(tmp_path):
    exported = Exported(tmp_path, "llama", {"hidden_dim": 64}, {"r": 64, "target_modules": ["q_proj"]})
    state = build_program(exported.config, exported.model.vocab_size).init({BASE: exported.params[BASE]})
    ours = np.asarray(state.params["blocks"]["attn"]["q"]["lora_a"])
    assert not np.asarray(state.params["blocks"]["attn"]["q"]["lora_b"]).any()
    settings = PeftConfig(r=64, target_modules=["q_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    theirs = get_peft_model(torch_model(tmp_path / "base"), settings).state_dict()
    theirs = theirs["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].numpy()
    assert ours.std() == pytest.approx(theirs.std(), rel=0.05)
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=0.01)
