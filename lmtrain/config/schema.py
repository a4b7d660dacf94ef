"""JSON Schema of the config, for editors that complete and validate YAML."""

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from lmtrain.config.spellings import SHORT_NAMES

# Where a map of settings is allowed, an !include of a file with that map is allowed too.
_INCLUDE = {
    "type": "string",
    "pattern": r"\.ya?ml$",
    "description": "With the tag !include: a file with this section; its path is relative to the including file",
}


def build_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """JSON Schema, draft 2020-12, with descriptions and defaults. Every section may also be an `!include`."""
    schema = model.model_json_schema(mode="validation")
    definitions = schema.get("$defs", {})
    for definition in [schema, *definitions.values()]:
        settings = definition.get("properties", {})
        for name, setting in settings.items():
            settings[name] = _allow_include(_any_kind(setting), definitions)
        settings["<<"] = {"description": "YAML merge key, lowest priority: an !include, an alias, or a list of them"}
    for section, names in SHORT_NAMES.items():
        definition = definitions[_first_ref(schema["properties"][section]).removeprefix("#/$defs/")]
        definition["properties"] |= {short: definition["properties"][name] for short, name in names.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _first_ref(setting: dict[str, Any]) -> str:
    """The reference to the class of a section, which may be optional."""
    while "$ref" not in setting:
        setting = setting["anyOf"][0]
    return str(setting["$ref"])


def _any_kind(value: Any) -> Any:
    """Replace `oneOf` by `anyOf`: a section without `type` matches several kinds."""
    if isinstance(value, dict):
        return {("anyOf" if key == "oneOf" else key): _any_kind(item) for key, item in value.items()}
    return [_any_kind(item) for item in value] if isinstance(value, list) else value


def _allow_include(setting: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The setting, with an `!include` allowed wherever a section is."""
    if not _holds_section(setting, definitions):
        return setting
    about = {key: setting[key] for key in ("description", "default", "title") if key in setting}
    rest = {key: deepcopy(value) for key, value in setting.items() if key not in about}
    for key in ("items", "additionalProperties"):
        if isinstance(rest.get(key), dict):
            rest[key] = _allow_include(rest[key], definitions)
    rest = {
        key: [_allow_include(p, definitions) for p in value] if key == "anyOf" else value for key, value in rest.items()
    }
    return about | {"anyOf": [rest, _INCLUDE]}


def _holds_section(setting: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Whether the setting is a section, a list or map of sections, or a union with one."""
    if "$ref" in setting:
        return bool(definitions[setting["$ref"].removeprefix("#/$defs/")].get("type") == "object")
    parts = [*setting.get("anyOf", []), setting.get("items"), setting.get("additionalProperties")]
    return any(_holds_section(part, definitions) for part in parts if isinstance(part, dict))
