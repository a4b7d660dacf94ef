"""Groups of devices."""

import pytest

from lmtrain.compiled.collectives import mesh_axes, parse_groups


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("source_target_pairs={{0,1},{1,2},{2,0},{3,4}}, x", [[0, 1, 2], [3, 4]]),
    ],
)
def test_all_forms_of_groups_are_parsed(attributes, groups):
    assert sorted(parse_groups(attributes, 8)) == groups


def test_an_unknown_form_of_groups_is_an_error():
    with pytest.raises(ValueError, match="unknown form of replica groups: replica_groups=new"):
        parse_groups("channel_id=1, replica_groups=new(8), x", 8)


def test_groups_are_mapped_to_axes_of_the_mesh():
    mesh = {"replica": 2, "data": 4, "model": 2}
    assert mesh_axes([0, 1], mesh) == ("model",)
    assert mesh_axes([0, 2, 4, 6], mesh) == ("data",)
    assert mesh_axes(list(range(16)), mesh) == ("replica", "data", "model")
    assert mesh_axes([0, 16], mesh) == ()
