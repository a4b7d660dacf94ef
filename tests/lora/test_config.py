"""The `lora` section: names of PEFT, and settings that do not fit together."""

import pytest
from pydantic import ValidationError

from lmtrain.config.describe import sections_of
from lmtrain.config.load import load_config
from lmtrain.optim.config import OptimizerConfig
from lmtrain.run.config import RunConfig
from lmtrain.run.run import identity

BASE = {"initialize_from_hf": "base"}
DPO = BASE | {"objective": {"type": "dpo"}, "data": {"format": {"type": "preference"}}}


def test_the_names_of_peft_are_accepted(tmp_path):
    (tmp_path / "c.yaml").write_text("initialize_from_hf: base\nlora: {rank: 4, lora_alpha: 32, lora_dropout: 0.1}\n")
    lora = load_config(RunConfig, str(tmp_path / "c.yaml")).config.lora
    assert (lora.r, lora.alpha, lora.dropout) == (4, 32.0, 0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {}}, "initialize_from_hf"),
        ({**BASE, "lora": {}, "optimizer": {"type": "muon"}}, "muon"),
        ({**BASE, "lora": {}, "optimizer": {"type": "sophia-g"}}, "sophia-g"),
        ({"lora": {}, "trainer": {"initialize_from": "x"}}, "lora.initialize_from"),
        ({**BASE, "lora": {"target_modules": []}}, "target_modules"),
        ({**BASE, "lora": {"alpha": 0}}, "alpha"),
        ({**BASE, "lora": {"base_quantization": "int8"}, "trainer": {"mp": "c=bf16,q=fp8"}}, "int8.* fp8"),
        (DPO | {"lora": {"base_quantization": "fp8"}}, "dpo"),
        (DPO | {"trainer": {"mp": "c=bf16,q=fp8"}}, "8 bits"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(settings)


@pytest.mark.parametrize("kind", sections_of(OptimizerConfig))
def test_an_optimizer_says_where_it_is_declared_whether_it_works_with_adapters(kind, monkeypatch):
    settings = {**BASE, "lora": {}, "optimizer": {"type": kind.model_fields["type"].default}}
    monkeypatch.setattr(kind, "needs_full_matrices", False)
    RunConfig.model_validate(settings)
    monkeypatch.setattr(kind, "needs_full_matrices", True)
    with pytest.raises(ValidationError, match="complete matrices"):
        RunConfig.model_validate(settings)


def test_the_adapters_are_part_of_the_identity_of_a_run():
    without, plain, other = (identity(RunConfig(**BASE, **lora)) for lora in ({}, {"lora": {}}, {"lora": {"r": 4}}))
    assert "lora" not in without
    assert without != plain != other
