"""Pairs of answers for tests of objectives: packed into windows, and as single sequences with TRL's formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def random_pairs(vocab: int, lengths: list[tuple[int, int, int]], seed: int = 0) -> list[list[tuple[np.ndarray, int]]]:
    """For each (prompt, chosen, rejected) of `lengths` in tokens, two answers: ids with the prompt, and its length."""
    rng = np.random.default_rng(seed)
    pairs = []
    for prompt, *answers in lengths:
        asked = rng.integers(0, vocab, prompt)
        pairs.append([(np.append(asked, rng.integers(0, vocab, size)), prompt) for size in answers])
    return pairs


def packed(windows: list[list[list[tuple[np.ndarray, int]]]], seq_len: int, reference: Any = None) -> dict[str, Any]:
    """The batch of windows of pairs. `reference` are the log-probabilities of all answers, in order."""
    shape = (len(windows), seq_len)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions", "documents")}
    batch |= {"loss_mask": np.zeros(shape, bool), "reference": np.zeros(shape, np.float32)}
    values = iter(np.zeros(1000) if reference is None else reference)
    for row, pairs in enumerate(windows):
        begin, number = 0, 0
        for ids, prompt in [answer for pair in pairs for answer in pair] + [(np.zeros(seq_len, int), seq_len)]:
            end = min(begin + len(ids), seq_len)
            batch["tokens"][row, begin:end] = ids[: end - begin]
            batch["loss_mask"][row, begin + prompt - 1 : end - 1] = prompt < len(ids)
            batch["segments"][row, begin:end] = begin
            batch["positions"][row, begin:end] = np.arange(end - begin)
            batch["documents"][row, begin:end] = number
            if prompt < len(ids):
                batch["reference"][row, begin] = next(values)
            begin, number = end, number + 1
    return batch


def answer_log_probs(apply: Any, params: Any, ids: np.ndarray, prompt: int) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities of an answer's tokens, and of all tokens but the first; of the sequence alone."""
    logits = apply(params, jnp.asarray(ids)[None])[0]
    every = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), jnp.asarray(ids)[1:, None], axis=1)[:, 0]
    return every[prompt - 1 :], every


def trl_loss(kind: str, beta: float, other: float, apply: Any, params: Any, pairs: Any, reference: Any) -> Any:
    """The mean over pairs of TRL's loss (`dpo_loss` of its DPO trainer, `odds_ratio_loss` of its ORPO trainer,
    `cpo_loss` of its CPO trainer), and its accuracy. `reference` are the summed log-probabilities of all answers;
    `other` is the label smoothing, of SimPO its gamma."""
    losses, right = [], []
    for number, pair in enumerate(pairs):
        (chosen, with_prompt), (rejected, _) = (answer_log_probs(apply, params, *answer) for answer in pair)
        of_reference = reference[2 * number : 2 * number + 2]
        if kind == "orpo":
            c, r = chosen.mean(), rejected.mean()
            log_odds = (c - r) - (jnp.log1p(-jnp.exp(c)) - jnp.log1p(-jnp.exp(r)))
            losses.append(-with_prompt.mean() - beta * jax.nn.log_sigmoid(log_odds))
            right.append(c > r)
            continue
        if kind == "simpo":
            margin = chosen.mean() - rejected.mean()
            losses.append(-jax.nn.log_sigmoid(beta * (margin - other / beta)))
            right.append(margin > 0)
            continue
        sizes = (len(chosen), len(rejected)) if kind == "ipo" else (1, 1)
        logits = (chosen.sum() - of_reference[0]) / sizes[0] - (rejected.sum() - of_reference[1]) / sizes[1]
        if kind == "ipo":
            losses.append((logits - 1 / (2 * beta)) ** 2)
        else:
            losses.append(-jax.nn.log_sigmoid(beta * logits) * (1 - other) - jax.nn.log_sigmoid(-beta * logits) * other)
        right.append(logits > 0)
    return jnp.stack(losses).mean(), jnp.stack(right).mean()
