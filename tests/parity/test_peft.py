"""Adapters in PEFT's format: PEFT computes the logits of this model with them, and this model with those of PEFT."""

import json
import warnings

import jax
import numpy as np
import pytest
import torch
from conftest import TOKENIZER
from flax.linen import meta
from models import quick
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from lmtrain.config.errors import UserError
from lmtrain.hf.export import write_export
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.lora.model import ADAPTERS, BASE, adapt
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.program.program import plan_program
from lmtrain.train.start.exporter import plan_export
from lmtrain.train.start.hf_params import gather_tensors
from lmtrain.train.start.peft_params import gather_merged, load_peft_adapter, plan_adapter_export

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # used by PEFT
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # Backpack has layers of both kinds
]

LENGTH = 16
SIZES = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH, "gradient_checkpointing": False}
FAMILIES = {
    "gpt2": {},
    "llama": {"num_kv_heads": 2, "intermediate_dim": 24},
    "mpt": {},
    "backpack": {"num_senses": 4},
}
TABLES = ["embed_tokens", "lm_head"]
# model settings and `lora` sections
VARIANTS = {
    "gpt2 with trained tied tables": ("gpt2", {}, {"modules_to_save": TABLES}),
    "gpt2 without the projections of attention": ("gpt2", {}, {"target_modules": r".*\.mlp\..*"}),
    "llama with trained tables": ("llama", {}, {"modules_to_save": TABLES, "target_modules": ["q_proj", "v_proj"]}),
    "llama with trained tied tables": ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
    "llama with rslora": ("llama", {}, {"use_rslora": True, "target_modules": "all-linear"}),
    "llama, not scanned": ("llama", {"scan_layers": False}, {}),
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """transformers copies the code of a folder, here of Backpack, to a folder of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def config_of(family, model, lora, ref="base"):
    settings = {"type": family, **SIZES, **FAMILIES[family], **model}
    return RunConfig.model_validate(
        {"model": settings, "initialize_from_hf": ref, "lora": {"r": 4, "alpha": 24, **lora}}
    )


def random_adapters(model):
    """Adapters in which both matrices are random, and random tables."""
    leaves, tree = jax.tree.flatten(meta.unbox(abstract_params(model)[ADAPTERS]))
    rng = np.random.default_rng(3)
    return jax.tree.unflatten(tree, [rng.normal(0, 0.2, leaf.shape).astype(np.float32) for leaf in leaves])


class Exported:
    """A random base with random adapters, exported to `base`, `adapter` and `merged` in a folder."""

    def __init__(self, folder, family, model, lora):
        self.folder = folder
        self.config = config_of(family, model, lora, str(folder / "base"))
        self.tokenizer, self.layout = load_tokenizer(str(TOKENIZER)), plan_layout(PartitioningConfig())
        inner = build_model(self.config.model, self.tokenizer.vocab_size)
        self.model = adapt(self.config.lora, self.config.model, inner)
        self.params = {BASE: quick.random_params(inner, seed=7), ADAPTERS: random_adapters(self.model)}
        base = plan_export(self.config.model, inner, self.tokenizer, "float32")
        size = inner.vocab_size
        write_export(str(folder / "base"), base, gather_tensors(self.params[BASE], base.pieces, self.layout, size))
        merged = gather_merged(self.params, self.model, base.pieces, self.layout)
        write_export(str(folder / "merged"), base, merged)
        plan = plan_adapter_export(
            self.config, self.model, self.tokenizer, "float32", None, self.config.initialize_from_hf
        )
        values = gather_tensors(self.params[ADAPTERS], plan.pieces, self.layout, size)
        write_export(str(folder / "adapter"), plan, values)

    def reading(self, folder):
        """The config of a run that starts from the adapters in a folder."""
        lora = self.config.lora.model_copy(update={"initialize_from": str(self.folder / folder)})
        return self.config.model_copy(update={"lora": lora})

    def tokens(self):
        return np.random.default_rng(0).integers(0, self.model.vocab_size, (2, LENGTH))

    def logits(self, params=None):
        logits = jax.jit(self.model.apply)({"params": params or self.params}, self.tokens())
        return np.asarray(logits)[..., : self.model.vocab_size]


def torch_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def agree(ours, theirs):
    print(f"difference {np.abs(ours - theirs).max():.2g} of logits with a spread of {np.std(theirs):.2g}")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


SUITE = ("gpt2", "llama", "llama with trained tied tables", "llama with rslora")


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


@pytest.mark.parametrize("case", ["gpt2", "llama", "gpt2 with trained tied tables", "llama with trained tables"])
def test_an_exported_adapter_is_read_back_bit_for_bit(tmp_path, modules, case):
    family, model, lora = VARIANTS.get(case, (case, {}, {}))
    exported = Exported(tmp_path, family, model, lora)
    program = plan_program(exported.reading("adapter"), exported.model.vocab_size)
    read = load_peft_adapter(program, str(tmp_path / "adapter"))
    size = exported.model.vocab_size
    leaves = jax.tree_util.tree_leaves_with_path(exported.params[ADAPTERS])
    for (path, ours), theirs in zip(leaves, jax.tree.leaves(read), strict=True):
        rows = slice(size) if "embedding" in str(path) else slice(None)
        np.testing.assert_array_equal(ours[rows], theirs[rows])


def test_an_adapter_that_peft_has_initialized_and_saved_gives_its_logits(tmp_path):
    exported = Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj", "down_proj"]})
    settings = PeftConfig(r=4, lora_alpha=24, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(torch_model(tmp_path / "base"), settings)
    torch.manual_seed(0)
    for name, values in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    program = plan_program(exported.reading("theirs"), exported.model.vocab_size)
    params = {BASE: exported.params[BASE], ADAPTERS: load_peft_adapter(program, str(tmp_path / "theirs"))}
    agree(exported.logits(params), torch_logits(theirs.eval(), exported.tokens()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "not supported: use_dora: True"),
        ({"rank_pattern": {"q_proj": 2}}, "not supported: rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "not supported: alpha_pattern"),
        ({"layers_to_transform": [0]}, "not supported: layers_to_transform"),
        ({"target_parameters": ["x"]}, "not supported: target_parameters"),
        ({"trainable_token_indices": [1]}, "not supported: trainable_token_indices"),
        ({"lora_bias": True}, "not supported: lora_bias"),
        ({"bias": "all"}, "not supported: bias: all"),
        ({"init_lora_weights": "pissa"}, "not supported: init_lora_weights: pissa"),
        ({"init_lora_weights": "olora"}, "not supported: init_lora_weights: olora"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"r": 8}, "lora.r: this config has 4, the adapter has 8"),
        ({"lora_alpha": 8}, "lora.alpha: this config has 24.0, the adapter has 8"),
        ({"use_rslora": True}, "lora.use_rslora: this config has False, the adapter has True"),
    ],
)
def test_an_adapter_that_cannot_be_represented_is_refused_by_name(tmp_path, changes, message):
    exported = Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"]})
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    program = plan_program(exported.reading("adapter"), exported.model.vocab_size)
    with pytest.raises(UserError, match=message):
        load_peft_adapter(program, str(tmp_path / "adapter"))


def test_an_adapter_with_other_layers_is_refused_by_name(tmp_path):
    Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"]})
    adapter = str(tmp_path / "adapter")
    config = config_of("llama", {}, {"target_modules": ["q_proj", "o_proj"], "initialize_from": adapter})
    program = plan_program(config, load_tokenizer(str(TOKENIZER)).vocab_size)
    with pytest.raises(UserError, match=r"(?s)missing base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"):
        load_peft_adapter(program, str(tmp_path / "adapter"))


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
    read = load_peft_adapter(plan_program(config, rows), str(tmp_path / "theirs"))
    np.testing.assert_array_equal(read["unembed"]["embedding"][:rows], names["base_model.model.lm_head.weight"])
    with pytest.raises(UserError, match=r"386 rows, but the tokenizer has 390 tokens; set data.tokenizer"):
        load_peft_adapter(plan_program(config, rows + 4), str(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "not supported: an adapter on lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "not supported: an adapter on model.embed_tokens"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
            "input_layernorm.weight is trained in full; only embeddings and head can be",
        ),
    ],
)
def test_layers_that_cannot_be_trained_here_are_refused_by_name(tmp_path, settings, message):
    Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"]})
    theirs = get_peft_model(
        torch_model(tmp_path / "base"), PeftConfig(r=4, lora_alpha=24, task_type="CAUSAL_LM", **settings)
    )
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    config = config_of("llama", {}, {"target_modules": ["q_proj"], "initialize_from": str(tmp_path / "theirs")})
    program = plan_program(config, load_tokenizer(str(TOKENIZER)).vocab_size)
    with pytest.raises(UserError, match=message):
        load_peft_adapter(program, str(tmp_path / "theirs"))


def test_new_adapters_are_distributed_as_those_of_peft(tmp_path):
    exported = Exported(tmp_path, "llama", {"hidden_dim": 64}, {"r": 64, "target_modules": ["q_proj"]})
    state = plan_program(exported.config, exported.model.vocab_size).init(exported.params[BASE])
    ours = np.asarray(state.params["blocks"]["attn"]["q"]["lora_a"])
    assert not np.asarray(state.params["blocks"]["attn"]["q"]["lora_b"]).any()
    settings = PeftConfig(r=64, target_modules=["q_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    theirs = get_peft_model(torch_model(tmp_path / "base"), settings).state_dict()
    theirs = theirs["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].numpy()
    assert ours.std() == pytest.approx(theirs.std(), rel=0.05)
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=0.01)
