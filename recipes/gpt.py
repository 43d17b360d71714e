"""A byte-level GPT: pre-norm blocks, causal attention, learned positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shape legend: B windows, T bytes of a window, D model width, H heads, V vocabulary (256 bytes).

VOCABULARY = 256


class Block(nn.Module):
    """Attention and MLP, each on the normalized residual stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, D / H]
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte at every position.

    Args:
        dim: Width of the residual stream; a multiple of ``heads``.
        depth: Number of blocks.
        heads: Attention heads of a block.
        context: Longest window, in bytes.
    """

    def __init__(self, dim: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next byte.

        Args:
            tokens: Bytes, [B, T] int64, T at most ``context``.

        Returns:
            Logits, [B, T, V].
        """
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
        """Continue a prompt.

        Every rank must call this together with the same lengths: at stage 3 a forward gathers
        parameters. Each step is a forward of one fixed shape, [1, ``context``].

        Args:
            prompt: Text to continue, at least one byte.
            length: Number of bytes to generate.
            temperature: Divides the logits; lower is more conservative.

        Returns:
            The prompt and its continuation.
        """
        tokens, device = list(prompt), next(self.parameters()).device
        for _ in range(length):
            window = tokens[-self.context :]
            padded = window + [0] * (self.context - len(window))  # causal: the padding is not seen
            logits = self(torch.tensor([padded], device=device))[0, len(window) - 1]
            probabilities = torch.softmax(logits.float() / temperature, dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1)))
        return bytes(tokens)
