"""Settings of benchmarks, `eval_harness`. Names follow Levanter, and lm-eval where Levanter has none."""

from typing import Any

from lmtrain.config.section import FreeText, Section, changeable
from lmtrain.runtime.errors import UserError


class BenchmarkTask(Section):
    """One task with settings of its own."""

    task: str = changeable(
        min_length=1, description="Name of a task, group or tag of lm-eval, or the path of a YAML file"
    )
    task_alias: str | None = changeable(
        None, min_length=1, description="Name of the task in metrics; null: its own name"
    )
    num_fewshot: int | None = changeable(
        None, ge=0, description="Number of examples in the prompt; null: the task's own"
    )
    description: FreeText | None = changeable(
        None, description="Text at the start of every prompt; null: the task's own"
    )
    doc_to_text: FreeText | None = changeable(None, description="Template of the prompt; null: the task's own")
    doc_to_target: FreeText | int | None = changeable(None, description="Template of the answer; null: the task's own")
    doc_to_choice: FreeText | list[FreeText] | None = changeable(
        None, description="Template of the choices; null: the task's own"
    )
    target_delimiter: FreeText | None = changeable(
        None, description="Text between prompt and answer; null: the task's own"
    )
    fewshot_delimiter: FreeText | None = changeable(None, description="Text between two examples; null: the task's own")

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of lm-eval that differ from the task's own."""
        kept = self.model_dump(exclude_none=True, exclude={"task", "task_alias", "num_fewshot"})
        return {str(name): value for name, value in kept.items()}


class EvalHarnessConfig(Section):
    """Benchmarks by EleutherAI's lm-eval; needs the package lm-eval."""

    task_spec: list[str | BenchmarkTask] = changeable(
        [],
        min_length=1,
        validate_default=True,
        description="Tasks: names of tasks, groups and tags of lm-eval, paths of YAML files, or sections",
    )
    max_examples: int | None = changeable(None, ge=1, description="Maximum number of examples of each task; null: all")
    num_fewshot: int | None = changeable(
        None, ge=0, description="Number of examples in each prompt, unless the task sets 0; null: the task's own number"
    )
    max_eval_length: int | None = changeable(
        None, ge=2, description="Maximum length of a request in tokens; longer ones lose their start; null: seq_len"
    )
    include_path: str | None = changeable(None, min_length=1, description="Folder with YAML files of more tasks")
    apply_chat_template: bool = changeable(
        False, description="Prompts are written as chats, by the tokenizer's template"
    )
    fewshot_as_multiturn: bool = changeable(
        False, description="Examples in a chat are turns of the conversation; false: they are in one message"
    )
    log_samples: bool = changeable(False, description="Requests and results are written to <log_dir>/<run_id>/lm_eval/")
    bootstrap_iters: int = changeable(
        0, ge=0, description="Resamplings for the standard errors of metrics; 0: no standard errors"
    )
    confirm_run_unsafe_code: bool = changeable(
        False, description="Tasks may run Python code: of the folder include_path, or written by the model"
    )


def check_benchmarks(config: EvalHarnessConfig) -> None:
    """Raise `UserError` if lm-eval is missing, or has no task of a name; all such names are reported at once."""
    from lmtrain.hf.hub import prepare_hub  # its imports would delay every command

    prepare_hub()  # before lm-eval, which imports the libraries of the Hub: offline they would retry for a minute
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UserError(
            "eval_harness: lm-eval is not installed; run `pip install 'lm-eval<0.5'`, or remove eval_harness"
        ) from None
    from lmtrain.evaluation.benchmarks.tasks import find_tasks

    find_tasks(config)
