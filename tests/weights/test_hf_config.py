"""Models from Hugging Face in a run: invalid configs are reported, and a resumed run does not need its base model."""

import json
import shutil

import pytest
from conftest import TOKENIZER

from lmtrain.config.load import LoadedConfig
from lmtrain.data.config import DataConfig
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.weights.hf_config import check_tokens, config_of, hf_settings, resolve_hf

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2", "n_embd": 0, "n_inner": 64}, ""),
        ({"model_type": "gpt2", "activation_function": "tanh"}, r".*model\.activation_function: "),
        ({**LLAMA, "rope_scaling": "linear"}, ""),
        ({"model_type": "mpt", "attn_config": 3}, ""),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, ".*quantization_config"),
        ({**LLAMA, "num_hidden_layers": 1e300, "layer_types": []}, ".*num_hidden_layers"),
    ],
)
def test_an_invalid_value_is_reported_with_the_model(tmp_path, values, words):
    """Before a list of an implausible number of layers is made."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"^{tmp_path}: {words}"):
        config_of(str(tmp_path))


def with_vocab(folder, change):
    """The tests' tokenizer with a changed vocabulary."""
    shutil.copytree(TOKENIZER, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = change(content["model"]["vocab"])
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def reversed_ids(vocab):
    return dict(zip(vocab, reversed(vocab.values()), strict=True))


@pytest.mark.parametrize("given", ["same", "more", "passthrough", "no tokenizer there"])
def test_a_tokenizer_with_the_same_ids_is_accepted(tmp_path, given):
    base = with_vocab(tmp_path / "base", dict)
    more = with_vocab(tmp_path / "more", lambda vocab: vocab | {"<|user|>": max(vocab.values()) + 50})
    if given == "no tokenizer there":
        (tmp_path / "empty").mkdir()
        check_tokens(str(tmp_path / "empty"), DataConfig(tokenizer=more))
    elif given == "passthrough":
        check_tokens(base, DataConfig(tokenizer="passthrough", vocab_size=100))
    else:
        check_tokens(base, DataConfig(tokenizer={"same": base, "more": more}[given]))


def test_another_tokenizer_is_refused_before_any_text_is_tokenized_unless_allowed(
    tmp_path, settings, write_config, run_cli
):
    """Of the same size: the model's embeddings would be used for other tokens."""
    other = with_vocab(tmp_path / "other", reversed_ids)
    base = with_vocab(tmp_path / "base", dict)
    (tmp_path / "base" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 400}))
    settings["data"]["tokenizer"] = other
    settings["model"] = {"type": "llama", "seq_len": 32}
    path = write_config(settings | {"initialize_from_hf": base, "use_hf_model_config": True})
    refused = run_cli("preprocess", path, code=2)
    assert f"data.tokenizer: {other} " in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "cache").exists()
    run_cli("preprocess", path, "--allow_other_tokenizer", "true", code=0)


SIZES = {"type": "llama", "hidden_dim": 96, "intermediate_dim": 48, "num_heads": 4, "num_layers": 1, "seq_len": 32}


@pytest.fixture
def resolved_run(tmp_path, monkeypatch):
    """`resolved_run(saved, settings)`: the config of a run with a checkpoint of the settings `saved`, as it resumes."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "one" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()

    def resolve(saved, settings) -> RunConfig:
        values = resolved(RunConfig.model_validate(saved))
        (checkpoint / "run.json").write_text(json.dumps({"config": values}))
        written = LoadedConfig(RunConfig.model_validate(settings), path="one.yaml")
        return resolve_hf(Run(written, "one"), check_tokenizer=False).config

    return resolve


def test_a_run_has_the_sizes_of_its_checkpoint_unless_it_starts_from_another_model(tmp_path, resolved_run):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 64}))
    settings = {"use_hf_model_config": True, "initialize_from_hf": "base", "data": {"tokenizer": "byte"}}
    for started_from, expected in (("base", 96), ("other", 64)):
        saved = settings | {"initialize_from_hf": started_from, "model": SIZES}
        assert resolved_run(saved, settings | {"model": {"seq_len": 32}}).model.hidden_dim == expected


def test_a_run_is_recognised_by_its_base_without_the_secrets_of_its_url(resolved_run):
    base = "https://me:word@host/model?version=1&sig={}"
    saved = {"initialize_from_hf": base.format(1), "data": {"tokenizer": base.format(1)}, "model": SIZES}
    config = resolved_run(saved, {"use_hf_model_config": True, "initialize_from_hf": base.format(2)})
    assert (config.model.hidden_dim, config.data.tokenizer) == (96, base.format(2))
    with pytest.raises(UserError, match=r"data\.tokenizer: .*https://\*\*\*@host/t"):
        resolved_run(saved | {"data": {"tokenizer": "https://me:word@host/t"}}, {"initialize_from_hf": base.format(2)})


@pytest.mark.long
@pytest.mark.end_to_end
def test_a_resumed_run_does_not_need_its_base_model(tmp_path, settings, write_config, run_cli):
    settings["trainer"] |= {"num_train_steps": 1, "steps_per_eval": 100}
    settings["optimizer"]["warmup"] = 0
    settings["data"]["validation_urls"] = None
    settings["model"] |= {"num_layers": 1, "use_bias": False}
    config = str(write_config(settings))
    run_cli("train", config, "--trainer.id", "first", "--hf_save_path", "exports", code=0)
    shutil.move(tmp_path / "exports" / "first" / "step-1", tmp_path / "base")
    # it also works without biases: the format has them, and they are zero
    begin = ["--initialize_from_hf", "base", "--data.tokenizer", str(TOKENIZER), "--trainer.id", "second"]
    run_cli("train", config, *begin, code=0)
    own = ["--initialize_from_hf", "base", "--use_hf_model_config", "true", "--trainer.id", "third"]
    settings["model"] = {"seq_len": 32}
    bare = str(write_config(settings, "bare.yaml"))
    run_cli("train", bare, *own, code=0)
    shutil.rmtree(tmp_path / "base")
    assert "nothing to do" in run_cli("train", config, *begin, code=0).stderr
    assert "2/2" in run_cli("train", bare, *own, "--trainer.num_train_steps", "2", code=0).stderr
    assert "base" in run_cli("train", config, *begin, "--trainer.id", "fourth", code=2).stderr


YARN = {"type": "yarn", "factor": 16.0, "original_seq_len": 8192}
PASSTHROUGH = {"tokenizer": "passthrough", "vocab_size": 384, "enforce_eos": False}


def resolved_model(settings):
    """The model section of a run with these settings that starts from a Hugging Face model."""
    config = RunConfig.model_validate({"use_hf_model_config": True, "data": PASSTHROUGH} | settings)
    return resolve_hf(Run(LoadedConfig(config, path="one.yaml"), "one")).config.model


@pytest.mark.parametrize(
    ("given", "expected", "takes_sizes"),
    [
        (YARN, YARN | {"theta": 5e5}, True),
        (YARN, YARN | {"theta": 5e5}, False),
        (YARN | {"type": "llama3", "theta": 1e6}, YARN | {"type": "llama3", "theta": 1e6}, False),
        ({"theta": 8e6}, {"type": "linear", "theta": 8e6, "factor": 2.0}, True),
    ],
)
def test_a_longer_context_is_the_base_with_another_rope(tmp_path, given, expected, takes_sizes):
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 5e5, "vocab_size": 384, **scaling}))
    sizes = {} if takes_sizes else hf_settings(str(tmp_path)) | {"rope": {}}
    model = {**sizes, "type": "llama", "seq_len": 131072, "rope": given if takes_sizes else expected}
    settings = {"initialize_from_hf": str(tmp_path), "use_hf_model_config": takes_sizes}
    assert resolved_model(settings | {"model": model}).rope.model_dump(exclude_defaults=True) == expected
    # its base frequency is the model's, or given
    change = {"num_kv_heads": 2} if takes_sizes else {"rope": {"type": "yarn", "factor": 4.0, "original_seq_len": 64}}
    named = r"model\.num_kv_heads: " if takes_sizes else r"model\.rope: .*10000\.0.*500000\.0"
    with pytest.raises(UserError, match=named):
        resolved_model(settings | {"model": model | change})


@pytest.mark.parametrize(("kind", "bases"), [("gemma3_text", (1e6, 1e4)), ("olmo3", (5e5, 5e5))])
@pytest.mark.parametrize("takes_sizes", [True, False])
def test_a_longer_context_keeps_the_rope_of_sliding_layers(tmp_path, kind, bases, takes_sizes):
    base = {**LLAMA, "model_type": kind, "num_hidden_layers": 8, "rope_theta": bases[0], "vocab_size": 384}
    (tmp_path / "config.json").write_text(json.dumps(base))
    yarn = {"type": "yarn", "factor": 4.0, "original_seq_len": 64}
    sizes = {} if takes_sizes else hf_settings(str(tmp_path))
    model = {**sizes, "type": "llama", "rope": yarn if takes_sizes else yarn | {"theta": bases[0]}}
    settings = {"model": model, "initialize_from_hf": str(tmp_path), "use_hf_model_config": takes_sizes}
    if takes_sizes:
        rope = resolved_model(settings).rope
        assert (rope.type, rope.theta, rope.local_theta) == ("yarn", *bases)
    elif kind == "olmo3":  # as written: equal bases are one RoPE, which the config scales
        assert resolved_model(settings).rope.local_theta is None
    else:
        with pytest.raises(UserError, match=r"model\.rope: .*local_theta"):
            resolved_model(settings)


def test_a_rope_for_a_base_without_one_is_a_difference(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1}))
    model = {"type": "llama", "hidden_dim": 32, "num_heads": 4, "num_layers": 1, "rope": YARN}
    settings = {"model": model, "initialize_from_hf": str(tmp_path), "use_hf_model_config": False}
    with pytest.raises(UserError, match="model"):
        resolved_model(settings)


MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4}


def with_moe(folder, values, moe):
    """The config of a run that starts from a model with these values, and has these settings of experts."""
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 384}))
    return resolved_model({"model": {"type": "llama", "moe": moe}, "initialize_from_hf": str(folder)})


@pytest.mark.parametrize(
    ("values", "moe", "message"),
    [
        (LLAMA, {"aux_loss": 0.1}, r"model\.moe: "),
        (MIXTRAL, {"num_experts": 4}, r"model\.moe\.num_experts: "),
        (MIXTRAL, {"bias_update_rate": 0.01}, r"model\.moe\.bias_update_rate: "),
    ],
)
def test_settings_of_experts_that_the_model_does_not_have_are_refused(tmp_path, values, moe, message):
    with pytest.raises(UserError, match=message):
        with_moe(tmp_path, values, moe)


@pytest.mark.parametrize(("values", "aux_loss"), [({"router_aux_loss_coef": 0.02}, 0.04), ({}, 0.002)])
def test_routers_have_the_losses_of_their_config_json(tmp_path, values, aux_loss):
    """Without a coefficient that of transformers; no type has a z-loss."""
    moe = with_moe(tmp_path, MIXTRAL | values, {}).moe
    assert (moe.aux_loss, moe.z_loss) == (pytest.approx(aux_loss), 0.0)
