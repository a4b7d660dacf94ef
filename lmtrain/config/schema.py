"""JSON Schema of the config, for editors that complete and validate YAML."""

from typing import Any

from pydantic import BaseModel

from lmtrain.config.spellings import SHORT_NAMES

# Where a section, or a list or map of sections, is allowed, an !include of a file with it is allowed too.
_INCLUDE = {
    "type": "string",
    "pattern": r"\.ya?ml$",
    "description": "With the tag !include: a file with this section; its path is relative to the including file",
}
_MERGE_KEY = {"description": "YAML merge key, lowest priority: an !include, an alias, or a list of them"}


def build_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """JSON Schema, draft 2020-12, with descriptions and defaults. Every section may also be an `!include`."""
    schema = _convert(model.model_json_schema(mode="validation"))
    definitions = schema.get("$defs", {})
    for section, names in SHORT_NAMES.items():
        settings = definitions[_first_ref(schema["properties"][section]).removeprefix("#/$defs/")]["properties"]
        settings |= {short: settings[name] for short, name in names.items()}
    for section in [schema, *definitions.values()]:
        section["properties"]["<<"] = _MERGE_KEY
    schema["$defs"] = {name: {"anyOf": [section, _INCLUDE]} for name, section in definitions.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _first_ref(setting: dict[str, Any]) -> str:
    """The reference to the class of a section, which may be optional."""
    while "$ref" not in setting:
        setting = setting["anyOf"][0]
    return str(setting["$ref"])


def _convert(value: Any) -> Any:
    """Replace `oneOf` by `anyOf`: a section without `type` matches several kinds. Lists and maps may be includes."""
    if isinstance(value, list):
        return [_convert(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {("anyOf" if key == "oneOf" else key): _convert(item) for key, item in value.items()}
    if not any("$ref" in str(value.get(inside)) for inside in ("items", "additionalProperties", "patternProperties")):
        return converted
    about = {key: converted[key] for key in ("description", "default", "title") if key in converted}
    return about | {"anyOf": [converted, _INCLUDE]}
