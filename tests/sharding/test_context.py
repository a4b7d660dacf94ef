"""Context parallelism: losses and every gradient equal those of one device, for every way to split a sequence."""

import json
from pathlib import Path

import pytest
from forked import fake_devices, run_script

SCRIPT = Path(__file__).with_name("context_on_meshes.py")
BLOCKS = {"attn_backend": "blockwise", "flash_attention_block_size": 16}
TENSOR = {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads", "vocab"]}
NO_DROPOUT = {"attn_pdrop": 0, "embed_pdrop": 0, "resid_pdrop": 0}

PAIRS = {"data": {"format": {"type": "preference"}}}
DPO = {**PAIRS, "objective": {"type": "dpo"}}
DISTILL = {"objective": {"type": "distill", "teacher": "teacher", "temperature": 2.0, "alpha": 0.5}}

# Name -> devices, settings of the trainer, of the model, others. Models have 4 heads. "exchanged": heads for positions.
SHORT = {
    "two groups of four gather, which swap queries": (8, {"context_axis_size": 8}, {"num_kv_heads": 2}, {}),
    "ALiBi, blocks, gathered": (8, {"context_axis_size": 8}, {"type": "mpt", "num_heads": 2, **BLOCKS}, {}),
    "answers": (8, {"context_axis_size": 2, **TENSOR, "per_device_parallelism": 2}, {}, DPO),
}
LONG = {
    "all gathered, in blocks, with a window": (8, {"context_axis_size": 8},
                                               {"num_heads": 1, "sliding_window": 20, **BLOCKS}, {}),
    "ALiBi, no FSDP": (8, {"context_axis_size": 4, "fsdp_axis": None}, {"type": "mpt"}, {}),
    "learned positions that restart, no recomputation": (
        8, {"context_axis_size": 4},
        {"type": "gpt2", "gradient_checkpointing": False, "scan_layers": False, **NO_DROPOUT},
        {"data": {"reset_positions": True}}),
    "three heads": (8, {"context_axis_size": 8}, {"hidden_dim": 48, "num_heads": 3}, {}),
    "tensor parallelism and groups": (8, {"context_axis_size": 4, **TENSOR}, {"num_kv_heads": 2}, {}),
    "answers, odds ratios": (8, {"context_axis_size": 4, **TENSOR}, {}, {**PAIRS, "objective": {"type": "orpo"}}),
}  # fmt: skip
RELEASE = {
    "all heads, first in a process": (8, {"context_axis_size": 2}, {}, {}),
    "first in a process, with data": (8, {"context_axis_size": 2}, {"num_kv_heads": 2}, {}),
    "exchanged, with FSDP": (8, {"context_axis_size": 4}, {}, {}),
    "a teacher": (8, {"context_axis_size": 2, **TENSOR, "per_device_parallelism": 2}, {}, DISTILL),
    "two devices": (2, {"context_axis_size": 2}, {}, {}),
    "blocks": (4, {"context_axis_size": 4}, BLOCKS, {}),
    "all gathered": (8, {"context_axis_size": 8}, {"num_heads": 1}, {}),
    "copied key heads": (4, {"context_axis_size": 4}, {"num_kv_heads": 2}, {}),
    "one key head and a window": (8, {"context_axis_size": 8}, {"num_kv_heads": 1, "sliding_window": 20}, {}),
    "ALiBi, blocks": (4, {"context_axis_size": 4}, {"type": "mpt", **BLOCKS}, {}),
    "learned positions": (8, {"context_axis_size": 4}, {"type": "gpt2", **NO_DROPOUT}, {}),
    "rotary positions that restart": (8, {"context_axis_size": 8}, {}, {"data": {"reset_positions": True}}),
    "tensor parallelism of senses that do not divide": (8, {"context_axis_size": 2, **TENSOR, "model_axis_size": 4},
                                                        {"type": "backpack", "num_senses": 2, **NO_DROPOUT, **BLOCKS},
                                                        {}),
    "backpack": (4, {"context_axis_size": 4}, {"type": "backpack", "num_senses": 4, **NO_DROPOUT}, {}),
    "tensor parallelism": (8, {"context_axis_size": 2, **TENSOR}, {}, {}),
    "accumulation": (8, {"context_axis_size": 4, "per_device_parallelism": 2}, {}, {}),
    "replicas": (8, {"context_axis_size": 2, "replica_ici_axis_size": 2}, {}, {}),
    "adapters": (8, {"context_axis_size": 4}, {}, {"lora": {}}),
    "answers, adapters, FSDP": (8, {}, {}, {**DPO, "lora": {}}),
    "a teacher of adapters, FSDP": (8, {}, {}, {**DISTILL, "lora": {}}),
    "one document": (8, {"context_axis_size": 8}, {}, {"data": {"mask_across_documents": False}}),
    "position over the model axis": (8, {"model_axis_size": 4, "compute_axis_resources": {"position": "model"}},
                                     {}, {}),
}  # fmt: skip


def compare(tmp_path, cases):
    arguments = [
        json.dumps({"name": name, "devices": devices, "trainer": trainer, "model": model, **more})
        for name, (devices, trainer, model, more) in cases.items()
    ]
    output = tmp_path / "found.json"
    run_script(SCRIPT.read_text(), output, *arguments, folder=tmp_path, seconds=1800, XLA_FLAGS=fake_devices(8))
    found = json.loads(output.read_text())
    assert found.keys() == cases.keys()
    for name, (devices, trainer, _, _) in cases.items():
        case = found[name]
        assert case["mesh"]["context"] == trainer.get("context_axis_size", 1), name
        assert (
            case["mesh"]["data"] * case["mesh"]["replica"] * case["mesh"]["context"] * case["mesh"]["model"] == devices
        )
        assert case["loss"] <= 1e-5, name
        assert len(case["gradients"]) >= 8
        for path, error in case["gradients"].items():
            assert error <= 1e-5, (name, path)


@pytest.mark.multi_device
def test_a_split_sequence_gives_the_losses_and_gradients_of_one_device(tmp_path):
    compare(tmp_path, SHORT)


@pytest.mark.long
@pytest.mark.multi_device
@pytest.mark.parametrize("cases", [LONG, pytest.param(RELEASE, marks=pytest.mark.release)], ids=["CI", "release"])
def test_every_way_to_split_gives_the_losses_and_gradients_of_one_device(tmp_path, cases):
    compare(tmp_path, cases)
