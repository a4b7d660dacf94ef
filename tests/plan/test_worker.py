"""The worker's exit code, its files, and descriptions of GPUs for XLA's compiler."""

import json

import pytest
from plan.workers import local_request

from lmtrain.plan import worker
from lmtrain.plan.worker import target_config
from lmtrain.runtime.accelerators import KINDS


def test_a_user_error_is_written_next_to_the_request(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "end_with_parent", lambda parent: None)
    (tmp_path / "request.json").write_text(local_request(False, model_axis_size=2).to_json())
    assert worker.main([str(tmp_path / "request.json"), str(tmp_path)]) == 2
    assert (tmp_path / "error.txt").read_text().startswith("trainer.model_axis_size: ")


def test_without_compiling_the_answer_is_its_first_part(tmp_path):
    worker.answer(local_request(False, train_batch_size=4), str(tmp_path))
    (path,) = tmp_path.iterdir()
    program = json.loads(path.read_text())
    assert (path.name, program["devices"], program["batches"]) == ("program.json", 1, {"4": 1})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("v")])
def test_every_kind_of_gpu_has_a_target_config(kind):
    text = target_config(kind)
    assert "core_count" in text
    assert text.count("{") == text.count("}")
