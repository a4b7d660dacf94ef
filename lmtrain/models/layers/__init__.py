"""Shared layers. Each parameter is declared once, with its axes, sizes and initializer in one line.

Dimensions: B batch, S query position, T key position, D embed, H heads, C head dim, F mlp, V vocab, N layers.
"""
