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
        ({"model_type": "gpt2", "n_embd": 32, "n_inner": "x"}, ""),
        ({"model_type": "gpt2", "activation_function": "tanh"}, r".* gives model\.activation_function: "),
        ({**LLAMA, "rope_scaling": "linear"}, ""),
        ({**LLAMA, "rope_parameters": 3}, ""),
        ({**LLAMA, "rope_theta": "abc"}, ""),
        ({"model_type": "mpt", "attn_config": 3}, ""),
        ({**LLAMA, "num_hidden_layers": None}, ""),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "quantized weights .quantization_config"),
    ],
)
def test_an_invalid_value_is_reported_with_the_model(tmp_path, values, words):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"^{tmp_path}: {words}"):
        config_of(str(tmp_path))


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(UserError, match=r"is a folder.* remove @main"):
        hf_settings(f"{tmp_path}@main")


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


def test_a_tokenizer_of_the_same_size_with_other_tokens_is_refused(tmp_path):
    """The model's embeddings would be used for other tokens."""
    base = with_vocab(tmp_path / "base", dict)
    other = with_vocab(tmp_path / "other", reversed_ids)
    with pytest.raises(UserError, match=rf"^data\.tokenizer: {other} .* allow_other_tokenizer: true$"):
        check_tokens(base, DataConfig(tokenizer=other))


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
    other = with_vocab(tmp_path / "other", reversed_ids)
    base = with_vocab(tmp_path / "base", dict)
    (tmp_path / "base" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 400}))
    settings["data"]["tokenizer"] = other
    settings["model"] = {"type": "llama", "seq_len": 32}
    path = write_config(settings | {"initialize_from_hf": base, "use_hf_model_config": True})
    refused = run_cli("preprocess", path, code=2)
    assert "allow_other_tokenizer" in refused.stderr.splitlines()[-1]
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
    assert config.model.hidden_dim == 96
    assert config.data.tokenizer == base.format(2)


def test_a_saved_tokenizer_whose_secret_is_unknown_is_named(resolved_run):
    saved = {"initialize_from_hf": "base", "data": {"tokenizer": "https://me:word@host/t"}}
    with pytest.raises(UserError, match=r"data\.tokenizer: .* has https://\*\*\*@host/t, with its secrets masked"):
        resolved_run(saved, {"initialize_from_hf": "base"})


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"type": "yarn", "factor": 16.0, "original_seq_len": 8192},
            {"type": "yarn", "theta": 5e5, "factor": 16.0, "original_seq_len": 8192},
        ),
        (
            {"type": "llama3", "factor": 32.0, "original_seq_len": 8192, "theta": 1e6},
            {"type": "llama3", "theta": 1e6, "factor": 32.0, "original_seq_len": 8192},
        ),
        ({"theta": 8e6}, {"type": "linear", "theta": 8e6, "factor": 2.0}),
    ],
)
@pytest.mark.parametrize("takes_sizes", [True, False])
def test_a_longer_context_is_the_base_with_another_rope(tmp_path, given, expected, takes_sizes):
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 5e5, "vocab_size": 384, **scaling}))
    sizes = {} if takes_sizes else hf_settings(str(tmp_path)) | {"rope": {}}
    settings = {
        "model": {**sizes, "type": "llama", "seq_len": 131072, "rope": given if takes_sizes else expected},
        "initialize_from_hf": str(tmp_path),
        "use_hf_model_config": takes_sizes,
        "data": {"tokenizer": "passthrough", "vocab_size": 384, "enforce_eos": False},
    }
    config = RunConfig.model_validate(settings)
    rope = resolve_hf(Run(LoadedConfig(config, path="long.yaml"), "long")).config.model.rope
    assert rope.model_dump(exclude_defaults=True) == expected
    if not takes_sizes:  # its base frequency is the model's, or given
        settings["model"]["rope"] = {"type": "yarn", "factor": 4.0, "original_seq_len": 64}
        with pytest.raises(UserError, match=r"model.rope: this config has .*10000.0.*, the model has .*500000.0"):
            resolve_hf(Run(LoadedConfig(RunConfig.model_validate(settings), path="long.yaml"), "long"))
    if takes_sizes:
        settings["model"]["num_kv_heads"] = 2
        with pytest.raises(UserError, match=r"model.num_kv_heads: defined by .* use_hf_model_config"):
            resolve_hf(Run(LoadedConfig(RunConfig.model_validate(settings), path="long.yaml"), "long"))


@pytest.mark.parametrize(("kind", "bases"), [("gemma3_text", (1e6, 1e4)), ("olmo3", (5e5, 5e5))])
@pytest.mark.parametrize("takes_sizes", [True, False])
def test_a_longer_context_keeps_the_rope_of_sliding_layers(tmp_path, kind, bases, takes_sizes):
    base = {**LLAMA, "model_type": kind, "num_hidden_layers": 8, "rope_theta": bases[0], "vocab_size": 384}
    (tmp_path / "config.json").write_text(json.dumps(base))
    yarn = {"type": "yarn", "factor": 4.0, "original_seq_len": 64}
    sizes = {} if takes_sizes else hf_settings(str(tmp_path))
    settings = {
        "model": {**sizes, "type": "llama", "rope": yarn if takes_sizes else yarn | {"theta": bases[0]}},
        "initialize_from_hf": str(tmp_path),
        "use_hf_model_config": takes_sizes,
        "data": {"tokenizer": "passthrough", "vocab_size": 384, "enforce_eos": False},
    }

    def resolved():
        run = Run(LoadedConfig(RunConfig.model_validate(settings), path="long.yaml"), "long")
        return resolve_hf(run).config.model.rope

    if takes_sizes:
        assert (resolved().type, resolved().theta, resolved().local_theta) == ("yarn", *bases)
    elif kind == "olmo3":  # as written: equal bases are one RoPE, which the config scales
        assert resolved().local_theta is None
    else:
        with pytest.raises(UserError, match=r"model.rope: this config has .*the model has .*local_theta"):
            resolved()


def test_a_rope_for_a_base_without_one_is_a_difference(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1}))
    rope = {"type": "yarn", "factor": 4.0, "original_seq_len": 64}
    settings = {
        "model": {"type": "llama", "hidden_dim": 32, "num_heads": 4, "num_layers": 1, "rope": rope},
        "initialize_from_hf": str(tmp_path),
        "data": {"tokenizer": "passthrough", "vocab_size": 384, "enforce_eos": False},
    }
    with pytest.raises(UserError, match="does not match this config's model section"):
        resolve_hf(Run(LoadedConfig(RunConfig.model_validate(settings), path="long.yaml"), "long"))


MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4}


def with_moe(folder, values, moe):
    """The config of a run that starts from a model with these values, and has these settings of experts."""
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 384}))
    settings = {
        "model": {"type": "llama", "moe": moe},
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "data": {"tokenizer": "passthrough", "vocab_size": 384, "enforce_eos": False},
    }
    return resolve_hf(Run(LoadedConfig(RunConfig.model_validate(settings), path="moe.yaml"), "moe")).config.model


@pytest.mark.parametrize(
    ("values", "moe", "message"),
    [
        (LLAMA, {"aux_loss": 0.1}, r"model.moe: .* has no experts"),
        (MIXTRAL, {"num_experts": 4}, r"model.moe.num_experts: defined by .* use_hf_model_config"),
        (MIXTRAL, {"bias_update_rate": 0.01}, r"model.moe.bias_update_rate: .* has no bias on the selection"),
    ],
)
def test_settings_of_experts_that_the_model_does_not_have_are_refused(tmp_path, values, moe, message):
    with pytest.raises(UserError, match=message):
        with_moe(tmp_path, values, moe)


def test_losses_of_the_routers_may_be_set(tmp_path):
    moe = with_moe(tmp_path, MIXTRAL, {"aux_loss": 0.5, "dropout": 0.1}).moe
    assert (moe.num_experts, moe.aux_loss, moe.z_loss, moe.dropout) == (4, 0.5, 0.0, 0.1)


@pytest.mark.parametrize(("values", "aux_loss"), [({"router_aux_loss_coef": 0.02}, 0.04), ({}, 0.002)])
def test_routers_have_the_losses_of_their_config_json(tmp_path, values, aux_loss):
    """Without a coefficient that of transformers; no type has a z-loss."""
    moe = with_moe(tmp_path, MIXTRAL | values, {}).moe
    assert (moe.aux_loss, moe.z_loss) == (pytest.approx(aux_loss), 0.0)


@pytest.mark.parametrize("layers", [10**9, 1e300])
def test_an_implausible_number_of_layers_is_refused_before_a_list_of_them_is_made(tmp_path, layers):
    values = {"model_type": "llama", "num_hidden_layers": layers, "layer_types": [], "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="num_hidden_layers: expected at most 10,000"):
        hf_settings(str(tmp_path))
