"""`lmtrain eval`: benchmarks of the config and of the command line."""

import pytest

from lmtrain.commands.arguments import Parser
from lmtrain.commands.eval import _add_benchmark_flags, _harness
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.runtime.errors import UserError

OF_CONFIG = EvalHarnessConfig(task_spec=["a"], num_fewshot=3)


def harness(*arguments, config=None):
    parser = Parser("eval", "")
    _add_benchmark_flags(parser)
    return _harness(parser.parse_args(arguments), config)


def test_flags_change_the_benchmarks_of_the_config():
    assert harness() is None
    assert (harness(config=OF_CONFIG).task_spec, harness(config=OF_CONFIG).num_fewshot) == (["a"], 3)
    found = harness("--tasks", "b, c,", "--max_examples", "4", config=OF_CONFIG)
    assert (found.task_spec, found.num_fewshot, found.max_examples) == (["b", "c"], 3, 4)


def test_standard_errors_are_computed_unless_the_config_says_how_many_resamplings():
    assert harness("--tasks", "a").bootstrap_iters == 100_000
    assert harness(config=OF_CONFIG.model_copy(update={"bootstrap_iters": 9})).bootstrap_iters == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--log_samples"], "--log_samples: "),
        (["--tasks", ","], "--tasks []: "),
        (["--tasks", "a", "--limit", "0"], "argument --max_examples/--limit: 0: "),
    ],
)
def test_flags_that_have_no_effect_or_no_meaning_are_refused(arguments, message):
    with pytest.raises(UserError) as caught:
        harness(*arguments)
    assert str(caught.value).startswith(message)
