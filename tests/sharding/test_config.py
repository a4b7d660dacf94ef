"""Settings of partitioning: known axis names, each axis split once."""

import pytest
from pydantic import ValidationError

from lmtrain.sharding.axes import PARAMETER_AXES, as_names
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
        ({"mlp": ["data", "zzz"]}, "unknown mesh axis 'zzz'; one of replica, data, model"),
        ({"mlp": []}, "at least 1 item"),
        (["mlp"], "valid dictionary"),
    ],
)
def test_unknown_names_in_a_mapping_are_refused(mapping, value, message):
    with pytest.raises(ValidationError, match=message):
        PartitioningConfig(**{mapping: value})


@pytest.mark.parametrize("setting", ["fsdp_axis", "tensor_parallel_axes"])
def test_axes_may_be_one_several_or_none_and_a_misspelt_one_has_a_suggestion(setting):
    other = {"fsdp_axis": None} if setting == "tensor_parallel_axes" else {}
    for value in ("vocab", ["vocab", "mlp"], [], None):
        assert getattr(PartitioningConfig(**other | {setting: value}), setting) == value
    with pytest.raises(ValidationError, match="unknown logical axis 'vocap'; did you mean 'vocab'"):
        PartitioningConfig(**{setting: ["mlp", "vocap"]})


@pytest.mark.parametrize(("value", "expected"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_as_names_returns_a_tuple(value, expected):
    assert as_names(value) == expected


def test_heads_imply_kv_heads_unless_set_otherwise():
    config = PartitioningConfig(tensor_parallel_axes=["heads"])
    assert config.parameter_mapping["kv_heads"] == config.compute_mapping["act_kv_heads"] == ("model",)
    config = PartitioningConfig(tensor_parallel_axes=["heads"], axis_resources={"kv_heads": None})
    assert config.parameter_mapping["kv_heads"] == config.compute_mapping["act_kv_heads"] == ()
    assert PartitioningConfig(tensor_parallel_axes=["mlp"]).parameter_mapping["kv_heads"] == ()


def test_an_axis_with_fsdp_and_tensor_parallelism_is_refused():
    with pytest.raises(ValidationError, match="'vocab' is already split by fsdp_axis"):
        PartitioningConfig(fsdp_axis=["embed", "vocab"], tensor_parallel_axes="vocab")


@pytest.mark.parametrize("value", [0, -2])
def test_replica_dcn_axis_size_is_positive_or_minus_1(value):
    assert PartitioningConfig(replica_dcn_axis_size=-1).replica_dcn_axis_size == -1
    with pytest.raises(ValidationError):
        PartitioningConfig(replica_dcn_axis_size=value)


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


def test_by_default_only_the_embed_axis_of_parameters_is_split():
    c = PartitioningConfig()
    assert (c.batch_axis, c.fsdp_axis, c.tensor_parallel_axes) == ("batch", "embed", None)
    assert (c.model_axis_size, c.replica_ici_axis_size, c.replica_dcn_axis_size) == (1, 1, 1)
    assert c.axis_resources == c.parameter_axis_resources == c.compute_axis_resources == {}


@pytest.mark.parametrize("axis", PARAMETER_AXES)
def test_every_parameter_axis_may_be_split(axis):
    assert PartitioningConfig(fsdp_axis=axis).fsdp_axis == axis


@pytest.mark.parametrize("setting", ["fsdp_axis", "tensor_parallel_axes"])
@pytest.mark.parametrize("axis", ["batch", "act_mlp", "", "EMBED"])
def test_an_axis_that_is_not_a_parameter_axis_is_refused(setting, axis):
    with pytest.raises(ValidationError, match=f"unknown logical axis '{axis}'"):
        PartitioningConfig(**{setting: axis})


@pytest.mark.parametrize("axis", ["data", "embed", "act_batch", ""])
def test_batch_axis_must_be_batch(axis):
    assert PartitioningConfig(batch_axis="batch").batch_axis == "batch"
    with pytest.raises(ValidationError, match="expected 'batch'"):
        PartitioningConfig(batch_axis=axis)


@pytest.mark.parametrize("setting", ["model_axis_size", "replica_ici_axis_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_other_sizes_are_positive_integers(setting, value):
    assert getattr(PartitioningConfig(**{setting: 2}), setting) == 2
    with pytest.raises(ValidationError):
        PartitioningConfig(**{setting: value})


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
        with pytest.raises(ValidationError, match="already split by fsdp_axis") as refused:
            PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
        assert refused.value.errors()[0]["ctx"]["field"] == "tensor_parallel_axes"
