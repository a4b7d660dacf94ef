"""Requests of the planner: their keys, their devices, and their environment."""

import json

from plan.workers import MODEL, request

from lmtrain.plan.known_models import teacher_config
from lmtrain.plan.request import Request, Target
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_topology


def test_a_request_survives_json_and_its_key_depends_on_the_program():
    plain = request()
    assert Request.from_json(plain.to_json()) == plain
    assert plain.run_config.model == RunConfig(model={"type": "llama", **MODEL}).model
    assert request(tracker={"type": "json"}, id="x").key == plain.key
    assert request(model_axis_size=2).key != plain.key
    assert plain.changed({"trainer.model_axis_size": 2}).key == request(model_axis_size=2).key
    assert plain.changed({}, steps=("eval",)).key != plain.key


def test_the_key_depends_on_the_config_of_a_teacher(tmp_path):
    config = RunConfig(model=MODEL, objective={"type": "distill", "teacher": str(tmp_path)})
    keys = set()
    for layers in (2, 3, 3):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
        asked = Request.of(config, 100, Target(), ("train",), True, teacher_config(config))
        assert Request.from_json(asked.to_json()) == asked
        keys.add(asked.key)
    assert len(keys) == 2


def test_the_devices_of_this_machine_count_once_they_are_known():
    assert Target().num_devices == 1
    assert Target(local=8).num_devices == 8
    assert Target(shape=(4,), local=8).num_devices == 4
    assert Target.of(find_topology("h100", devices=16)).num_devices == 16


def test_only_fake_devices_and_compilers_change_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    assert Target().environment(True) == {}
    gpus = Target.of(find_topology("h100", devices=16))
    for target, number in ((Target(shape=(4,)), 4), (gpus, 16)):
        flags = target.environment(False)["XLA_FLAGS"]
        assert flags == f"--a=1 --xla_force_host_platform_device_count={number}"
    assert gpus.environment(True)["CUDA_VISIBLE_DEVICES"] == ""
    assert "TPU_SKIP_MDS_QUERY" in Target.of(find_topology("v5e")).environment(True)
