"""FLOPs per token and model FLOPs utilization (MFU).

MFU is the model's FLOPs per second, over the peak of all devices, in percent. The FLOPs are those of the matrix
products of a forward pass, and twice as many for the backward pass; recomputation does not count. `mfu` counts
attention as if every token attended to all others (as in Chowdhery et al. 2022, PaLM, appendix B, and most published
figures); `mfu_causal` counts the half that a causal model needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token of forward and backward pass, and peak FLOPs per second of all devices together, None if
    unknown."""

    flops_per_token: float
    causal_flops_per_token: float
    peak_flops: float | None

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        """Metrics of a speed: GFLOP/s, and MFU in percent if the peak is known."""
        achieved = self.flops_per_token * tokens_per_second
        rates = {"throughput/gflops_per_second": achieved / 1e9}
        if self.peak_flops is not None:
            rates["throughput/mfu"] = 100 * achieved / self.peak_flops
            rates["throughput/mfu_causal"] = 100 * self.causal_flops_per_token * tokens_per_second / self.peak_flops
        return rates
