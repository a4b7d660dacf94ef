"""Modules that predict further tokens: outputs, names and imports are those of transformers, their loss is exact."""

import jax
import numpy as np
import pytest
import torch
from parity.variants import DEEPSEEK_V3, VOCAB, make, tokens
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from lmtrain.hf.weight_files import open_weights
from lmtrain.models.interface import outputs_of
from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model
from lmtrain.objectives.config import CrossEntropyConfig
from lmtrain.objectives.cross_entropy import build_objective
from lmtrain.objectives.interface import further_sums
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.weights.hf_config import hf_settings
from lmtrain.weights.load_hf import load_hf_params


def outputs(variant, batch):
    return jax.jit(lambda params: variant.model.apply({"params": params}, batch, True, method=outputs_of))(
        variant.params
    )


def test_outputs_of_two_modules_are_those_of_transformers(export, monkeypatch):
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    variant = make("deepseek_v3", mtp={"num_modules": 2})
    # transformers knows the modules of models with 61 layers
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34]\."])
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    main = AutoModelForCausalLM.from_pretrained(export(variant), **how).eval()
    modules = MtpModel.from_pretrained(main, device_map={"": "cpu"}).eval()
    ids = torch.from_numpy(tokens())
    found = outputs(variant, {"tokens": tokens()})
    with torch.no_grad():
        state = main(ids, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(ids.shape[1])[None].repeat(2, 1)
        cache = MtpCache(config=main.config.get_mtp_config())
        for k in (1, 2):
            state = modules.forward_layer(k - 1, state, positions, cache, input_ids=torch.roll(ids, -k, 1))
            head = found[f"mtp_{k}"]
            ours = np.asarray(head.hidden @ head.matrix.T)[..., :VOCAB]
            expected = modules._project_to_logits(state).numpy()
            valid = slice(0, ids.shape[1] - k)  # the last ones read tokens of the beginning
            assert np.abs(ours - expected)[:, valid].max() < 1e-4
            assert np.abs(expected).max() > 1


def test_modules_are_kept_or_left_out_at_export_and_import(export, layout):
    variant = make("deepseek_v3", mtp={})
    folder = export(variant, shard_bytes=4000)
    names = open_weights(folder).shapes
    assert {f"model.layers.3.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= set(names)
    settings = hf_settings(folder)
    without = RunConfig.model_validate({"model": settings}).model
    assert without.mtp is None
    plain = load_hf_params(folder, without, build_model(without, VOCAB), layout, "float32")
    assert not [path for path in flatten(plain) if path.startswith("mtp/")]
    config = RunConfig.model_validate({"model": settings | {"mtp": {}}}).model
    back = flatten(jax.device_get(load_hf_params(folder, config, variant.model, layout, "float32")))
    for path, value in flatten(variant.params).items():
        kept = VOCAB if "embedding" in path else len(value)
        assert back[path][:kept].tobytes() == value[:kept].tobytes(), path
    more = RunConfig.model_validate({"model": settings | {"mtp": {"num_modules": 2}}}).model
    with pytest.raises(UserError, match=r"model\.mtp: .*layers\.4\."):
        load_hf_params(folder, more, build_model(more, VOCAB), layout, "float32")
    others = export(make("llama", mtp={}), folder="llama")  # a type without modules
    assert not [name for name in open_weights(others).shapes if "eh_proj" in name]


LENGTHS = (9, 2, 1, 12)


def test_losses_and_gradients_of_packed_documents_are_those_of_separate_ones():
    variant = make("deepseek_v3", mtp={"num_modules": 2}, moe=DEEPSEEK_V3["moe"])
    objective = build_objective(CrossEntropyConfig(), 0.0, variant.config.further_losses)
    ids, segments = tokens()[0], np.repeat(np.arange(4), LENGTHS).astype(np.int32)
    starts = np.cumsum((0, *LENGTHS))[:-1]
    positions = np.arange(24) - np.repeat(starts, LENGTHS)
    mask = np.append(segments[1:] == segments[:-1], False)

    def sums(params, batch):
        found = variant.model.apply({"params": params}, batch, True, method=outputs_of)
        each = further_sums(objective, found, batch)
        return sum(own.total for own in each.values()), {name: (own.total, own.weight) for name, own in each.items()}

    both = jax.jit(jax.value_and_grad(sums, has_aux=True))
    packed = {"tokens": ids[None], "loss_mask": mask[None], "segments": segments[None], "positions": positions[None]}
    (_, found), gradients = both(variant.params, packed)
    expected, of_all = {}, None
    for start, length in zip(starts, LENGTHS, strict=True):
        alone = {"tokens": ids[None, start : start + length], "loss_mask": np.arange(length)[None] < length - 1}
        (_, own), d = both(variant.params, alone)
        for name, pair in own.items():
            expected[name] = np.add(expected.get(name, 0), pair)
        of_all = d if of_all is None else jax.tree.map(np.add, of_all, d)
    assert {name: int(weight) for name, (_, weight) in found.items()} == {
        "train/mtp_1_loss": 7 + 10, "train/mtp_2_loss": 6 + 9,
    }  # fmt: skip
    for name, pair in found.items():
        np.testing.assert_allclose(np.asarray(pair), expected[name], rtol=1e-5)
    for (path, one), other in zip(flatten(gradients).items(), flatten(of_all).values(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1, np.abs(other).max()), err_msg=path)


def test_weights_of_the_loss_follow_their_steps():
    small = make("llama", mtp={"num_modules": 2, "loss_weight": [[0, 0.3], [10, 0.1]]})
    hash(small.model)  # as `LanguageModel` says
    objective = build_objective(CrossEntropyConfig(), 0.0, small.config.further_losses)
    for name in ("mtp_1_loss", "mtp_2_loss"):
        found = [float(objective[name].coefficient_at(step)) for step in (0, 9, 10, 99)]
        assert found == pytest.approx([0.15, 0.15, 0.05, 0.05])
