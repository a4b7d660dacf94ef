"""The layers and tables that LoRA trains, chosen by their names in Hugging Face."""

import pytest
from pydantic import TypeAdapter

from lmtrain.lora.sites import check_rank, choose_sites, choose_tables, list_sites, list_tables
from lmtrain.models.config import ModelConfig
from lmtrain.models.params import abstract_params, shapes_by_path
from lmtrain.models.registry import build_model, hf_family
from lmtrain.runtime.errors import UserError


def of(family, **model):
    """All layers and tables of a model."""
    sizes = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": 16}
    config = TypeAdapter(ModelConfig).validate_python({"type": family, **sizes, **model})
    table = hf_family(family).table(config)
    return list_sites(table, shapes_by_path(abstract_params(build_model(config, 50)))), list_tables(table)


def modules(family, wanted=None):
    return sorted({site.module.rpartition(".")[2] for site in choose_sites(wanted, of(family)[0])})


def test_the_layers_are_chosen_by_the_names_of_hugging_face():
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert modules("llama") == modules("llama", "all-linear") == every
    assert modules("llama", ["q_proj", "mlp.up_proj"]) == ["q_proj", "up_proj"]
    assert modules("llama", r".*self_attn\.[qv]_proj") == ["q_proj", "v_proj"]
    assert [site.path for site in choose_sites(["attn.c_proj"], of("gpt2")[0])] == ["blocks/attn/out"]
    assert modules("mpt") == ["Wqkv", "down_proj", "out_proj", "up_proj"]
    assert modules("backpack") == ["c_attn", "c_fc", "c_proj"]


def test_a_site_has_the_sizes_of_its_matrix_and_a_name_for_each_layer():
    sites = {site.path: site for site in of("llama", num_kv_heads=2)[0]}
    k = sites["blocks/attn/k"]
    assert (k.inputs, k.outputs, k.layers, k.is_conv1d) == (32, 16, (0, 1), False)
    assert k.modules == [f"model.layers.{layer}.self_attn.k_proj" for layer in range(2)]
    assert all(site.is_conv1d for site in of("gpt2")[0])
    (weigh,) = [site for site in of("backpack")[0] if site.path == "weigh"]
    assert (weigh.layers, weigh.modules) == (None, ["backpack.sense_weight_net.c_attn"])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["q_prj"], "target_modules: q_prj .* q_proj"),
        (["lm_head"], "lm_head .* down_proj, gate_proj"),
        ("q_proj", r"write \[q_proj\]"),
        ("(q", "target_modules"),
        (r".*layers\.1\..*", "some blocks"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_those_that_exist(wanted, message):
    with pytest.raises(UserError, match=message):
        choose_sites(wanted, of("llama")[0])


@pytest.mark.parametrize(
    ("family", "model", "expected"),
    [
        ("gpt2", {}, ["tokens/embedding"]),
        ("llama", {"tie_word_embeddings": True}, ["tokens/embedding"]),
        ("llama", {}, ["unembed/embedding"]),
    ],
)
def test_a_tied_head_is_the_table_of_the_embeddings(family, model, expected):
    tables = of(family, **model)[1]
    assert [table.path for table in choose_tables(["lm_head"], tables)] == expected
    assert choose_tables(["embed_tokens", "lm_head"], tables) == tables
    with pytest.raises(UserError, match=r"modules_to_save: norm .* embed_tokens"):
        choose_tables(["norm"], tables)


def test_a_rank_above_the_smallest_dimension_is_refused():
    sites = of("llama", num_kv_heads=1)[0]
    check_rank(8, sites)
    with pytest.raises(UserError, match=r"lora\.r: 9 .*k_proj \(32 x 8\).* 8 "):
        check_rank(9, sites)


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid"])
def test_experts_and_routers_have_no_adapters(router):
    """Nor the dense MLPs of other layers. Also with a router that no model type of transformers has."""
    moe = {"moe": {"router": router}, "layer_pattern": ["full", {"attention": "full", "mlp": "dense"}]}
    assert {site.path for site in of("llama", **moe)[0]} == {f"blocks/attn/{name}" for name in ("q", "k", "v", "out")}
    everywhere = of("llama", moe={"router": router})[0]
    with pytest.raises(UserError, match="gate_proj: "):
        choose_sites(["q_proj", "gate_proj"], everywhere, {"gate_proj", "gate"})
