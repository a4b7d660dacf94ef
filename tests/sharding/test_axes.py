"""The set of logical axis names is closed."""

import pytest

from lmtrain.sharding.axes import ACTIVATION_AXES, ACTIVATION_OF, PARAMETER_AXES, check_axes


def test_parameters_and_activations_share_no_name():
    assert not set(PARAMETER_AXES) & set(ACTIVATION_AXES)


def test_every_activation_axis_in_user_settings_exists():
    assert set(ACTIVATION_OF.values()) <= set(ACTIVATION_AXES)


@pytest.mark.parametrize("axes", [(), (None,), ("embed", None, "mlp")])
def test_known_names_and_none_pass(axes):
    check_axes(axes, PARAMETER_AXES)


@pytest.mark.parametrize("axes", [("Embed",), ("embed", "width"), ("act_embed",), ("",)])
def test_unknown_names_raise(axes):
    with pytest.raises(AssertionError, match="unknown logical axis"):
        check_axes(axes, PARAMETER_AXES)
