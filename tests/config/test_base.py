"""Sections: immutable, unknown names are errors, booleans are not numbers."""

import pytest
from pydantic import Field, ValidationError

from lmtrain.config.base import Section


class Small(Section):
    count: int = Field(1, ge=1)
    share: float | None = None
    flag: bool = False
    either: bool | int = False


class WrongDefault(Section):
    count: int = Field(0, ge=1)


def test_a_value_cannot_be_changed_after_loading():
    with pytest.raises(ValidationError, match="frozen"):
        Small().count = 2


def test_an_unknown_name_is_refused():
    with pytest.raises(ValidationError) as caught:
        Small(cuont=3)
    assert [(error["type"], error["loc"]) for error in caught.value.errors()] == [("extra_forbidden", ("cuont",))]


@pytest.mark.parametrize("name", ["count", "share"])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_not_a_number(name, value):
    with pytest.raises(ValidationError, match="expected a number, not true or false"):
        Small(**{name: value})


@pytest.mark.parametrize("name", ["flag", "either"])
def test_a_bool_is_accepted_for_a_boolean_setting(name):
    assert getattr(Small(**{name: True}), name) is True


def test_a_default_is_validated_like_a_written_value():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        WrongDefault()
