"""The peer of the step benchmark: GPT-2 in eager PyTorch, as in nanoGPT."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        split = self.qkv(self.norm_attn(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, vocab: int, length: int, dim: int, layers: int, heads: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm_final = nn.LayerNorm(dim)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean next-token loss, without the last position of each row."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.norm_final(x) @ self.tokens.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Trainer:
    """Trainer with AdamW, weight decay on matrices, gradients clipped to norm 1."""

    def __init__(self, model: Gpt2):
        self.model = model
        matrices = [p for p in model.blocks.parameters() if p.dim() > 1]
        chosen = set(matrices)
        others = [p for p in model.parameters() if p not in chosen]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()
