"""All figures of a program."""

from hlo.programs import EIGHT, GPU_LOOP

from lmtrain.compiled.figures import measure


def test_a_gpu_loop_with_a_gemm_call_and_gathers():
    found = measure(GPU_LOOP, EIGHT)
    assert found.flops == 7 * (2 * 32 * 32 * 8)
    assert [(one.kind, one.devices, one.times, one.bytes, one.asynchronous) for one in found.collectives] == [
        ("all-gather", 8, 7, 32 * 8 * 2, True),
        ("all-gather", 8, 7, 32 * 8 * 2, False),
    ]
    assert found.wire_bytes == 2 * 7 * (7 / 8 * 32 * 8 * 2)
    assert {one.axes for one in found.collectives} == {("data",)}
    assert [(kernel.target, kernel.times) for kernel in found.kernels] == [("my_kernel", 7)]
