"""The `mp` setting: which number formats parameters, computation and output use."""

from dataclasses import dataclass

_DTYPES = {"f32": "float32", "float32": "float32", "full": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_FP16 = {"f16", "float16", "half"}
_PARTS = {"p": "params", "params": "params", "c": "compute", "compute": "compute", "o": "output", "output": "output"}
_OUTPUT = "the output has no format of its own: logits have that of the computation (c), and the loss is float32"


@dataclass(frozen=True)
class Precision:
    """Names of number formats: parameters and optimizer state at rest, and computation.

    Logits are products in the computation's format; softmax, loss and all sums over tokens are float32.
    """

    params: str
    compute: str

    def __str__(self) -> str:
        return f"params={self.params}, compute={self.compute}"


def parse_precision(text: str) -> Precision:
    """`f32`, `bf16`, or a list such as `p=f32,c=bfloat16`.

    What is missing follows: params f32, compute as params. Raises ValueError for anything else; `o=`, as jmp writes the
    output's format, has to be that of the computation.
    """
    if "=" not in text:
        dtype = _dtype(text)
        return Precision(dtype, dtype)
    given: dict[str, str] = {}
    for item in text.split(","):
        name, equals, dtype = item.partition("=")
        if not equals:
            raise ValueError(f"in {text!r}: {item.strip()!r} names no format; write it like c=bfloat16")
        part = _PARTS.get(name.strip())
        if part is None:
            raise ValueError(f"in {text!r}: {name.strip()!r} is none of p, c (params, compute)")
        if part in given:
            raise ValueError(f"in {text!r}: {part} is given twice")
        given[part] = _dtype(dtype)
    params = given.get("params", "float32")
    compute = given.get("compute", params)
    if given.get("output", compute) != compute:
        raise ValueError(f"in {text!r}: {_OUTPUT}; leave o out")
    return Precision(params, compute)


def _dtype(name: str) -> str:
    name = name.strip()
    if name in _FP16:
        raise ValueError("float16 needs loss scaling, which lmtrain does not have; use bf16 (p=f32,c=bfloat16)")
    if name not in _DTYPES:
        raise ValueError(f"no number format {name!r}; expected f32 or bf16, or a list such as p=f32,c=bfloat16")
    return _DTYPES[name]
