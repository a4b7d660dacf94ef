"""The convolution sees only its own document, and continues after earlier inputs."""

import itertools

import numpy as np
import torch

from lmtrain.models.gated_delta.chunks import causal_convolution

RNG = np.random.default_rng(0)
X, KERNEL = RNG.normal(size=(2, 12, 6)).astype(np.float32), RNG.normal(size=(4, 6)).astype(np.float32)
WITHIN = np.arange(12)[None].repeat(2, 0)


def by_torch(x):
    kernel = torch.tensor(KERNEL.T[:, None].copy())
    found = torch.nn.functional.conv1d(torch.tensor(x.swapaxes(1, 2).copy()), kernel, padding=3, groups=6)
    return torch.nn.functional.silu(found[..., : x.shape[1]]).numpy().swapaxes(1, 2)


def test_it_is_the_convolution_of_each_document():
    np.testing.assert_allclose(causal_convolution(X, KERNEL, WITHIN), by_torch(X), atol=1e-6)
    bounds = [0, 1, 3, 8, 12]
    positions = np.concatenate([np.arange(e - b) for b, e in itertools.pairwise(bounds)])[None].repeat(2, 0)
    alone = [by_torch(X[:, b:e]) for b, e in itertools.pairwise(bounds)]
    np.testing.assert_allclose(causal_convolution(X, KERNEL, positions), np.concatenate(alone, 1), atol=1e-6)


def test_it_continues_after_earlier_inputs():
    whole = causal_convolution(X, KERNEL, WITHIN)
    parts = [causal_convolution(X[:, :5], KERNEL, WITHIN[:, :5])]
    parts.append(causal_convolution(X[:, 5:], KERNEL, WITHIN[:, 5:], X[:, 2:5]))
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
