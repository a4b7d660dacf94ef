"""Adapters from PEFT: their values, and the check of their base. `tests/parity/test_peft.py` reads those of PEFT."""

import json
import logging

import jax
import numpy as np
import pytest
from lora.exported import Exported, config_of, load_adapter

from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import ADAPTERS
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program
from lmtrain.weights.export_folder import BaseIdentity, ModelOrigin, marks_of
from lmtrain.weights.load_hf import check_base

TABLES = ["embed_tokens", "lm_head"]
CASES = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "gpt2 with trained tied tables": ("gpt2", {"modules_to_save": TABLES}),
    "llama with trained tables": ("llama", {"modules_to_save": TABLES, "target_modules": ["q_proj", "v_proj"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_exported_adapter_is_read_back_bit_for_bit(tmp_path, case):
    family, lora = CASES[case]
    exported = Exported(tmp_path, family, {}, lora)
    program = build_program(exported.reading("adapter"), exported.model.vocab_size)
    read = load_adapter(program, str(tmp_path / "adapter"))
    size = exported.model.vocab_size
    leaves = jax.tree_util.tree_leaves_with_path(exported.params[ADAPTERS])
    for (path, ours), theirs in zip(leaves, jax.tree.leaves(read), strict=True):
        rows = slice(size) if "embedding" in str(path) else slice(None)
        np.testing.assert_array_equal(ours[rows], theirs[rows])


def test_an_adapter_with_other_layers_is_refused_by_name(tmp_path):
    exported = Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"]})
    adapter = str(tmp_path / "adapter")
    config = config_of("llama", {}, {"target_modules": ["q_proj", "o_proj"], "initialize_from": adapter})
    program = build_program(config, exported.model.vocab_size)
    with pytest.raises(UserError, match=r"(?s)missing base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"):
        load_adapter(program, str(tmp_path / "adapter"))


OURS = BaseIdentity("0" * 32, "float32")


@pytest.mark.parametrize(
    ("trained_on", "allow", "message"),
    [
        (None, False, "does not record its base model"),
        (BaseIdentity("1" * 32, "bfloat16"), False, "was trained on a base in bfloat16, and this run's is in float32"),
        (OURS, False, None),
        (BaseIdentity("1" * 32, "float32"), True, "was trained on another base model (fingerprint 111111111111;"),
    ],
)
def test_a_base_that_cannot_be_compared_or_that_may_differ_gets_a_warning(tmp_path, caplog, trained_on, allow, message):
    config = LoraConfig(initialize_from=str(tmp_path), allow_other_base=allow)
    marks = marks_of(ModelOrigin("one", "data", trained_on), with_base=True)
    (tmp_path / "lmtrain.json").write_text(json.dumps(marks))
    with caplog.at_level(logging.WARNING, "lmtrain"):
        check_base(config, OURS)
    assert [message in line for line in caplog.messages] == ([True] if message else [])
    if allow:
        with pytest.raises(UserError, match=r"another base model .*, or set lora\.allow_other_base"):
            check_base(config.model_copy(update={"allow_other_base": False}), OURS)
