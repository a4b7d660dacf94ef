"""XLA options: defaults of the platform, overrides of the config, and errors for unknown ones."""

import pytest

from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import refused_option, xla_options
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program


def config(**options):
    return RunConfig(
        model={"hidden_dim": 32, "num_heads": 2, "num_layers": 1, "seq_len": 16},
        trainer={"train_batch_size": 8, "xla_options": options},
        data={"tokenizer": "passthrough", "vocab_size": 64},
    )


def test_options_of_the_config_override_the_platform_defaults_and_null_removes_one():
    assert xla_options({}, "cpu", "cpu") == {}
    default = xla_options({}, "tpu", "TPU v5p")
    assert default["xla_enable_async_all_gather"] is True
    changed = xla_options({"xla_enable_async_all_gather": None, "xla_new": 3}, "tpu", "TPU v5p")
    assert changed == {
        **{name: default[name] for name in default if name != "xla_enable_async_all_gather"},
        "xla_new": 3,
    }


@pytest.mark.parametrize(
    ("options", "name"), [({"xla_nope": True}, "xla_nope"), ({"xla_cpu_parallel_codegen_split_count": "many"}, "many")]
)
def test_an_option_that_xla_refuses_is_named(options, name):
    program = build_program(config(**options), 64)
    with pytest.raises(UserError, match=rf"trainer\.xla_options: .*{name}"), program.explaining_errors():
        program.compile()


def test_other_errors_are_left_alone():
    assert refused_option(RuntimeError("RESOURCE_EXHAUSTED: out of memory")) is None
