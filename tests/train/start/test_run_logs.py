"""The files of a run in its log folder."""

import os

import pytest
import yaml
from chat_tokenizer import MARKED, PLAIN, write_chat_tokenizer

from lmtrain.config.load import LoadedConfig
from lmtrain.hf.tokenizer import Tokenizer, load_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE
from lmtrain.weights.run_files import keep_config, keep_tokenizer, kept_tokenizer, open_log


@pytest.fixture
def run(tmp_path):
    """`run(data)`: a run that logs into `logs`."""

    def make(**data):
        config = RunConfig.model_validate({"data": data, "trainer": {"log_dir": str(tmp_path / "logs"), "seed": 5}})
        return Run(LoadedConfig(config, path="one.yaml"), "one")

    return make


def test_the_config_is_kept_as_it_is_executed_and_temporary_files_are_removed(run, tmp_path):
    keep_config(run())
    path = tmp_path / "logs" / "one" / "config.yaml"
    assert RunConfig.model_validate(yaml.safe_load(path.read_text())) == run().config
    left = path.with_name("config.yaml.tmp-1")
    left.touch()
    keep_config(run())
    assert os.listdir(path.parent) == ["config.yaml"]


def test_the_tokenizer_is_kept_with_the_template_of_the_run(run, tmp_path):
    tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer", PLAIN)))
    (tmp_path / "marked.jinja").write_text(MARKED)
    one = run(train_urls=["x"], format={"type": "chat", "chat_template": str(tmp_path / "marked.jinja")})
    keep_tokenizer(one, tokenizer)
    assert load_tokenizer(kept_tokenizer(one)).identity == tokenizer.identity
    assert (tmp_path / "logs/one/tokenizer/chat_template.jinja").read_text() == MARKED


def test_token_ids_have_no_tokenizer_to_keep(run, tmp_path):
    keep_tokenizer(
        run(), Tokenizer(path="passthrough", library=None, vocab_size=9, eos_id=None, bos_id=None, fingerprint="none")
    )
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("write", [keep_config, lambda run: open_log(run, ALONE)], ids=["config", "log"])
def test_a_folder_that_cannot_be_written_is_an_error_with_its_setting(run, tmp_path, write):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError, match=r"trainer\.log_dir: .*logs cannot be created: "):
        write(run())
