"""Loading a config: look-up and priorities."""

import pytest

from lmtrain.config.load import LoadedConfig, find_config, load_config
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_overrides_win_over_the_file_and_the_file_over_defaults(folder):
    (folder / "c.yaml").write_text("model: {seq_len: 32, num_layers: 2}\n")
    model = load_config(RunConfig, "c.yaml", [("model.num_layers", "3")]).config.model
    assert (model.seq_len, model.num_layers, model.num_heads) == (32, 3, 12)


def test_an_empty_config_is_all_defaults(folder):
    (folder / "c.yaml").write_text("")
    assert load_config(RunConfig, "c.yaml").config == RunConfig()


@pytest.mark.parametrize("written", ["dir/c.yaml", "dir/c", "./dir/c"])
def test_a_config_is_found_with_or_without_its_extension(folder, written):
    (folder / "dir").mkdir()
    (folder / "dir" / "c.yaml").write_text("")
    assert load_config(RunConfig, written).stem == "c"
    assert find_config(written).endswith("dir/c.yaml")


def test_a_file_in_the_working_directory_wins_over_a_shipped_config(folder):
    assert find_config("gpt2_nano") != "gpt2_nano.yaml"
    (folder / "gpt2_nano.yaml").write_text("")
    assert find_config("gpt2_nano") == "gpt2_nano.yaml"


@pytest.mark.parametrize(("config", "stem"), [("memory://d/run.v2.yaml", "run.v2"), ("memory://d/x", "x")])
def test_a_url_is_taken_as_given(config, stem):
    import fsspec

    with fsspec.open(config, "w") as file:
        file.write("trainer: {seed: 3}\n")
    loaded = load_config(RunConfig, config)
    assert (loaded.config.trainer.seed, loaded.stem, loaded.path) == (3, stem, config)
    assert LoadedConfig(RunConfig(), path=f"{config}?version=1&X-Amz-Signature=a%2Fb.c").stem == stem


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gpt2_nan", "gpt2_nan: no such config; did you mean 'gpt2_nano'?"),
        ("gpt2_nan.yaml", "gpt2_nan.yaml: no such config; did you mean 'gpt2_nano'?"),
        ("zzz", "zzz: no such config; give a path, or one of: backpack_nano, "),
        ("", ": no such config; give a path, or one of: "),
        (".", ".: no such config; give a path, or one of: "),
    ],
)
def test_a_missing_config(folder, config, message):
    with pytest.raises(UserError) as caught:
        find_config(config)
    assert str(caught.value).startswith(message)
