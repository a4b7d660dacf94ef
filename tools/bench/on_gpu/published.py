"""Published figures of other systems: tokens/s per GPU, and MFU with attention in full and with causal attention.

MFU is relative to the device's peak in dense bfloat16: 989 TFLOP/s of an H100 SXM, 312 of an A100. Neither torchtitan
nor MaxText publishes a 1B model on GPUs: of a larger one, MFU is comparable and tokens/s are not.
"""

GPT2 = [
    # modded-nanogpt's first record: 45 minutes for 19,560 steps of 524,288 tokens; MFU computed from it
    {"system": "llm.c, published", "device": "8 x H100", "tokens/s": 475_000, "MFU": "41%", "MFU, causal": "38%"},
    # scripts/run_gpt2_124M.sh of llm.c: 300 ms per 524,288 tokens
    {"system": "llm.c, published", "device": "8 x A100 80 GB", "tokens/s": 218_000, "MFU, causal": "56%"},
]

LLAMA = [
    # benchmarks/llama3_h100_202412_torchtitan.md, FSDP and torch.compile
    {
        "system": "torchtitan, published: Llama 3.1 8B, length 8192",
        "device": "8 x H100 (500 W)",
        "tokens/s": 6_667,
        "MFU": "39%",
    },
    # docs/frameworks/maxtext/README.md of JAX-Toolbox: 0.721 s per 16 x 4096 tokens; MFU computed from it
    {
        "system": "MaxText, published: Llama 2 7B, length 4096",
        "device": "8 x H100",
        "tokens/s": 11_360,
        "MFU": "53%",
        "MFU, causal": "49%",
    },
    # reported in marin-community/marin#1826 from Hugging Face's Smol Training Playbook, without a length
    {"system": "nanotron, reported: Llama 3.2 1B", "device": "8 x H100", "tokens/s": 42_000},
]
