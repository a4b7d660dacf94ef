"""Benchmarks are checked before a model is loaded."""

import sys

import pytest
from evaluation.local_tasks import harness

from lmtrain.evaluation.benchmarks.check import check_benchmarks
from lmtrain.runtime.errors import UserError


def test_without_lm_eval_the_extra_is_named(tmp_path, monkeypatch):
    config = harness(tmp_path)
    check_benchmarks(config)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm-eval is not installed; run `pip install 'lmtrain\[eval\]'`"):
        check_benchmarks(config)
