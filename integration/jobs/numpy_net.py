# SPDX-License-Identifier: Apache-2.0
"""A net of tanh layers and AdamW, in NumPy.

Jobs that call CUDA and NCCL by ctypes compute with it: a process that imports torch takes seconds
of processor time to start and 0.3 GB of memory to move, and such a job needs nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Layer = tuple[Array, Array]
"""A matrix of (outputs, inputs), and a bias."""

BETAS, RATE, DECAY, EPS = (0.9, 0.999), 1e-3, 0.01, 1e-8


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def input_of(rank: int, step: int, *shape: int) -> Array:
    """What a rank learns from in a step: no two are alike."""
    return normal((rank << 20) + step, *shape)


def loss_and_gradients(x: Array, layers: Sequence[Layer]) -> tuple[float, list[Array]]:
    """The mean square of the error where ``x``, rolled by one column, is to come out.

    The gradients are in the order of the layers, each matrix before its bias.
    """
    seen = [x]
    for matrix, bias in layers:
        seen.append(np.tanh(seen[-1] @ matrix.T + bias))
    error = seen[-1] - np.roll(x, 1, axis=1)
    return float(np.square(error).mean()), [*_gradients(error, seen, layers)][::-1]


def _gradients(error: Array, seen: Sequence[Array], layers: Sequence[Layer]) -> Iterator[Array]:
    """From the last layer to the first, each bias before its matrix."""
    towards = error * np.float32(2 / error.size)
    for (matrix, _), before, after in zip(layers[::-1], seen[-2::-1], seen[:0:-1], strict=True):
        towards = towards * (1 - np.square(after))
        yield towards.sum(axis=0)
        yield towards.T @ before
        towards = towards @ matrix


def descend(weight: Array, mean: Array, square: Array, gradient: Array, step: int) -> None:
    """AdamW, in place; ``step`` counts from 1."""
    mean *= BETAS[0]
    mean += (1 - BETAS[0]) * gradient
    square *= BETAS[1]
    square += (1 - BETAS[1]) * np.square(gradient)
    weight *= 1 - RATE * DECAY
    scale = np.sqrt(square / (1 - BETAS[1] ** step)) + EPS
    weight -= RATE / (1 - BETAS[0] ** step) * mean / scale
