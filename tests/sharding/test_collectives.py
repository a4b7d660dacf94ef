"""Collectives in the text of a compiled program."""

from lmtrain.sharding.collectives import Collective, find_collectives

HLO = """
  %a = f32[8,16]{1,0} all-gather(f32[1,16]{1,0} %p), channel_id=1, dimensions={0}
  ROOT %b = (f32[4]{0}, bf16[2,2]{1,0}) all-reduce(f32[4]{0} %x, bf16[2,2]{1,0} %y), to_apply=%sum
  %c-start = bf16[10]{0} all-gather-start(bf16[5]{0} %q)
  %c-done = bf16[10]{0} all-gather-done(bf16[10]{0} %c-start)
  %d = f32[] add(f32[] %m, f32[] %n), metadata={op_name="all-reduce(not one)"}
  %e = pred[3]{0} collective-permute(pred[3]{0} %z)
"""


def test_each_is_found_once_with_the_size_of_its_result():
    assert find_collectives(HLO) == [
        Collective("all-gather", 8 * 16 * 4, ((8, 16),)),
        Collective("all-reduce", 4 * 4 + 4 * 2, ((4,), (2, 2))),
        Collective("all-gather", 20, ((10,),)),
        Collective("collective-permute", 3, ((3,),)),
    ]
