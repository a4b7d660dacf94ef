"""Declaration of a setting: pydantic's `Field` under the name of the setting's role, which says what depends on it.

    class ScheduleConfig(Section):
        learning_rate: float = tunable(1e-4, gt=0, description="Peak learning rate")

Arguments are those of `Field`. Only sections at the top level are declared with `Field`: their settings have roles.
"""

from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo


class Role(StrEnum):
    """What depends on a setting. The first three roles are part of the run's identity, and so of its run id."""

    ARCHITECTURE = "architecture"
    IDENTITY = "identity"
    TUNABLE = "tunable"
    CHANGEABLE = "changeable"
    EXECUTION = "execution"


# Meaning of each role, for users.
ROLES = {
    Role.ARCHITECTURE: "defines the meaning of the weights; a run never changes it",
    Role.IDENTITY: "distinguishes runs, as data, seed and batch size do; a run never changes it",
    Role.TUNABLE: "part of the run id, but may change once the run has checkpoints; set trainer.id to keep the id",
    Role.CHANGEABLE: "not part of the run id; may change at any start of the run",
    Role.EXECUTION: "as changeable; results do not depend on it, except for rounding",
}


def _declare(role: Role, *default: Any, **constraints: Any) -> Any:
    field = Field(*default, **constraints)
    field.metadata.append(role)  # pydantic keeps metadata of types that it does not know, and ignores them
    return field


architecture = partial(_declare, Role.ARCHITECTURE)
identity = partial(_declare, Role.IDENTITY)
tunable = partial(_declare, Role.TUNABLE)
changeable = partial(_declare, Role.CHANGEABLE)
execution = partial(_declare, Role.EXECUTION)


def role_of(field: FieldInfo) -> Role | None:
    """The role of a setting; None for a section at the top level, whose settings have roles of their own."""
    return next((item for item in field.metadata if isinstance(item, Role)), None)


def settings_of(section: type[BaseModel], *roles: Role) -> set[str]:
    """The names of a section's settings that have one of these roles."""
    return {name for name, field in section.model_fields.items() if role_of(field) in roles}
