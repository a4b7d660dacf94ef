"""Shardings from logical names, and global arrays from numpy rows. On eight simulated devices: test_devices.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lmtrain.runtime.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import Layout, build_layout
from lmtrain.sharding.placement import LocalPart, constrain, like_parameters, parameter_shardings


def boxed(shape, names):
    return {"layer": {"kernel": nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)}}


def on_many_devices() -> Layout:
    """A layout for 4 x 2 abstract devices."""
    plan = build_layout(PartitioningConfig(tensor_parallel_axes=["mlp"]))
    return Layout(
        mesh=AbstractMesh((1, 4, 1, 1, 2), plan.mesh.axis_names),
        parameter_rules=plan.parameter_rules,
        compute_rules=plan.compute_rules,
    )


def test_names_become_mesh_axes():
    shardings = parameter_shardings(on_many_devices(), boxed((8, 6), ("embed", "mlp")))
    assert shardings["layer"]["kernel"].spec == PartitionSpec("data", "model")


@pytest.mark.parametrize(("shape", "size", "parts", "axis"), [((6, 6), 6, 4, "data"), ((8, 5), 5, 2, "model")])
def test_a_size_that_does_not_divide_is_refused_by_name(shape, size, parts, axis):
    message = rf"layer.*kernel.* {size} .* {parts} devices .*{axis}"
    with pytest.raises(UserError, match=message):
        parameter_shardings(on_many_devices(), boxed(shape, ("embed", "mlp")))


def test_two_dimensions_over_the_same_devices_are_refused_by_name():
    plan = build_layout(PartitioningConfig(fsdp_axis=["embed", "mlp"]))
    message = r"layer.*kernel.*'embed' and 'mlp'"
    with pytest.raises(UserError, match=message):
        parameter_shardings(plan, boxed((8, 6), ("embed", "mlp")))


def test_moments_get_the_shardings_of_parameters_and_scalars_are_replicated():
    layout = build_layout(PartitioningConfig())
    params = {"a": jnp.zeros(4), "b": {"c": jnp.zeros((2, 4))}}
    marked = {"a": NamedSharding(layout.mesh, PartitionSpec("data")), "b": {"c": layout.batch}}
    state = optax.adam(0.1).init(params)
    adam = like_parameters(layout, state, params, marked)[0]
    assert adam.mu == marked
    assert adam.nu == marked
    assert adam.count == layout.replicated


def test_one_process_holds_all_rows_and_places_them_unchanged():
    layout = build_layout(PartitioningConfig())
    part = LocalPart.of(layout.batch, 6, 3)
    np.testing.assert_array_equal(part.rows, np.arange(6))
    assert part.columns == range(3)
    batch = {"tokens": np.arange(18, dtype=np.int32).reshape(6, 3), "loss_mask": np.eye(6, 3, dtype=bool)}
    placed = part.place(batch)
    assert placed.keys() == batch.keys()
    for name, array in placed.items():
        assert array.sharding == layout.batch
        assert array.dtype == batch[name].dtype
        np.testing.assert_array_equal(array, batch[name])


def test_constrain_changes_no_values_and_accepts_only_activation_axes():
    x = jnp.arange(6.0).reshape(2, 3)
    with build_layout(PartitioningConfig()).active():
        np.testing.assert_array_equal(jax.jit(lambda x: constrain(x, "act_batch", None))(x), x)
    with pytest.raises(AssertionError, match="unknown logical axis 'embed'"):
        constrain(x, "act_batch", "embed")
