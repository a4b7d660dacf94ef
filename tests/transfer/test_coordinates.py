"""The coordinate check: with transfer, ten steps change the logits as much at every width."""

import pytest
from transfer.coordinates import slope

RATES = {"adam": 2**-9, "lion": 2**-11, "muon": 2**-6}
MOE = {"num_experts": 4, "shared_experts": 1}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied, norms of queries": ("llama", {"tie_word_embeddings": True, "qk_norm": "head"}),
    "gpt2": ("gpt2", {}),
    "mpt": ("mpt", {"init_scheme": "normal"}),
    "backpack": ("backpack", {}),
    "mixture": ("llama", {"moe": MOE}),
}


def test_the_change_of_the_logits_does_not_grow_with_the_width():
    assert abs(slope("llama", {"type": "adam"}, RATES["adam"], True, (64, 128, 256))) < 0.15


@pytest.mark.long
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("name", MODELS)
def test_families_and_optimizers(name, optimizer):
    family, model = MODELS[name]
    widths = (64, 128, 256, 512)
    standard, transferred = (
        slope(family, {"type": optimizer}, RATES[optimizer], transfer, widths, **model) for transfer in (False, True)
    )
    print(f"{name}, {optimizer}: standard {standard:.2f}, transfer {transferred:.2f}")
    assert standard > 0.4
    assert abs(transferred) < 0.15
