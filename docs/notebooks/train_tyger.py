# SPDX-License-Identifier: MIT
"""Train the transformer of decode.ipynb with torch, and write its weights to tyger.npz.

Needs torch. The text is William Blake's The Tyger (1794), without its last stanza, which nearly
repeats the first. It runs in a ring: after the fifth stanza comes the first. A token is a
character.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch.nn import functional

POEM = """\
Tyger Tyger, burning bright,
In the forests of the night;
What immortal hand or eye,
Could frame thy fearful symmetry?

In what distant deeps or skies.
Burnt the fire of thine eyes?
On what wings dare he aspire?
What the hand, dare seize the fire?

And what shoulder, & what art,
Could twist the sinews of thy heart?
And when thy heart began to beat,
What dread hand? & what dread feet?

What the hammer? what the chain,
In what furnace was thy brain?
What the anvil? what dread grasp,
Dare its deadly terrors clasp!

When the stars threw down their spears
And water'd heaven with their tears:
Did he smile his work to see?
Did he who made the Lamb make thee?

"""
ALPHABET = "".join(sorted(set(POEM)))
LAYERS, HQ, HK, E = 2, 4, 1, 16  # heads of queries, of keys and values; size of a head
D, V = HQ * E, len(ALPHABET)
BATCH, LENGTH = 8, 128


def random_weights() -> dict[str, torch.Tensor]:
    """Return weights that keep the size of what is multiplied by them."""
    shapes = {
        "embedding": (V, D),
        "query": (LAYERS, D, HQ * E),
        "key": (LAYERS, D, HK * E),
        "value": (LAYERS, D, HK * E),
        "output": (LAYERS, HQ * E, D),
        "up": (LAYERS, D, 4 * D),
        "down": (LAYERS, 4 * D, D),
        "logits": (D, V),
    }
    gains = {"embedding": V**0.5, "output": 0.5, "down": 0.5}
    return {
        name: (torch.randn(shape) * gains.get(name, 1) * shape[-2] ** -0.5).requires_grad_()
        for name, shape in shapes.items()
    }


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Return x, (..., D), scaled to a mean square of one."""
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)


def transformer(tokens: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits (B, L, V) of what follows each token (B, L)."""
    place = torch.arange(tokens.shape[1])
    slopes = 2.0 ** -(torch.arange(HQ) / 2)
    bias = slopes[:, None, None] * (place - place[:, None])  # ALiBi, (Hq, L, L)
    bias = bias.masked_fill(place > place[:, None], -torch.inf)
    x = weights["embedding"][tokens]
    for layer in range(LAYERS):
        normed = rms_norm(x)
        heads = (
            (normed @ weights[name][layer]).unflatten(-1, (-1, E)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        context = functional.scaled_dot_product_attention(*heads, attn_mask=bias, enable_gqa=True)
        x = x + context.transpose(1, 2).flatten(2) @ weights["output"][layer]
        x = x + (rms_norm(x) @ weights["up"][layer]).relu() @ weights["down"][layer]
    return rms_norm(x) @ weights["logits"]


def train(steps: int) -> tuple[dict[str, np.ndarray], float]:
    """Return weights that have learnt the poem by heart, in float16, and their last loss."""
    torch.manual_seed(0)
    weights = random_weights()
    optimizer = torch.optim.Adam(weights.values(), lr=5e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps + 1)
    ring = torch.tensor([ALPHABET.index(character) for character in POEM * 2])
    for _ in track(range(steps), transient=True):
        places = torch.randint(len(POEM), (BATCH, 1)) + torch.arange(LENGTH + 1)
        tokens = ring[places]
        logits = transformer(tokens[:, :-1], weights)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {n: w.detach().numpy().astype(np.float16) for n, w in weights.items()}, loss.item()


def main() -> None:
    """Train, and write the weights and the alphabet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--to", type=Path, default=Path(__file__).with_name("tyger.npz"))
    arguments = parser.parse_args()
    weights, loss = train(arguments.steps)
    np.savez_compressed(arguments.to, alphabet=np.array(ALPHABET), **weights)
    size = arguments.to.stat().st_size
    print(f"loss {loss:.3f}, {sum(w.size for w in weights.values()):,} weights, {size:,} bytes")


if __name__ == "__main__":
    main()
