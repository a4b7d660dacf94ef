"""Configs subclassed in Python: the identity of a run depends on values, not on classes."""

import pytest
from pydantic import Field, ValidationError

from lmtrain.data.config import DataConfig
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.identity import identity, run_id

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_layers": 2, "intermediate_dim": 128}


class Small(LlamaConfig):
    """A subclass with other defaults."""

    hidden_dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    intermediate_dim: int = Field(128, ge=64)


class Own(LlamaConfig):
    """A subclass with an additional setting, which nothing reads."""

    temperature: float = 1.0


class Bytes(DataConfig):
    """A subclass with another default, of a section without `type`."""

    tokenizer: str = "byte"


def test_other_defaults_make_the_same_run_as_the_same_values_written_out():
    subclassed, plain = RunConfig(model=Small(seq_len=128)), RunConfig(model=LlamaConfig(seq_len=128, **SIZES))
    assert subclassed == plain
    assert type(subclassed.model) is LlamaConfig
    assert identity(subclassed) == identity(plain)
    assert identity(plain)["model"]["hidden_dim"] == 64
    assert (resolved(subclassed), run_id(subclassed, "a")) == (resolved(plain), run_id(plain, "a"))


def test_the_defaults_of_the_subclass_count_as_set():
    model = RunConfig(model=Small(seq_len=128)).model
    assert model.model_fields_set == {"seq_len", *SIZES}


def test_sections_without_type_are_converted_too():
    config = RunConfig(data=Bytes())
    assert (type(config.data), config.data.tokenizer) == (DataConfig, "byte")


def test_an_additional_setting_of_the_subclass_is_refused():
    with pytest.raises(ValidationError, match=r"Own.*LlamaConfig.*temperature"):
        RunConfig(model=Own())


def test_constraints_of_the_base_apply():
    with pytest.raises(ValidationError, match="does not divide hidden_dim"):
        RunConfig(model=Small(num_heads=7))
