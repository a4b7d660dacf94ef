"""New parameters: of a model, or with LoRA new adapters on a frozen base."""

from typing import Any

import flax.linen as nn
import jax

from lmtrain.lora.adapters import start_from
from lmtrain.lora.model import ADAPTERS, BASE
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import initializer
from lmtrain.models.quantization import storage_of, stored


def new_params(
    model: LanguageModel, key: jax.Array, abstract: Any, abstract_base: Any = None, base: Any = None
) -> tuple[Any, Any]:
    """New trained parameters, and the frozen base, in the dtypes of `abstract` and `abstract_base`.

    Without LoRA, `abstract_base` and the frozen base are None. With LoRA, `base` is a base that exists already; the
    frozen one is None then. Compile the call: it computes all values.
    """
    params = nn.meta.unbox(initializer(model)(key))
    if abstract_base is None:
        return _like(params, abstract), None
    adapters = start_from(params[ADAPTERS], params[BASE] if base is None else base)
    if base is not None:
        return _like(adapters, abstract), None
    return _like(adapters, abstract), _like(stored(params[BASE], storage_of(abstract_base)), abstract_base)


def _like(params: Any, abstract: Any) -> Any:
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)
