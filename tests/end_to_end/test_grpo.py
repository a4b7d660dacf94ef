"""Reinforcement learning as in the guide: TRL's GRPO raises the rewards of an export, and lmtrain reads the result."""

import io
import json

import numpy as np
import pytest
from pages import ROOT, follow, run_as_written
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmtrain.weights.trained_model import from_hf


@pytest.mark.long
def test_rewards_rise_and_the_model_is_the_same_in_lmtrain_and_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())  # of a conversation: it ends
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more threads of torch wait for each other
    outputs = dict(follow(tmp_path, ROOT / "configs" / "guide" / "rl.md"))
    before, after = (float(outputs["grpo.py"].partition(words)[2][:4]) for words in ("to each sum: ", ", then "))
    assert before < 0.65 < 0.85 < after
    assert outputs['lmtrain generate --hf rl_model --chat --temperature 0 --prompt "12+7"'] == "19\n"
    folder = str(tmp_path / "rl_model")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    chats = [json.loads(line)["prompt"] for line in (tmp_path / "right.jsonl").read_text().splitlines()]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    printed = run_as_written(tmp_path, "lmtrain generate --hf rl_model --prompts prompts.jsonl --temperature 0").stdout
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    replies = theirs.generate(**batch, max_new_tokens=40, do_sample=False)[:, batch.input_ids.shape[1] :]
    expected = tokenizer.batch_decode(replies, skip_special_tokens=True)
    assert [json.loads(line)["text"] for line in printed.splitlines()] == expected
    model, params, _ = from_hf(folder).load()
    logits = theirs(batch.input_ids).logits.detach().numpy()
    found = model.apply({"params": params}, batch.input_ids.numpy())[..., : logits.shape[-1]]
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)
