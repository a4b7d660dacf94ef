"""Small programs as HLO text, in the forms written by XLA's compilers for CPU, GPU and TPU; and networks."""

import jax

from lmtrain.compiled.collectives import Network
from lmtrain.compiled.figures import measure

ALONE = Network(mesh={"data": 1}, slice_ids=[0])
EIGHT = Network(mesh={"replica": 1, "data": 8, "model": 1}, slice_ids=[0] * 8)
FOUR = Network(mesh={"replica": 1, "data": 4, "model": 1}, slice_ids=[0] * 4)


def count_flops(function, *shapes):
    """FLOPs of a function of float32 arrays as compiled for this CPU: lmtrain's count, and XLA's."""
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).compile()
    return measure(compiled.as_text(), ALONE).flops, compiled.cost_analysis()["flops"]


NESTED_LOOPS = """
HloModule nested, is_scheduled=true

FileNames
1 "/home/somebody/lmtrain/models/layers/linear.py"
2 "/usr/lib/python3/elsewhere.py"
3 "/home/somebody/lmtrain/models/gpt2/model.py"

FunctionNames
1 "Linear.__call__"
2 "<module>"
3 "Gpt2LM.hidden"

FileLocations
1 {file_name_id=3 function_name_id=3 line=154 end_line=154 column=9 end_column=30}
2 {file_name_id=1 function_name_id=1 line=56 end_line=56 column=9 end_column=30}
3 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=9 end_column=30}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%inner_condition (p: (s32[], f32[8,16], f32[16,16])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

%inner_body (p: (s32[], f32[8,16], f32[16,16])) -> (s32[], f32[8,16], f32[16,16]) {
  %p = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0} get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/while/body/while/body/dot" stack_frame_id=3}
  ROOT %out = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) tuple(%next, %y, %w)
}

%outer_condition (p: (s32[], f32[8,16], f32[16,16], s32[])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] get-tuple-element(%p), index=3
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%outer_body (p: (s32[], f32[8,16], f32[16,16], s32[])) -> (s32[], f32[8,16], f32[16,16], s32[]) {
  %p = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0} get-tuple-element(%p), index=2
  %bound = s32[] get-tuple-element(%p), index=3
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) tuple(%zero, %x, %w)
  %inner = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}) while(%start), condition=%inner_condition, body=%inner_body
  %y = f32[8,16]{1,0} get-tuple-element(%inner), index=1
  ROOT %out = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) tuple(%next, %y, %w, %bound)
}

ENTRY %main (x: f32[8,16], w: f32[16,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,16]{1,0} parameter(1)
  %one = s32[] constant(1)
  %eight = s32[] constant(8)
  %start = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) tuple(%one, %x, %w, %eight)
  %loop = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) while(%start), condition=%outer_condition, body=%outer_body, metadata={op_name="jit(f)/while" stack_frame_id=1}
  ROOT %y = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""

# A loop with XLA:GPU's trip count, an asynchronous all-gather that overlaps with work, one that does not, and a
# computation whose kernel has an attribute with line breaks; one of the lines begins with a brace.
GPU_LOOP = """
HloModule gpu, is_scheduled=true

%condition (p: (s32[], bf16[4,8], bf16[32,8])) -> pred[] {
  %p = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) parameter(0)
  ROOT %more = pred[] custom-call(%p), custom_call_target="unknowable"
}

%body (p: (s32[], bf16[4,8], bf16[32,8])) -> (s32[], bf16[4,8], bf16[32,8]) {
  %p = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %part = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %x = bf16[32,8]{1,0} get-tuple-element(%p), index=2
  %hidden-start = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%part), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %product = (bf16[32,32]{1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %hidden-done = bf16[32,8]{1,0} all-gather-done(%hidden-start)
  %bare-start = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%part), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %again = bf16[32,8]{1,0} bitcast(%x)
  %bare-done = bf16[32,8]{1,0} all-gather-done(%bare-start)
  %kernel = bf16[32,8]{1,0} custom-call(%bare-done), custom_call_target="my_kernel", frontend_attributes={kernel_metadata={
"note":"{a: 1}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %out = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) tuple(%i, %part, %kernel)
}

ENTRY %main (i: s32[], part: bf16[4,8], x: bf16[32,8]) -> bf16[32,8] {
  %i = s32[] parameter(0)
  %part = bf16[4,8]{1,0} parameter(1)
  %x = bf16[32,8]{1,0} parameter(2)
  %start = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) tuple(%i, %part, %x)
  %loop = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %y = bf16[32,8]{1,0} get-tuple-element(%loop), index=2
}
"""

# XLA:TPU: a reduce-scatter as a fusion of an all-reduce and a slice; an asynchronous all-gather that is repeated in the
# fusions that start, overlap and end it; a product as a convolution whose window extends beyond the array.
TPU = """
HloModule tpu, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%all-reduce-scatter.clone.1 (input: f32[64,16]) -> f32[64,4] {
  %input = f32[64,16]{0,1:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,16]{0,1:T(8,128)} all-reduce(%input), channel_id=3, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %slice = f32[64,4]{0,1:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={64,4}
}

%start_fusion (w: bf16[4,8]) -> (bf16[4,8], bf16[16,8], u32[]) {
  %w = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=9, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
  ROOT %begun = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%step_fusion (w: bf16[4,8], x: f32[3,8,16], y: f32[3,16,8]) -> f32[3,8,8] {
  %w = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %x = f32[3,8,16]{2,1,0:T(8,128)} parameter(1)
  %y = f32[3,16,8]{2,1,0:T(8,128)} parameter(2)
  %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=9, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
  ROOT %batched = f32[3,8,8]{2,1,0:T(8,128)} convolution(%x, %y), window={size=3 stride=2 pad=2_2 lhs_dilate=3}, dim_labels=0bf_0io->0bf
}

%end_fusion (begun: (bf16[4,8], bf16[16,8], u32[]), w: bf16[4,8]) -> bf16[16,8] {
  %begun = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) parameter(0)
  %w = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.3 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=9, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
  ROOT %ended = bf16[16,8]{1,0} custom-call(%begun, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (g: f32[64,16], w: bf16[4,8], x: f32[3,8,16], y: f32[3,16,8]) -> f32[64,4] {
  %g = f32[64,16]{0,1:T(8,128)} parameter(0)
  %w = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(1)
  %x = f32[3,8,16]{2,1,0:T(8,128)} parameter(2)
  %y = f32[3,16,8]{2,1,0:T(8,128)} parameter(3)
  %begun = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%start_fusion
  %during = f32[3,8,8]{2,1,0:T(8,128)} fusion(%w, %x, %y), kind=kOutput, calls=%step_fusion
  %ended = bf16[16,8]{1,0} fusion(%begun, %w), kind=kCustom, calls=%end_fusion
  ROOT %scattered = f32[64,4]{0,1:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.clone.1
}
"""

# One slice of a stack of weights is read, one row of another is written in place; a copy goes to on-chip memory.
SLICES = """
HloModule slices, is_scheduled=true

%read (stack: f32[100,8,8], i: s32[]) -> f32[8,8] {
  %stack = f32[100,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,8,8]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  ROOT %flat = f32[8,8]{1,0} bitcast(%one)
}

%write (stack: f32[100,8,8], new: f32[8,8], i: s32[]) -> f32[100,8,8] {
  %stack = f32[100,8,8]{2,1,0} parameter(0)
  %new = f32[8,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,8,8]{2,1,0} bitcast(%new)
  ROOT %changed = f32[100,8,8]{2,1,0} dynamic-update-slice(%stack, %one, %i, %zero, %zero)
}

ENTRY %main (stack: f32[100,8,8], other: f32[100,8,8], i: s32[]) -> f32[100,8,8] {
  %stack = f32[100,8,8]{2,1,0} parameter(0)
  %other = f32[100,8,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %one = f32[8,8]{1,0} fusion(%stack, %i), kind=kLoop, calls=%read
  %fast-start = (f32[8,8]{1,0:S(1)}, f32[8,8]{1,0}, u32[]{:S(2)}) copy-start(%one)
  %fast = f32[8,8]{1,0:S(1)} copy-done(%fast-start)
  ROOT %changed = f32[100,8,8]{2,1,0} fusion(%other, %fast, %i), kind=kLoop, calls=%write
}
"""

# The first fusion reads the columns that it gathers of its operand, the second one all of it.
CONVERTED = """
HloModule converted, is_scheduled=true

%some (logits: bf16[8,512], at: s32[8,1]) -> f32[8] {
  %logits = bf16[8,512]{1,0} parameter(0)
  %at = s32[8,1]{1,0} parameter(1)
  %wide = f32[8,512]{1,0} convert(%logits)
  ROOT %chosen = f32[8]{0} gather(%wide, %at), offset_dims={}, collapsed_slice_dims={1}, start_index_map={1}, operand_batching_dims={0}, start_indices_batching_dims={0}, index_vector_dim=1, slice_sizes={1,1}
}

%all (logits: bf16[8,512]) -> f32[4096] {
  %logits = bf16[8,512]{1,0} parameter(0)
  %wide = f32[8,512]{1,0} convert(%logits)
  ROOT %flat = f32[4096]{0} bitcast(%wide)
}

ENTRY %main (logits: bf16[8,512], at: s32[8,1]) -> (f32[8], f32[4096]) {
  %logits = bf16[8,512]{1,0} parameter(0)
  %at = s32[8,1]{1,0} parameter(1)
  %chosen = f32[8]{0} fusion(%logits, %at), kind=kLoop, calls=%some
  %wide = f32[4096]{0} fusion(%logits), kind=kLoop, calls=%all
  ROOT %out = (f32[8]{0}, f32[4096]{0}) tuple(%chosen, %wide)
}
"""

# Two TPU slices with two chips each: a collective within a slice, transfers by the runtime between slices.
SLICES_OF_TPUS = """
HloModule slices_of_tpus, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

ENTRY %main (g: f32[64,16]) -> f32[64,16] {
  %g = f32[64,16]{1,0:T(8,128)} parameter(0)
  %within = f32[64,16]{1,0:T(8,128)} all-reduce(%g), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
  %order = token[] after-all()
  %sent = (f32[64,16]{1,0}, u32[], token[]) send(%within, %order), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="one",_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent-done = token[] send-done(%sent), channel_id=2
  %received = (f32[64,16]{1,0}, u32[], token[]) recv(%order), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="one",_xla_megascale_transfer_type="ALL_REDUCE"}
  %twice = f32[64,16]{1,0:T(8,128)} multiply(%g, %g)
  %received-done = (f32[64,16]{1,0}, token[]) recv-done(%received), channel_id=3
  %whole = f32[64,16]{1,0:T(8,128)} get-tuple-element(%received-done), index=0
  ROOT %out = f32[64,16]{1,0:T(8,128)} add(%whole, %twice)
}
"""
