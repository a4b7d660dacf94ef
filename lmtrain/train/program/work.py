"""What a token costs, and how much of what the devices can do a speed is: model FLOPs utilization (MFU).

MFU is the FLOPs that the model needs for the tokens of a second, over the peak of all devices, in percent. Needed are
the matrix products of a forward pass and twice as many for the backward pass, whatever is computed again. `mfu` counts
attention as if every token saw all others (as in Chowdhery et al. 2022, PaLM, appendix B, and most published figures);
`mfu_causal` counts the half that a causal model needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a token costs, and what the devices can do. FLOPs of forward and backward pass; peak FLOPs per second of
    all devices together, None if it is not known."""

    flops_per_token: float
    causal_flops_per_token: float
    peak_flops: float | None

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        achieved = self.flops_per_token * tokens_per_second
        rates = {"throughput/gflops_per_second": achieved / 1e9}
        if self.peak_flops is not None:
            rates["throughput/mfu"] = 100 * achieved / self.peak_flops
            rates["throughput/mfu_causal"] = 100 * self.causal_flops_per_token * tokens_per_second / self.peak_flops
        return rates
