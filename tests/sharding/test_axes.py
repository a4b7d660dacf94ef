"""The set of logical axis names is closed."""

import pytest

from lmtrain.sharding.axes import ACTIVATION_AXES, ACTIVATION_OF, PARAMETER_AXES, as_names, check_axes


def test_parameters_and_activations_share_no_name_and_every_activation_axis_of_a_setting_exists():
    assert not set(PARAMETER_AXES) & set(ACTIVATION_AXES)
    assert set(ACTIVATION_OF.values()) <= set(ACTIVATION_AXES)


@pytest.mark.parametrize("axes", [(), (None,), ("embed", None, "mlp")])
def test_known_names_and_none_pass(axes):
    check_axes(axes, PARAMETER_AXES)


@pytest.mark.parametrize("axes", [("Embed",), ("embed", "width"), ("act_embed",), ("",)])
def test_unknown_names_raise(axes):
    with pytest.raises(AssertionError, match="unknown logical axis"):
        check_axes(axes, PARAMETER_AXES)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_as_names_returns_a_tuple(value, expected):
    assert as_names(value) == expected
