"""Without the name of a model or data set on the Hugging Face Hub, lmtrain makes no network connection."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]  # in the suite: test_shipped_config.py, without a network

# A DNS look-up or a connection ends the process with exit code 99 and a message.
WATCHED = """
import os, socket, sys

def refuse(self, address, *rest):
    if self.family != socket.AF_UNIX:
        os.write(2, f"network: connection to {address}".encode())
        os._exit(99)
    return connect(self, address, *rest)

def look_up(name, *rest, **more):
    os.write(2, f"network: look-up of {name}".encode())
    os._exit(99)

connect, socket.socket.connect, socket.getaddrinfo = socket.socket.connect, refuse, look_up
from lmtrain.cli import main
sys.argv = ["lmtrain", *sys.argv[1:]]
main()
"""


def watched(folder, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)


def test_training_exporting_and_initializing_from_a_folder_make_no_connection(settings, write_config, tmp_path):
    settings["trainer"] |= {"num_train_steps": 2, "steps_per_eval": 100, "id": "alone"}
    write_config(settings | {"hf_save_path": "exports"})
    trained = watched(tmp_path, "train", "tiny.yaml")
    assert trained.returncode == 0, trained.stderr
    flags = ["--initialize_from_hf", "exports/alone/step-2", "--trainer.id", "again"]
    again = watched(tmp_path, "train", "tiny.yaml", *flags)
    assert again.returncode == 0, again.stderr
    assert "the weights of exports/alone/step-2" in again.stderr


def test_the_name_of_a_model_on_the_hub_makes_a_connection(settings, write_config, tmp_path):
    write_config(settings)
    connected = watched(tmp_path, "train", "tiny.yaml", "--initialize_from_hf", "acme/tiny")
    assert connected.returncode == 99
    assert "network: look-up of huggingface.co" in connected.stderr
