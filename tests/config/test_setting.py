"""Tests of `lmtrain/config/section.py`: every setting of a run has a role."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel, Field, ValidationError

from lmtrain.config.describe import sections_of
from lmtrain.config.section import (
    Role,
    Section,
    architecture,
    changeable,
    execution,
    identity,
    role_of,
    settings_of,
    tunable,
)
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.run.config import RunConfig


def roles(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, Role | None, set[Role | None]]]:
    """The dotted name, the role, and the roles below, of each setting."""
    for name, field in model.model_fields.items():
        path = f"{at}.{name}".lstrip(".")
        below = [entry for section in sections_of(field.annotation) for entry in roles(section, path)]
        yield path, role_of(field), {role for _, role, _ in below}
        yield from below


def without_role(model: type[BaseModel]) -> list[str]:
    """The settings that say nothing. A section at the top level leaves it to its settings."""
    return [
        path for path, role, below in roles(model) if role is None and (not below or path not in model.model_fields)
    ]


def test_every_setting_of_a_run_has_a_role_and_so_do_those_in_it() -> None:
    assert without_role(RunConfig) == []
    # the coefficients of a mixture of experts are part of the run's identity, as its architecture is
    allowed = {"model.moe": {Role.ARCHITECTURE, Role.IDENTITY}}
    found = [path for path, role, below in roles(RunConfig) if role and below - allowed.get(path, {role})]
    assert found == []


def test_a_setting_without_a_role_is_found() -> None:
    class Silent(Section):
        steps: int = Field(1, description="Steps")

    class Run(Section):
        silent: Silent = changeable(default_factory=Silent, description="A section")

    assert without_role(Run) == ["silent.steps"]


DECLARATIONS = dict(zip(Role, (architecture, identity, tunable, changeable, execution), strict=True))


@pytest.mark.parametrize("role", Role)
def test_a_setting_is_a_field_with_a_role(role) -> None:
    declare = DECLARATIONS[role]

    class Sizes(Section):
        depth: int = declare(3, ge=1, description="Depth")
        width: list[int] = declare(default_factory=list)
        needed: int = declare(lt=5)

    class Wide(Sizes):
        height: int = Field(1)

    assert settings_of(Wide, role) == {"depth", "width", "needed"}
    assert settings_of(Wide, *Role) == {"depth", "width", "needed"}
    assert Wide(needed=1).model_dump() == {"depth": 3, "width": [], "needed": 1, "height": 1}
    assert Wide.model_fields["depth"].description == "Depth"
    assert Wide.model_json_schema()["properties"]["depth"]["minimum"] == 1
    for wrong in ({}, {"needed": 5}, {"needed": 1, "depth": 0}):
        with pytest.raises(ValidationError):
            Wide.model_validate(wrong)


def test_the_meaning_of_weights_is_the_architecture() -> None:
    assert LlamaConfig(seq_len=8, scan_layers=False, num_kv_heads=32).meaning() == LlamaConfig().meaning()
    assert LlamaConfig(norm_offset=True).meaning() != LlamaConfig().meaning()
