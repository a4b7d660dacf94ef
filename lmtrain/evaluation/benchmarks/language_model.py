"""The model as lm-eval sees it: texts are encoded as lm-eval's own `hf` model does it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lmtrain.evaluation.eval_step import read_ahead
from lmtrain.evaluation.interface import Context
from lmtrain.generation.decode import GreedyDecoder
from lmtrain.hf.chat_template import TemplateError, template_errors
from lmtrain.models.interface import MAIN, LanguageModel, outputs_of
from lmtrain.models.params import cast_to_compute
from lmtrain.objectives.row_losses import TargetScores, score_targets
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout, MeshFunction, platform_of
from lmtrain.sharding.placement import LocalPart, constrain

# Log-likelihoods of many token sequences, in batches of similar lengths.
#
# For the prompt "2 + 2 =" and the choices "4", "5" and "2 2", the questions are
#
#     Question(tokens=("2", "+", "2", "="), targets=("4",))
#     Question(tokens=("2", "+", "2", "="), targets=("5",))              the same tokens: one row of a batch for both
#     Question(tokens=("2", "+", "2", "=", "2"), targets=("2", "2"))     the targets of the last two positions

# The shortest sequences of a batch: kernels of accelerators need multiples of 128.
_MIN_LENGTH = {"cpu": 32, "gpu": 128, "tpu": 128}
# Targets of a sequence that are scored in the small form of the step; more take the large form, with all positions.
_SMALL = 32


class Question(NamedTuple):
    """Tokens that the model reads, and targets: the last of them follows the last token, and so on backwards."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


class Likelihood(NamedTuple):
    """The sum of the targets' log-probabilities, and whether each target is the most likely token."""

    log_likelihood: float
    is_greedy: bool


@dataclass(kw_only=True)
class _ScoredRow:
    """One sequence, and the questions about it: those with the same tokens share it."""

    tokens: tuple[int, ...]
    questions: list[int]
    positions: list[int]
    targets: list[int]


class Scorer:
    """Answers questions with the model of `context`. Lengths are rounded up to few sizes, so few programs compile.

    Every process asks the same questions and gets all answers.
    """

    def __init__(self, context: Context):
        self._context = context
        self._step = build_score_step(context.model, context.layout, context.compute_dtype, context.xla_options)
        kind = platform_of(context.layout.mesh.devices.flat[0])
        self._lengths = lengths(context.seq_len, _MIN_LENGTH.get(kind, 128))

    def score(
        self, params: Any, questions: Sequence[Question], advance: Callable[[int], None] = lambda answered: None
    ) -> list[Likelihood]:
        """The answers in the order of the questions; `advance` is called with the number of those of each batch."""
        answers = [Likelihood(0.0, True)] * len(questions)
        batches = list(self._batches(questions))
        counts = iter([sum(len(row.questions) for row in rows) for rows, _, _ in batches])

        def between() -> None:
            self._context.check_stop()
            advance(next(counts))

        placed = (self._place(*batch) for batch in batches)
        for (rows, _, _), scores in zip(batches, read_ahead(self._step, params, placed, between), strict=True):
            log_prob, is_best = np.asarray(scores.log_prob, np.float64), np.asarray(scores.is_best)
            for number, row in enumerate(rows):
                start = 0
                for question in row.questions:
                    end = start + len(questions[question].targets)
                    own = slice(start, end)
                    answers[question] = Likelihood(float(log_prob[number, own].sum()), bool(is_best[number, own].all()))
                    start = end
        return answers

    def _batches(self, questions: Sequence[Question]) -> Iterator[tuple[list[_ScoredRow], int, int]]:
        """Rows with the length of their batch and the number of rows, the longest first."""
        rows = _rows(questions)
        for is_small in (False, True):
            left = sorted(
                (row for row in rows if (len(row.targets) <= _SMALL) == is_small), key=lambda row: -len(row.tokens)
            )
            while left:
                length = next(size for size in self._lengths if size >= len(left[0].tokens))
                size = self._rows_at_once(length, len(left))
                yield left[:size], length, size
                left = left[size:]

    def _rows_at_once(self, length: int, wanted: int) -> int:
        """As many tokens as a batch of evaluation has, but not many more rows than are wanted."""
        most = self._context.batch_size * max(1, self._context.seq_len // length)
        return rows_for(wanted, most, self._context.layout.num_batch_shards)

    def _place(self, rows: list[_ScoredRow], length: int, size: int) -> Any:
        width = max(len(row.targets) for row in rows)
        width = _SMALL if width <= _SMALL else -(-width // length) * length
        batch = {
            "tokens": np.zeros((size, length), np.int32),
            "positions": np.zeros((size, width), np.int32),
            "targets": np.zeros((size, width), np.int32),
        }
        for number, row in enumerate(rows):
            batch["tokens"][number, : len(row.tokens)] = row.tokens
            batch["positions"][number, : len(row.positions)] = row.positions
            batch["targets"][number, : len(row.targets)] = row.targets
        # lengths of any size need not divide over devices
        parts = {name: LocalPart.of(self._context.layout.rows, *array.shape) for name, array in batch.items()}
        return {name: part.place(part.cut({name: batch[name]}))[name] for name, part in parts.items()}


def rows_for(wanted: int, most: int, shards: int) -> int:
    """`wanted` rounded up to one of few numbers of rows, which divide over `shards` devices; at most `most`."""
    sizes = (size * shards for power in range(64) for size in sorted({2**power, 3 * 2**power // 2}))
    return min(next(size for size in sizes if size >= wanted), most)


def lengths(longest: int, shortest: int) -> list[int]:
    """The sizes that sequences are rounded up to, ascending: `shortest` times 1, 2, 3, 4, 6, 8, 12, ..., and `longest`.

    Less than half of a sequence is padding, or it has the shortest size.
    """
    sizes = {longest}
    for power in range(longest.bit_length()):
        sizes |= {size for size in (shortest * 2**power, shortest * 3 * 2**power) if size < longest}
    return sorted(sizes)


def _rows(questions: Sequence[Question]) -> list[_ScoredRow]:
    """One row for each different sequence of tokens, with as many questions as fit into few targets."""
    rows: list[_ScoredRow] = []
    last: dict[tuple[int, ...], _ScoredRow] = {}
    for number, (tokens, targets) in enumerate(questions):
        row = last.get(tokens)
        if row is None or len(row.targets) + len(targets) > _SMALL:
            row = last[tokens] = _ScoredRow(tokens=tokens, questions=[], positions=[], targets=[])
            rows.append(row)
        row.questions.append(number)
        row.positions += range(len(tokens) - len(targets), len(tokens))
        row.targets += targets
    return rows


def build_score_step(
    model: LanguageModel, layout: Layout, compute_dtype: str, options: Mapping[str, Any] | None = None
) -> MeshFunction:
    """The jitted (params, batch) -> `TargetScores` [B, T], without dropout.

    The batch has `tokens` [B, S], `positions` [B, T], and `targets` [B, T], all int32: target t of a sequence is a
    candidate for the token after position `positions[t]`. Only the logits of these positions are computed.
    """

    def score(params: Any, batch: Mapping[str, jax.Array]) -> TargetScores:
        variables = {"params": cast_to_compute(params, compute_dtype)}
        only_tokens = {"tokens": batch["tokens"]}
        head = model.apply(variables, only_tokens, True, method=outputs_of)[MAIN]
        chosen = jnp.take_along_axis(head.hidden, batch["positions"][:, :, None], axis=1)
        chosen = constrain(chosen, "act_batch", "act_seq", None)
        return score_targets(head.replace(hidden=chosen), batch["targets"])

    return MeshFunction(layout, jax.jit(score, out_shardings=layout.replicated, compiler_options=dict(options or {})))


_MIN_CACHE = 64
# lm-eval's default of max_gen_toks.
_MAX_NEW_TOKENS = 256
# Settings of generation that change nothing in greedy decoding.
_WITHOUT_EFFECT = {"temperature", "top_p", "top_k"}


class _Prompt(NamedTuple):
    """A prompt to continue until one of the texts `until` or `max_new` tokens; `number` of the request."""

    number: int
    ids: list[int]
    max_new: int
    until: tuple[str, ...]


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Answers lm-eval's requests with the parameters `params`, which the owner sets.

    Every process gets the same requests and all results, so lm-eval sees one process of one. `tokenizer` is the one of
    transformers.
    """

    def __init__(self, context: Context, tokenizer: Any, max_length: int):
        super().__init__()
        self.tokenizer = tokenizer
        self.params: Any = None
        self.max_length = max_length
        self._context = context
        self._scorer = Scorer(context)
        self._decoder = GreedyDecoder(context.model, context.layout, context.compute_dtype, context.xla_options)
        if self.prefix_token_id is None:
            raise UserError(
                f"eval_harness: the tokenizer {context.tokenizer.path} has neither a bos nor an eos token, which "
                "benchmarks need before an empty context"
            )

    @property
    def eot_token_id(self) -> int:
        number: int = self.tokenizer.eos_token_id
        return number

    @property
    def prefix_token_id(self) -> int:
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._context.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; the tokenizer adds its special tokens, unless the text starts with one already."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        likelihoods: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return likelihoods

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        questions = [self._question(context, continuation) for _, context, continuation in requests]
        cut = sum(len(request[1]) + len(request[2]) > self.max_length + 1 for request in requests)
        if cut:
            log.warning(
                f"lm-eval: {cut:,} of {len(requests):,} requests are longer than {self.max_length} tokens and lose "
                "their start"
            )
        answers = self._scorer.score(self.params, questions, self._counter("likelihoods", len(questions)))
        return [(answer.log_likelihood, answer.is_greedy) for answer in answers]

    def _question(self, context: list[int], continuation: list[int]) -> Question:
        if not continuation:
            raise UserError("lm-eval: a continuation without tokens; check the choices and targets of the task")
        if len(continuation) > self.max_length:
            raise UserError(
                f"lm-eval: a continuation of {len(continuation)} tokens is longer than the {self.max_length} tokens "
                "that the model can read; raise eval_harness.max_eval_length or use a model with a longer seq_len"
            )
        return Question(tuple((context + continuation)[-(self.max_length + 1) :][:-1]), tuple(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        questions: list[Question] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, windows):
                questions.append(self._question(context, continuation))
                owners.append(number)
        answers = self._scorer.score(self.params, questions, self._counter("windows", len(questions)))
        totals = [0.0] * len(requests)
        for number, answer in zip(owners, answers, strict=True):
            totals[number] += answer.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy texts. Raises the errors of `generation_limits`."""
        texts = [""] * len(requests)
        prompts = [self._prompt(number, request) for number, request in enumerate(requests)]
        prompts.sort(key=lambda prompt: (prompt.max_new, prompt.until, -len(prompt.ids)))
        advance = self._counter("texts", len(requests))
        while prompts:
            same = [prompt for prompt in prompts[: self._context.batch_size] if prompt[2:] == prompts[0][2:]]
            for prompt, text in zip(same, self._continue(same), strict=True):
                texts[prompt.number] = text
            advance(len(same))
            prompts = prompts[len(same) :]
        return texts

    def _prompt(self, number: int, request: Instance) -> _Prompt:
        text, settings = request.args
        max_new, until = generation_limits(str(request.task_name), settings, self.max_length)
        end_of_text = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = tuple(handle_stop_sequences(list(until), eos=end_of_text))
        room = self.max_length - max_new
        bos = self.tokenizer.bos_token
        ids = self.tokenizer.encode(text, add_special_tokens=not has_bos_prefix(text, bos))
        return _Prompt(number, (ids or [self.prefix_token_id])[-room:], max_new, until)

    def _continue(self, prompts: Sequence[_Prompt]) -> list[str]:
        """The texts after prompts with the same `until` and `max_new`."""
        rows = rows_for(len(prompts), self._context.batch_size, self._context.layout.num_batch_shards)
        ids = [prompt.ids for prompt in prompts] + [prompts[-1].ids] * (rows - len(prompts))
        max_new, until = prompts[0].max_new, prompts[0].until
        longest = max(map(len, ids)) + max_new
        length = next(size for size in lengths(self._context.seq_len, _MIN_CACHE) if size >= longest)

        def is_complete(row: int, new: list[int]) -> bool:
            return row >= len(prompts) or self.eot_token_id in new or any(stop in self._text(new) for stop in until)

        continuations = self._decoder(self.params, ids, max_new, length, is_complete, self._context.check_stop)
        return [postprocess_generated_text(self._text(new), list(until), None) for new in continuations[: len(prompts)]]

    def _text(self, ids: list[int]) -> str:
        end = ids.index(self.eot_token_id) if self.eot_token_id in ids else len(ids)
        text: str = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        try:
            with template_errors():
                text: str = self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            return text
        except TemplateError as error:
            raise UserError(f"eval_harness.apply_chat_template: the chat template fails: {error}") from None

    def _counter(self, kind: str, total: int) -> Callable[[int], None]:
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            self._context.progress(done, total, kind)

        return advance


def generation_limits(task: str, settings: dict[str, Any], max_length: int) -> tuple[int, tuple[str, ...]]:
    """The maximum number of new tokens, and the texts that end a generation, from `generation_kwargs` of a task.

    Raises `UserError` for a task that samples or sets what is not supported, and if no room is left for a prompt.
    """
    kept: dict[str, Any] = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
    max_new, until = kept.pop("max_gen_toks"), handle_stop_sequences(kept.pop("until", None), eos=None)
    if kept.pop("do_sample", False):
        raise UserError(
            f"eval_harness: the task {task} samples (temperature {kept.get('temperature')}), but only greedy decoding "
            "is supported; remove the task"
        )
    if others := sorted(set(kept) - _WITHOUT_EFFECT):
        raise UserError(f"eval_harness: the task {task} sets generation_kwargs {', '.join(others)}: not supported")
    if max_new >= max_length:
        raise UserError(
            f"eval_harness: the task {task} generates up to {max_new} tokens (max_gen_toks), which leaves no room for "
            f"a prompt in {max_length} tokens; remove the task, or use a model with a longer seq_len"
        )
    return max_new, tuple(until)
