"""README.md of an export: what it says, and that a page with changes of a user is kept."""

import dataclasses
import json

import pytest
import yaml
from conftest import TOKENIZER, tiny_settings

from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.run.config import RunConfig, resolved
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact
from lmtrain.runtime.storage import read_bytes, write_bytes
from lmtrain.weights.model_card import CARD, ModelCard
from lmtrain.weights.write_export import Export, write_export


def card(tmp_path, **trainer):
    settings = tiny_settings()
    settings["trainer"] |= {"log_dir": str(tmp_path / "logs"), **trainer}
    config = RunConfig(**settings)
    return ModelCard(run="one", config=resolved(config), initial=None)


def cells(page: bytes) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in page.decode().splitlines() if line.startswith("| ")]
    return dict(row for row in rows if len(row) == 2)


def test_the_page_has_steps_tokens_losses_data_and_settings(tmp_path):
    (tmp_path / "logs").mkdir()
    lines = [
        {"step": 0, "parameter_count": 7},
        {"step": 1, "train/loss": 5.5, "eval/loss": 5.4},
        {"step": 2, "train/loss": 4.25, "eval/loss": 4.5, "eval/other/loss": 4.75, "eval/tokens": 1234.0},
        {"step": 3, "train/loss": 3.125, "eval/loss": None},
        {"step": 4, "train/loss": 1.0, "eval/loss": 1.0},  # after the export
    ]
    (tmp_path / "logs" / "one.metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = card(tmp_path, train_batch_size=[{"start": 0, "value": 2}, {"start": 2, "value": 8}])
    page = made.page(3, "float32", 1234, is_adapter=False)
    found = cells(page)
    assert found["Steps"].startswith("3 of ")
    assert found["Training tokens"].startswith(f"{(2 * 2 + 8) * made.config['model']['seq_len']:,},")
    assert {name: value for name, value in found.items() if "`" in name} == {
        "`train/loss`, step 3": "3.1250",
        "`eval/loss`, step 2": "4.5000",
        "`eval/other/loss`, step 2": "4.7500",
        "`eval/tokens`, step 2": "1,234",
    }
    assert any(name.startswith("Data") for name in found)
    text = page.decode()
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "transformers"
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert settings == made.config
    assert made.page(3, "float32", 1234, is_adapter=False) == page


def test_the_page_of_adapters_names_their_base_on_the_hub(tmp_path):
    page = card(tmp_path).page(1, "float32", 10, is_adapter=True, base="owner/model").decode()
    header = yaml.safe_load(page.split("---")[1])
    assert (header["base_model"], header["library_name"]) == ("owner/model", "peft")


def test_the_page_has_no_secret_and_the_same_order_of_sources_whatever_the_config_has(tmp_path):
    made = card(tmp_path)
    source = {"demo": None, "id": None}
    configs = {"web": source | {"train_urls": ["https://me:sesame@host/a"]}, "two": source | {"id": "data"}}
    pages = []
    for order in (configs, dict(sorted(configs.items()))):
        data = made.config["data"] | {"configs": redact(order), "train_weights": {"web": 0.75, "two": 0.25}}
        ref = "s3://key:sesame@bucket/model"
        pages.append(
            ModelCard(run="one", config={**made.config, "data": data}, initial=ref).page(1, "float32", 1, True)
        )
    assert pages[0] == pages[1]
    text = pages[0].decode()
    assert "sesame" not in text
    assert "s3://***@bucket/model" in text
    assert cells(pages[0])["Data web"].endswith("weight 0.75")


def test_an_average_has_no_losses_of_a_single_step(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "one.metrics.jsonl").write_text('{"step": 2, "train/loss": 4.25, "eval/loss": 4.5}\n')
    made = dataclasses.replace(card(tmp_path), averaged=(1, 2))
    found = cells(made.page(2, "float32", 1, is_adapter=False))
    assert found["Average of the steps"] == "1, 2"
    assert not [name for name in found if "loss" in name]


def test_fences_in_settings_do_not_break_the_page(tmp_path):
    made = ModelCard(
        run="one",
        config={**card(tmp_path).config, "data": {"tokenizer": "a|b", "train_urls": ["x```y"], "configs": None}},
        initial=None,
    )
    page = made.page(1, "float32", 1, is_adapter=False).decode()
    settings = page.partition("````yaml\n")[2].partition("````\n")[0]
    assert yaml.safe_load(settings)["data"]["train_urls"] == ["x```y"]
    assert "a\\|b" in page


@pytest.mark.parametrize("place", ["folder", "URL"])
def test_an_export_replaces_its_own_page_but_not_one_with_changes(tmp_path, place):
    output = str(tmp_path / "model") if place == "folder" else f"memory://{tmp_path}/card"
    export = Export(
        pieces=[],
        config={"model_type": "gpt2"},
        extra_files={},
        tokenizer=load_tokenizer(str(TOKENIZER)),
        dtype="float32",
    )
    for step in (1, 2):
        write_export(output, export.with_card(card(tmp_path), step), [])
        assert cells(read_bytes(f"{output}/{CARD}"))["Steps"].startswith(f"{step} of ")
    edited = read_bytes(f"{output}/{CARD}").replace(b"# one", b"# My model")
    write_bytes(f"{output}/{CARD}", edited)
    with pytest.raises(UserError, match=CARD):
        write_export(output, export.with_card(card(tmp_path), 3), [])
    assert read_bytes(f"{output}/{CARD}") == edited
