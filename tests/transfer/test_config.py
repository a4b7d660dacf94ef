"""`transfer.base`: sizes of a smaller model, with clear errors."""

import pytest
from pydantic import ValidationError

from lmtrain.run.config import RunConfig
from lmtrain.transfer.config import base_of

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_layers": 4}
BASE = {"hidden_dim": 32, "num_heads": 2, "num_layers": 2}


def config(base, **sections):
    model = {"type": "gpt2", **SIZES} | sections.pop("model", {})
    return RunConfig.model_validate({"model": model, "transfer": {"base": base}, **sections})


@pytest.mark.parametrize(
    ("base", "sections", "message"),
    [
        ({"hidden_dim": 32}, {}, "num_layers"),
        (BASE | {"num_layer": 2}, {}, "num_layer .* num_layers"),
        (BASE | {"resid_pdrop": 0.1}, {}, "resid_pdrop"),
        (BASE | {"hidden_dim": 33}, {}, "num_heads: 2 .*hidden_dim 33"),
        (BASE | {"num_kv_heads": 2}, {}, "num_kv_heads"),
        (BASE, {"model": {"intermediate_dim": 200}}, "intermediate_dim"),
        (BASE | {"moe": {"intermediate_dim": 8}}, {}, "moe"),
        (BASE, {"optimizer": {"type": "adafactor"}}, "adafactor.* adam, lion or muon"),
        (BASE, {"lora": {}, "initialize_from_hf": "x"}, "adapters"),
    ],
)
def test_a_bad_base_is_an_error(base, sections, message):
    with pytest.raises(ValidationError, match=message):
        config(base, **sections)


def test_sizes_that_the_base_omits_follow_its_own():
    moe = {"num_experts": 4, "intermediate_dim": 32}
    llama = {"type": "llama", "intermediate_dim": 128, "num_kv_heads": 2, "moe": moe, "layer_norm_epsilon": 0.5}
    sizes = BASE | {"intermediate_dim": 64, "moe": {"intermediate_dim": 16}}
    base = base_of(config(sizes, model=llama).model, sizes)
    assert (base.kv_heads, base.moe.num_experts, base.expert_dim, base.layer_norm_epsilon) == (2, 4, 16, 0.5)
