"""Settings of partitioning: known axis names, each axis split once."""

import pytest
from pydantic import ValidationError

from lmtrain.sharding.axes import PARAMETER_AXES
from lmtrain.sharding.config import PartitioningConfig

MAPPINGS = ["axis_resources", "parameter_axis_resources", "compute_axis_resources"]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_mappings_accept_every_name_and_one_mesh_axis_several_or_none(mapping):
    value = dict.fromkeys(PARAMETER_AXES, "model") | {"vocab": ["model", "data"], "embed": "replica", "mlp": None}
    if mapping != "parameter_axis_resources":
        value = dict.fromkeys(PARAMETER_AXES, "model") | {"batch": ["replica", "data"], "mlp": None}
    assert getattr(PartitioningConfig(**{mapping: value}), mapping) == value


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mpl": "model"}, "unknown logical axis 'mpl'; did you mean 'mlp'"),
        ({"act_mlp": "model"}, "unknown logical axis 'act_mlp'"),
        ({"mlp": "modle"}, "unknown mesh axis 'modle'; did you mean 'model'"),
        ({"mlp": ["data", "zzz"]}, "unknown mesh axis 'zzz'; one of replica, data, expert, context, model"),
        ({"mlp": []}, "at least 1 item"),
        (["mlp"], "valid dictionary"),
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
    for axis, hint in (("vocap", "; did you mean 'vocab'"), ("batch", ""), ("act_mlp", ""), ("EMBED", "")):
        with pytest.raises(ValidationError, match=f"unknown logical axis '{axis}'{hint}"):
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
        (
            {"fsdp_axis": "embed", "parameter_axis_resources": {"embed": "model"}},
            "maps 'embed' to 'model', but fsdp_axis splits it over data",
        ),
        (
            {"tensor_parallel_axes": "mlp", "compute_axis_resources": {"mlp": "data"}},
            "maps 'mlp' to 'data', but tensor_parallel_axes splits it over model",
        ),
        ({"compute_axis_resources": {"mlp": "data"}}, "splits 'mlp' over data, which already splits the batch"),
        ({"axis_resources": {"embed": "data"}}, "use parameter_axis_resources"),
        ({"parameter_axis_resources": {"batch": "data"}}, "parameters have no axis 'batch'"),
        ({"axis_resources": {"mlp": ["model", "model"]}}, "'mlp' names 'model' twice"),
    ],
)
def test_contradicting_mappings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        PartitioningConfig(**settings)


def test_a_mapping_overrides_the_default_fsdp_axis_and_equal_settings_are_valid():
    assert PartitioningConfig(parameter_axis_resources={"embed": "model"}).parameter_mapping["embed"] == ("model",)
    PartitioningConfig(fsdp_axis="embed", parameter_axis_resources={"embed": "data"})
    PartitioningConfig(tensor_parallel_axes="mlp", compute_axis_resources={"mlp": ["model"]})


@pytest.mark.parametrize(
    ("fsdp", "tensor", "fits"),
    [
        ("embed", "embed", False),
        ("embed", ["mlp", "embed"], False),
        (["embed", "mlp"], "mlp", False),
        (["embed", "vocab"], ["mlp", "heads"], True),
        (None, "embed", True),
        ([], ["embed"], True),
        ("embed", None, True),
    ],
)
def test_an_axis_is_split_by_fsdp_or_by_tensor_parallelism(fsdp, tensor, fits):
    if fits:
        PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
    else:
        with pytest.raises(ValidationError, match=r"'(embed|mlp|vocab)' is already split by fsdp_axis") as refused:
            PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
        assert refused.value.errors()[0]["ctx"]["field"] == "tensor_parallel_axes"


def test_the_number_of_replicas_across_slices_may_be_minus_1_but_not_0():
    assert PartitioningConfig(replica_dcn_axis_size=-1).replica_dcn_axis_size == -1
    with pytest.raises(ValidationError, match="one per slice"):
        PartitioningConfig(replica_dcn_axis_size=0)
