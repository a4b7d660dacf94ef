"""Check of the benchmarks of a config before a model is loaded; imports no JAX."""

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.hf.hub import prepare_hub
from lmtrain.runtime.errors import UserError


def check_benchmarks(config: EvalHarnessConfig) -> None:
    """Raise `UserError` if lm-eval is missing, or has no task of a name; all such names are reported at once."""
    prepare_hub()  # before lm-eval, which imports the libraries of the Hub: offline they would retry for a minute
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UserError(
            "eval_harness: lm-eval is not installed; run `pip install 'lm-eval<0.5'`, or remove eval_harness"
        ) from None
    from lmtrain.evaluation.benchmarks.tasks import find_tasks

    find_tasks(config)
