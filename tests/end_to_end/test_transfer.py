"""A run with transfer: its factors are shown, it resumes, and its export is an ordinary model."""

import pytest
import yaml
from conftest import logged, run_in_process, tiny_settings

pytestmark = pytest.mark.end_to_end

MODELS = {
    "llama": {"type": "llama", "intermediate_dim": 96, "num_kv_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"type": "gpt2"},
    "mpt": {"type": "mpt"},
    "backpack": {"type": "backpack", "num_senses": 2},
    "mixture": {"type": "llama", "intermediate_dim": 96, "moe": {"num_experts": 4, "intermediate_dim": 32}},
}
SIZES = {"hidden_dim": 64, "num_heads": 4, "num_layers": 2, "seq_len": 32}
BASE = {"hidden_dim": 32, "num_heads": 2, "num_layers": 1}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "llama")) for name in MODELS])
def test_exports_are_ordinary_models(name, tmp_path):
    settings = tiny_settings()
    model = settings["model"] = MODELS[name] | SIZES
    base = BASE | ({"intermediate_dim": 48} if "intermediate_dim" in model else {})
    base |= {"num_kv_heads": 1} if "num_kv_heads" in model else {}
    base |= {"moe": {"intermediate_dim": 16}} if "moe" in model else {}
    settings |= {"transfer": {"base": base}, "optimizer": {"learning_rate": 5e-3, "lr_schedule": "constant"}}
    settings["trainer"] |= {"num_train_steps": 4, "steps_per_eval": 4, "id": "one"}
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(settings))
    run_in_process(["train", "large.yaml"], tmp_path, code=0)
    run_in_process(["train", "large.yaml", "--trainer.num_train_steps", "8"], tmp_path, code=0)
    assert logged(tmp_path, "eval/loss")[8] < logged(tmp_path, "eval/loss")[4]
    run_in_process(["export-hf", "large.yaml", "--output", "model", "--verify"], tmp_path, code=0)
    changed = {**settings, "transfer": {"base": base | {"num_layers": 2}}}
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(changed))
    refused = run_in_process(["train", "large.yaml", "--trainer.num_train_steps", "9"], tmp_path, code=2)
    assert "transfer.base.num_layers" in refused.stderr
