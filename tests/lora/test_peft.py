"""`adapter_config.json`: written for exported adapters, and refused if it cannot be represented."""

import json

import pytest

from lmtrain.lora.config import LoraConfig
from lmtrain.lora.peft import check_adapter_config, to_adapter_config
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("base", "name", "revision"),
    [
        ("owner/name@main", "owner/name", "main"),
        ("owner/name", "owner/name", None),
        ("https://me:word@host/model?sig=b", "https://***@host/model?***", None),
        (None, None, None),
    ],
)
def test_the_base_model_is_named_without_secrets(base, name, revision):
    written = to_adapter_config(LoraConfig(), [], [], [], base)
    assert (written["base_model_name_or_path"], written["revision"]) == (name, revision)


THEIRS = {"peft_type": "LORA", "r": 4, "lora_alpha": 24, "bias": "none", "init_lora_weights": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora: True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias: all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"r": 8}, "lora.r: .* 4.* 8"),
        ({"lora_alpha": 8}, "lora.alpha: .* 24.0.* 8"),
        ({"use_rslora": True}, "lora.use_rslora"),
        (None, "adapter_config.json"),
    ],
)
def test_an_adapter_that_cannot_be_represented_is_refused_by_name(tmp_path, changes, message):
    config = LoraConfig(r=4, alpha=24, initialize_from=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps(THEIRS))
    check_adapter_config(config)
    (tmp_path / "adapter_config.json").unlink()
    if changes is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(THEIRS | changes))
    with pytest.raises(UserError, match=message):
        check_adapter_config(config)
