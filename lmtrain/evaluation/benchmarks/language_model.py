"""The model as lm-eval sees it: texts are encoded as lm-eval's own `hf` model does it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.scorer import Question, Scorer, lengths, rows_for
from lmtrain.generation.decode import GreedyDecoder
from lmtrain.hf.chat_template import TemplateError, template_errors
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

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
