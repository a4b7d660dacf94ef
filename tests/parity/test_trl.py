"""Preference tuning against TRL itself: tokens of its data formats, and losses and gradients of its trainers."""

import json
import random
from collections import defaultdict
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from chat_tokenizer import PLAIN, write_chat_tokenizer
from datasets import Dataset
from hf_tensors import to_hf
from objectives.pairs_of_answers import answer_log_probs, packed, random_pairs
from parity.variants import VOCAB, make
from transformers import AutoTokenizer

from lmtrain.data.config import DataConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.interface import outputs_of
from lmtrain.models.registry import hf_family
from lmtrain.objectives.config import DpoConfig, OrpoConfig, SimpoConfig
from lmtrain.preprocess.recipe import chat_template_of
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.tokenize import tokenize

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of TRL, accelerate and torch
]

BETA, GAMMA = 0.4, 0.3
WORDS = ["a", "star", "counts", "the", "robot", "café", "\n", "  ", "x=1", "Nobody", ".", "answer", "42"]


def records(form: str) -> list[dict]:
    """Random records of one of TRL's forms."""
    rng = random.Random(form)

    def text(*, after_space: bool) -> str:
        glue = rng.choice([" ", ""])
        words = [rng.choice(WORDS) for _ in range(rng.randint(1, 9))]
        words += [] if "".join(words).strip() else ["star"]  # blank answers are errors here
        return (" " if after_space else "") + glue.join(words)

    def message(role: str) -> dict:
        return {"role": role, "content": text(after_space=False)}

    found = []
    for _ in range(60):
        if form in ("texts", "implicit texts"):
            prompt, answers = text(after_space=False), [text(after_space=rng.random() < 0.5) for _ in range(2)]
            if form == "texts":
                found.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1] + "<|endoftext|>"})
            elif answers[0].strip() != answers[1].strip():
                found.append({"chosen": prompt + answers[0], "rejected": prompt + answers[1]})
            continue
        prompt = [message("user")] if rng.random() < 0.5 else [message("system"), message("user")]
        chosen, rejected = [message("assistant")], [message("assistant")]
        if form == "messages":
            found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        elif chosen[0]["content"].strip() != rejected[0]["content"].strip():
            found.append({"chosen": prompt + chosen, "rejected": prompt + rejected})
    return found


@pytest.mark.parametrize("form", ["texts", "implicit texts", "messages", "implicit messages"])
def test_tokens_and_targets_are_those_of_trl(tmp_path, form):
    from trl import DPOConfig, DPOTrainer

    folder = write_chat_tokenizer(tmp_path / "tokenizer", PLAIN)
    theirs, rows = AutoTokenizer.from_pretrained(folder), records(form)
    arguments = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_length=None)
    dataset = Dataset.from_list(json.loads(json.dumps(rows)))
    trainer = SimpleNamespace(_tokenizer=theirs)
    expected = DPOTrainer._prepare_dataset(trainer, dataset, theirs, arguments, "train")

    config = DataConfig(tokenizer=str(folder), format={"type": "preference"})
    tokenizer = load_tokenizer(str(folder))
    reader = record_reader(config, tokenizer.vocab_size, chat_template_of(config))
    batch = tokenize([reader.read(row) for row in rows], tokenizer, config)
    ends = np.cumsum(batch.lengths)
    for number, row in enumerate(expected):
        for answer, name in enumerate(("chosen_ids", "rejected_ids")):
            end = ends[2 * number + answer]
            part = slice(end - batch.lengths[2 * number + answer], end)
            assert batch.tokens[part].tolist() == row["prompt_ids"] + row[name], rows[number]
            is_target = [False] * len(row["prompt_ids"]) + [True] * len(row[name])
            assert batch.targets[part].tolist() == is_target, rows[number]


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "orpo", "simpo"])
@pytest.mark.parametrize("name", ["gpt2", "llama-grouped", "mpt-6-heads"])
def test_losses_and_gradients_are_those_of_trl(in_torch, tmp_path, name, kind):
    """DPO by the trainer's own loss of a batch; ORPO and SimPO by the trainers' losses of log-probabilities."""
    variant = make(name)
    ours, reference = variant.params, jax.tree.map(lambda leaf: leaf * 0.9, variant.params)
    pairs = random_pairs(VOCAB, [(3, 4, 2), (2, 3, 5)])
    apply = jax.jit(lambda params, ids: variant.model.apply({"params": params}, ids)[..., :VOCAB])
    of_reference = [float(answer_log_probs(apply, reference, *answer)[0].sum()) for pair in pairs for answer in pair]
    others = {"orpo": OrpoConfig(beta=BETA), "simpo": SimpoConfig(beta=BETA, gamma=GAMMA)}
    objective = (others.get(kind) or DpoConfig(beta=BETA, loss=kind)).build(0.0)
    batch = packed([pairs], 24, of_reference)

    def loss(params):
        terms = objective.loss_sum(variant.model.apply({"params": params}, batch, True, method=outputs_of), batch)
        return terms.total / 2, terms.logged

    (found, logged), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(ours)
    model = in_torch(variant)
    total, metrics = {"orpo": orpo, "simpo": simpo}.get(kind, dpo)(
        model, padded(pairs), torch.tensor(of_reference), kind
    )
    total.backward()
    assert float(found) == pytest.approx(total.item(), rel=1e-5)
    for metric, expected in metrics.items():
        assert float(logged[metric]) / 2 == pytest.approx(expected, rel=1e-4), metric
    table = hf_family(variant.config.type).table(variant.config)
    mapped = to_hf(table, jax.device_get(gradients), variant.config.num_layers, VOCAB)
    theirs = dict(model.named_parameters())
    for path, gradient in mapped.items():
        other = theirs[path].grad.numpy()
        assert np.abs(gradient - other).max() < 1e-5 * max(1, np.abs(other).max()), path


def padded(pairs) -> dict[str, torch.Tensor]:
    """A batch as TRL's collator makes it: the chosen answers, then the rejected ones."""
    answers = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    length = max(len(ids) for ids, _ in answers)
    names = ("input_ids", "attention_mask", "completion_mask")
    batch = {name: torch.zeros(len(answers), length, dtype=torch.long) for name in names}
    for row, (ids, prompt) in enumerate(answers):
        batch["input_ids"][row, : len(ids)] = torch.from_numpy(ids)
        batch["attention_mask"][row, : len(ids)] = 1
        batch["completion_mask"][row, prompt : len(ids)] = 1
    return batch


def dpo(model, batch, of_reference, kind):
    """The loss of TRL's trainer, and what it logs."""
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    logged = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        model=model, accelerator=accelerator, beta=BETA, loss_types=[kind], loss_weights=[1.0], ld_alpha=None,
        f_divergence_type="reverse_kl", precompute_ref_logps=True, aux_loss_enabled=False, use_weighting=False,
        label_smoothing=0.0, _metrics=logged, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    stored = {"ref_chosen_logps": of_reference[0::2], "ref_rejected_logps": of_reference[1::2]}
    loss = DPOTrainer._compute_loss(trainer, model, batch | stored, False)
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")
    return loss, {name: logged["eval" if not model.training else "train"][name][0] for name in names}


def orpo(model, batch, _, kind):
    """The mean loss over pairs from the functions of TRL's trainer; the trainer itself averages the cross-entropy over
    the tokens of all pairs."""
    from trl.experimental.orpo import ORPOTrainer

    number = len(batch["input_ids"]) // 2
    ids, attention = batch["input_ids"], batch["attention_mask"]
    logits = model(ids, attention_mask=attention).logits
    mean = ORPOTrainer.get_batch_logps(logits, torch.where(batch["completion_mask"] == 1, ids, -100), True)
    every = ORPOTrainer.get_batch_logps(logits, torch.where(attention == 1, ids, -100), True)
    trainer = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    losses, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(trainer, mean[:number], mean[number:])
    metrics = {"rewards/chosen": chosen.mean().item(), "rewards/rejected": rejected.mean().item()}
    return -every[:number].mean() - losses.mean(), metrics | {"nll_loss": -every[:number].mean().item()}


def simpo(model, batch, _, kind):
    """The mean loss over pairs from the functions of TRL's trainer."""
    from trl.experimental.cpo import CPOTrainer

    number = len(batch["input_ids"]) // 2
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = torch.where(batch["completion_mask"] == 1, batch["input_ids"], -100)
    mean = CPOTrainer.get_batch_logps(logits, labels, True)
    trainer = SimpleNamespace(
        beta=BETA,
        simpo_gamma=GAMMA,
        loss_type=kind,
        label_smoothing=0.0,
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, mean[:number], mean[number:])
    return losses.mean(), {"rewards/chosen": chosen.mean().item(), "rewards/rejected": rejected.mean().item()}
