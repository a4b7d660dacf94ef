"""The table of parameters: dimensions, size, the mesh axes they are split over, and bytes per device."""

import flax.linen as nn
import jax

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.params import abstract_params, with_dtype
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.program.compile import layout_table

MODEL = Gpt2LM(Gpt2Config(hidden_dim=64, num_heads=2, num_layers=3, seq_len=1024, pad_vocab_to_multiple_of=1), 2048)


class FourDevices:
    """A layout of 2 x 2 devices that need not exist."""

    def __init__(self):
        rules = build_layout(PartitioningConfig(tensor_parallel_axes=["mlp", "heads"])).parameter_rules
        self.parameter_rules = rules
        self.mesh = type("Mesh", (), {"shape": {"replica": 1, "data": 2, "context": 1, "model": 2}})


def unboxed():
    return nn.meta.unbox(abstract_params(MODEL))


def rows(layout, dtype: str = "float32") -> dict[str, list[str]]:
    """First cell of each row -> its other cells."""
    lines = layout_table(MODEL, layout, with_dtype(unboxed(), dtype))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {first: rest for first, *rest in cells}


def test_it_has_a_title_and_a_row_for_each_parameter():
    found = rows(build_layout(PartitioningConfig()))
    assert found.pop("Parameter") == ["Dimensions", "Size", "On each device"]
    leaves = jax.tree_util.tree_leaves_with_path(unboxed())
    assert list(found) == [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def test_dimensions_have_names_and_sizes_and_scalars_are_counted():
    found = rows(build_layout(PartitioningConfig()))
    assert found["tokens/embedding"] == ["vocab 2,048, embed 64", "131,072", "512.0 KiB"]
    sizes = [int(row[1].replace(",", "")) for name, row in found.items() if name != "Parameter"]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(unboxed()))
    assert rows(build_layout(PartitioningConfig()), "bfloat16")["tokens/embedding"][-1] == "256.0 KiB"


def test_split_dimensions_name_the_mesh_axis_and_each_device_has_its_part():
    found = rows(FourDevices())
    assert found["tokens/embedding"] == ["vocab 2,048, embed 64/data 2", "131,072", "256.0 KiB"]
    up = found["blocks/mlp/up/kernel"]
    assert up == ["layers 3, embed 64/data 2, mlp 256/model 2", "49,152", "48.0 KiB"]
