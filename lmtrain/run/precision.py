"""Mixed-precision policy: the dtypes of parameters, computation and products, from the setting `mp`."""

from dataclasses import dataclass

_DTYPES = {"f32": "float32", "float32": "float32", "full": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_FP16 = {"f16", "float16", "half"}
_PARTS = {"p": "params", "params": "params", "c": "compute", "compute": "compute", "o": "output", "output": "output",
          "q": "products", "products": "products"}  # fmt: skip
# Formats of products, with the names of torchtitan and MaxText.
_FORMATS = {"fp8": "fp8", "float8": "fp8", "fp8_full": "fp8", "int8": "int8"}
_OUTPUT = "the output dtype cannot be set: logits have the dtype of the computation (c), and the loss is float32"


@dataclass(frozen=True)
class Precision:
    """Dtype names: `params` for parameters and first moments, `compute` for the computation.

    Averages of squared gradients and of the parameters are float32: they move by less than bfloat16 represents.
    Logits have the compute dtype; softmax, loss and all sums over tokens are float32. `products`: the 8-bit format of
    the blocks' products in training, fp8 or int8; None: the compute dtype.
    """

    params: str
    compute: str
    products: str | None = None

    def __str__(self) -> str:
        products = f", products={self.products}" if self.products else ""
        return f"params={self.params}, compute={self.compute}{products}"


def parse_precision(text: str) -> Precision:
    """Parse `f32`, `bf16`, or a list such as `p=f32,c=bfloat16,q=fp8`.

    Defaults: params f32, compute as params. Raises ValueError for any other syntax. The output dtype of jmp, `o=`, must
    be equal to the compute dtype.
    """
    given: dict[str, str] = {}
    for item in text.split(",") if "=" in text else [f"p={text}"]:
        name, equals, dtype = item.partition("=")
        if not equals:
            raise ValueError(f"in {text!r}: {item.strip()!r} has no dtype; expected for example c=bfloat16")
        part = _PARTS.get(name.strip())
        if part is None:
            raise ValueError(
                f"in {text!r}: unknown name {name.strip()!r}; expected p, c or q (params, compute, products)"
            )
        if part in given:
            raise ValueError(f"in {text!r}: {part} is set twice")
        given[part] = _format(dtype) if part == "products" else _dtype(dtype)
    params = given.get("params", "float32")
    compute = given.get("compute", params)
    if given.get("output", compute) != compute:
        raise ValueError(f"in {text!r}: {_OUTPUT}; remove o")
    return Precision(params, compute, given.get("products"))


def _format(name: str) -> str:
    name = name.strip()
    if name not in _FORMATS:
        raise ValueError(f"unknown format of products q={name}; expected fp8 or int8, or remove q for those of c")
    return _FORMATS[name]


def _dtype(name: str) -> str:
    name = name.strip()
    if name in _FP16:
        raise ValueError("float16 needs loss scaling, which is unsupported; use bf16 (p=f32,c=bfloat16)")
    if name in _FORMATS:
        raise ValueError(f"{name} is a format of products only; write p=f32,c=bfloat16,q={_FORMATS[name]}")
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; expected f32 or bf16, or a list such as p=f32,c=bfloat16")
    return _DTYPES[name]
