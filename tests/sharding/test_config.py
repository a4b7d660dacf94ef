"""Settings of partitioning: known axis names, each axis split once."""

import pytest
from pydantic import ValidationError

from lmtrain.sharding.axes import ACTIVATION_AXES, PARAMETER_AXES, check_axes
from lmtrain.sharding.config import PartitioningConfig

# they split the sequence otherwise than context parallelism
OVERRIDES = [
    {"compute_axis_resources": {"position": "model"}, "model_axis_size": 2},
    {"axis_resources": {"position": None}},
]
MAPPINGS = ["axis_resources", "parameter_axis_resources", "compute_axis_resources"]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_mappings_accept_every_name_and_one_mesh_axis_several_or_none(mapping):
    value = dict.fromkeys(PARAMETER_AXES, "model") | {"vocab": ["model", "data"], "embed": "replica", "mlp": None}
    if mapping != "parameter_axis_resources":
        value = dict.fromkeys(PARAMETER_AXES, "model") | {"batch": ["replica", "data"], "mlp": None}
    assert getattr(PartitioningConfig(**{mapping: value}), mapping) == value


@pytest.mark.parametrize("mapping", MAPPINGS[1:])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mpl": "model"}, "'mpl'.* 'mlp'"),
        ({"mlp": "modle"}, "'modle'.* 'model'"),
        ({"mlp": ["data", "zzz"]}, "'zzz'.* replica, data, expert, context, model"),
        ({"mlp": []}, "mlp"),
    ],
)
def test_unknown_names_in_a_mapping_are_refused(mapping, value, message):
    with pytest.raises(ValidationError, match=message):
        PartitioningConfig(**{mapping: value})


@pytest.mark.parametrize("setting", ["fsdp_axis", "tensor_parallel_axes"])
def test_axes_may_be_one_several_or_none_and_others_are_refused(setting):
    other = {"fsdp_axis": None} if setting == "tensor_parallel_axes" else {}
    for value in (*PARAMETER_AXES, ["vocab", "mlp"], [], None):
        assert getattr(PartitioningConfig(**other | {setting: value}), setting) == value
    for axis, hint in (("vocap", ".* 'vocab'"), ("act_mlp", "")):
        with pytest.raises(ValidationError, match=f"'{axis}'{hint}"):
            PartitioningConfig(**{setting: ["mlp", axis]})


def test_heads_imply_kv_heads_unless_set_otherwise():
    config = PartitioningConfig(tensor_parallel_axes=["heads"])
    assert config.parameter_mapping["kv_heads"] == config.compute_mapping["act_kv_heads"] == ("model",)
    config = PartitioningConfig(tensor_parallel_axes=["heads"], axis_resources={"kv_heads": None})
    assert config.parameter_mapping["kv_heads"] == config.compute_mapping["act_kv_heads"] == ()
    assert PartitioningConfig(tensor_parallel_axes=["mlp"]).parameter_mapping["kv_heads"] == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_axis": "embed", "parameter_axis_resources": {"embed": "model"}}, "'embed' .*fsdp_axis"),
        ({"tensor_parallel_axes": "mlp", "compute_axis_resources": {"mlp": "data"}}, "'mlp' .*tensor_parallel_axes"),
        ({"compute_axis_resources": {"mlp": "data"}}, "'mlp' over data"),
        ({"axis_resources": {"embed": "data"}}, "parameter_axis_resources"),
        ({"parameter_axis_resources": {"batch": "data"}}, "no axis 'batch'"),
        ({"axis_resources": {"mlp": ["model", "model"]}}, "'mlp' names 'model'"),
        ({"replica_dcn_axis_size": 0}, "replica_dcn_axis_size"),
        *(({"context_axis_size": 2, **mapping}, "'position'") for mapping in OVERRIDES),
    ],
)
def test_contradicting_mappings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        PartitioningConfig(**settings)
    PartitioningConfig(fsdp_axis="embed", parameter_axis_resources={"embed": "data"})  # the same twice is valid


@pytest.mark.parametrize(
    ("fsdp", "tensor", "fits"),
    [
        ("embed", ["mlp", "embed"], False),
        (["embed", "mlp"], "mlp", False),
        (["embed", "vocab"], ["mlp", "heads"], True),
        ([], ["embed"], True),
    ],
)
def test_an_axis_is_split_by_fsdp_or_by_tensor_parallelism(fsdp, tensor, fits):
    if fits:
        PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
    else:
        with pytest.raises(ValidationError, match=r"'(embed|mlp|vocab)'") as refused:
            PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
        assert refused.value.errors()[0]["ctx"]["field"] == "tensor_parallel_axes"


@pytest.mark.parametrize("axes", [("Embed",), ("embed", "width"), ("act_embed",), ("",)])
def test_the_set_of_names_in_the_code_is_closed(axes):
    assert not set(PARAMETER_AXES) & set(ACTIVATION_AXES)
    check_axes(("embed", None, "mlp"), PARAMETER_AXES)
    with pytest.raises(AssertionError, match="unknown logical axis"):
        check_axes(axes, PARAMETER_AXES)
