"""Train the demo model: DeepSeek-V3's architecture at about ten million parameters, with its
multi-token prediction.

    python demo/train.py DATA OUT --minutes 14

DATA is what tokenizer.py wrote. OUT receives log.csv, best.pt (lowest held-out loss), last.pt
(everything needed to resume, every two minutes) and final.pt. Starting again with the same OUT
resumes from last.pt. The learning rate follows the clock, so that it reaches zero inside the given
time whatever the machine's speed.

The mathematics is that of the published model; only the routed experts are computed differently:
all of them at once as one wide feed-forward layer whose inner units are scaled by the routing
weights (zero for experts not chosen). At this size two large matrix products are faster than
gathering tokens by expert. The shared expert rides along as one more expert whose weight is always
one.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------- model


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocab: int = 4096
    hidden: int = 192
    layers: int = 13
    dense_layers: int = 1
    dense_width: int = 640
    heads: int = 4
    nope: int = 32
    rope: int = 16
    value: int = 32
    q_rank: int = 128
    kv_rank: int = 64
    experts: int = 16
    expert_width: int = 48
    active: int = 4
    groups: int = 4
    active_groups: int = 2
    route_scale: float = 2.5
    eps: float = 1e-6
    theta: float = 10000.0
    positions: int = 4096


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """A product in the activations' type; the weights stay fp32 as the optimizer's master copy."""
    return F.linear(x, weight.to(x.dtype))


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """A weight matrix with outputs of about unit variance times scale."""
    return nn.Parameter(torch.randn(rows, columns) * (scale / math.sqrt(columns)))


class RMSNorm(nn.Module):
    """Root-mean-square normalization, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(
            x.dtype
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of interleaved pairs; x is (batch, heads, length, rope)."""
    even = x[..., 0::2].float()
    odd = x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention in its decompressed form."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.q_a = matrix(s.q_rank, s.hidden)
        self.q_norm = RMSNorm(s.q_rank, s.eps)
        self.q_b = matrix(s.heads * (s.nope + s.rope), s.q_rank)
        self.kv_a = matrix(s.kv_rank + s.rope, s.hidden)
        self.kv_norm = RMSNorm(s.kv_rank, s.eps)
        self.kv_b = matrix(s.heads * (s.nope + s.value), s.kv_rank)
        self.out = matrix(s.hidden, s.heads * s.value, scale=1 / math.sqrt(2 * s.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention."""
        s = self.shape
        (batch, length, _) = x.shape
        q = (
            linear(self.q_norm(linear(x, self.q_a)), self.q_b)
            .view(batch, length, s.heads, -1)
            .transpose(1, 2)
        )
        latent, k_rot = linear(x, self.kv_a).split([s.kv_rank, s.rope], dim=-1)
        kv = (
            linear(self.kv_norm(latent), self.kv_b).view(batch, length, s.heads, -1).transpose(1, 2)
        )
        k_nope, value = kv.split([s.nope, s.value], dim=-1)
        q_nope, q_rot = q.split([s.nope, s.rope], dim=-1)
        k_rot = rotate(k_rot.unsqueeze(1), cos, sin).expand(-1, s.heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rot, cos, sin)], dim=-1)
        k = torch.cat([k_nope, k_rot], dim=-1)
        # Fused attention kernels want one head size, so the values are padded to that of the keys.
        padded = F.pad(value, (0, s.nope + s.rope - s.value))
        mixed = F.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : s.value]
        return linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.out)


class Dense(nn.Module):
    """The feed-forward layer of the first layers."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate = matrix(s.dense_width, s.hidden)
        self.up = matrix(s.dense_width, s.hidden)
        self.down = matrix(s.hidden, s.dense_width, scale=1 / math.sqrt(2 * s.layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """SwiGLU, with the empty load and balance that keep the two kinds of layers alike."""
        none = x.new_zeros(0, dtype=torch.float32)
        return (
            linear(F.silu(linear(x, self.gate)) * linear(x, self.up), self.down),
            none,
            none.sum(),
        )


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Which entries of the last dimension are among its k largest; counting who is ahead fuses
    better than sorting."""
    mine = scores.unsqueeze(-1)
    other = scores.unsqueeze(-2)
    place = torch.arange(scores.shape[-1], device=scores.device)
    ahead = (other > mine) | ((other == mine) & (place < place.unsqueeze(-1)))
    return ahead.sum(-1) < k


class MoE(nn.Module):
    """Routed experts and the shared expert (the last slice of each tensor)."""

    bias: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.router = matrix(s.experts, s.hidden, scale=0.5)
        self.register_buffer("bias", torch.zeros(s.experts))
        slices = s.experts + 1
        width = s.expert_width
        self.gate_up = nn.Parameter(torch.randn(2, slices, width, s.hidden) / math.sqrt(s.hidden))
        down_scale = 1 / math.sqrt(2 * s.layers * width)
        self.down = nn.Parameter(torch.randn(slices, s.hidden, width) * down_scale)

    def choose(self, scores: Tensor) -> Tensor:
        """The mask of chosen experts: the best groups by their two best members, then the best
        experts in them."""
        s = self.shape
        grouped = (scores + self.bias).unflatten(-1, (s.groups, -1))
        group_scores = (grouped * top_mask(grouped, 2)).sum(-1)
        allowed = top_mask(group_scores, s.active_groups).unsqueeze(-1)
        return top_mask(grouped.masked_fill(~allowed, -math.inf).flatten(-2), s.active)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, tokens per expert, and the sequence-wise balance loss."""
        s = self.shape
        scores = F.linear(x.float(), self.router).sigmoid()
        with torch.no_grad():
            chosen = self.choose(scores)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.route_scale
        weights = F.pad(weights, (0, 1), value=1.0).to(x.dtype)
        gate, up = linear(x, self.gate_up.flatten(0, 2)).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).unflatten(-1, (s.experts + 1, -1)) * weights.unsqueeze(-1)
        out = linear(inner.flatten(-2), self.down.transpose(0, 1).flatten(1))
        shares = chosen.float().mean(1) * (s.experts / s.active)
        affinity = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(1)
        return out, chosen.float().sum((0, 1)), (shares * affinity).sum(-1).mean()


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, s: Shape, dense: bool, dropout: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(s.hidden, s.eps)
        self.attention = Attention(s)
        self.mlp_norm = RMSNorm(s.hidden, s.eps)
        self.mlp: Dense | MoE = Dense(s) if dense else MoE(s)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Residual attention and feed-forward; also the load and the balance loss of the router,
        if there is one."""
        x = x + F.dropout(
            self.attention(self.attention_norm(x), cos, sin), self.dropout, self.training
        )
        out, load, balance = self.mlp(self.mlp_norm(x))
        return x + F.dropout(out, self.dropout, self.training), load, balance


class Predictor(nn.Module):
    """The multi-token prediction module: one more layer, fed with the next token's embedding."""

    def __init__(self, s: Shape, dropout: float) -> None:
        super().__init__()
        self.enorm = RMSNorm(s.hidden, s.eps)
        self.hnorm = RMSNorm(s.hidden, s.eps)
        self.eh_proj = matrix(s.hidden, 2 * s.hidden)
        self.block = Block(s, dense=False, dropout=dropout)
        self.norm = RMSNorm(s.hidden, s.eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states that predict the token after the embedded one."""
        x = linear(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1), self.eh_proj)
        x, load, balance = self.block(x, cos, sin)
        return self.norm(x), load, balance


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the shared output head."""
    return F.cross_entropy(linear(hidden, head).float().flatten(0, 1), targets.flatten())


class Model(nn.Module):
    """The whole network; embedding and head are shared with the prediction module."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = s
        self.dtype = dtype
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.1)
        self.blocks = nn.ModuleList(Block(s, i < s.dense_layers, dropout) for i in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)
        self.head = matrix(s.vocab, s.hidden, scale=0.5)
        self.predictor = Predictor(s, dropout)
        frequency = s.theta ** -(torch.arange(0, s.rope, 2, dtype=torch.float64) / s.rope)
        angles = torch.outer(torch.arange(s.positions, dtype=torch.float64), frequency).float()
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.loss_of: Callable[[Tensor, Tensor, Tensor], Tensor] = next_token_loss

    def hidden(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Normalized last hidden states, with the load and balance loss of every MoE layer."""
        x = F.embedding(tokens, self.embed).to(self.dtype)
        cos = self.cos[: tokens.shape[1]]
        sin = self.sin[: tokens.shape[1]]
        loads = []
        balances = []
        for i, block in enumerate(self.blocks):
            x, load, balance = block(x, cos, sin)
            if i >= self.shape.dense_layers:
                loads.append(load)
                balances.append(balance)
        return self.norm(x), loads, balances

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits of the main model."""
        return linear(self.hidden(tokens)[0], self.head)

    def forward(self, window: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For windows of length + 2 tokens: main loss, prediction-module loss, balance loss,
        loads by layer."""
        length = window.shape[1] - 2
        hidden, loads, balances = self.hidden(window[:, :length])
        following = window[:, 1 : length + 1]
        embedded = F.embedding(following, self.embed).to(self.dtype)
        cos = self.cos[:length]
        sin = self.sin[:length]
        ahead, load, balance = self.predictor(embedded, hidden, cos, sin)
        main = self.loss_of(hidden, self.head, following)
        second = self.loss_of(ahead, self.head, window[:, 2:])
        return main, second, torch.stack([*balances, balance]).mean(), torch.stack([*loads, load])

    def moe_layers(self) -> list[MoE]:
        """The MoE layers in the order of the loads that forward returns."""
        blocks = [*self.blocks, self.predictor.block]
        return [block.mlp for block in blocks if isinstance(block.mlp, MoE)]

    def compile_parts(self) -> None:
        """Compile one layer of each kind rather than the whole network: all layers then share
        two compiled graphs."""
        for block in [*self.blocks, self.predictor.block]:
            block.compile(dynamic=False)
        self.loss_of = torch.compile(next_token_loss, dynamic=False)


# ---------------------------------------------------------------- optimizer


def orthogonalise(batch: Tensor) -> Tensor:
    """Replace each matrix of a (count, rows, columns) batch by one with the same singular
    vectors and values near 1."""
    tall = batch.shape[1] > batch.shape[2]
    x = batch.transpose(1, 2) if tall else batch
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(
        torch.bfloat16 if batch.is_cuda else torch.float32
    )
    # quintic Newton-Schulz steps of the Muon optimizer
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(batch.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised, scaled to the root mean square that
    AdamW's updates have."""

    def __init__(
        self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": 0.0, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; matrices of equal shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
            for shape, parameters in by_shape.items():
                self.update(parameters, shape, group)

    def update(
        self, parameters: list[nn.Parameter], shape: tuple[int, ...], group: dict[str, Any]
    ) -> None:
        """Nesterov momentum, orthogonalisation and decoupled weight decay for parameters of one
        matrix shape."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors: list[Tensor] = list(parameters)
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        looks = torch._foreach_lerp(gradients, buffers, group["momentum"])
        batch = torch.cat([look.reshape(-1, *shape) for look in looks])
        steps = orthogonalise(batch) * (0.2 * math.sqrt(max(shape)))
        pieces = steps.split([p.numel() // (shape[0] * shape[1]) for p in parameters])
        torch._foreach_mul_(tensors, 1 - group["lr"] * group["decay"])
        updates = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        torch._foreach_add_(tensors, updates, alpha=-group["lr"])


def optimizers(model: Model, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices; AdamW for embedding, head, routers and norms."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2 or name in ("embed", "head") or name.endswith("router")
        (outer if plain else inner).append(parameter)
    groups = [
        {"params": [p for p in outer if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in outer if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=model.embed.is_cuda
    )
    return [Muon(inner, decay=decay), adam]


# ---------------------------------------------------------------- data


def load_stream(path: Path) -> Tensor:
    """A token stream as int16, which every torch operation supports and 4096 tokens fit."""
    with lzma.open(path, "rb") as source:
        source_bytes: Any = source
        return torch.from_numpy(np.load(source_bytes).astype(np.int16))


class Windows:
    """Shuffled windows that cover every stream once per epoch, books twice, at offsets that
    differ by epoch."""

    def __init__(
        self, folder: Path, length: int, batch: int, device: torch.device, book_weight: int
    ) -> None:
        paths = sorted(folder.glob("train-*.npy.xz"))
        streams = [load_stream(path) for path in paths]
        self.weights = [book_weight if "book" in path.name else 1 for path in paths]
        self.sizes = [len(stream) for stream in streams]
        self.tokens = torch.cat(streams).to(device)
        self.offsets = torch.arange(length + 2, device=device)
        self.length = length
        self.batch = batch
        self.epoch = 0
        self.cursor = 0
        self.starts = self.shuffle()

    def shuffle(self) -> Tensor:
        """Window starts of the current epoch, which its number alone determines."""
        random = np.random.default_rng(1000 + self.epoch)
        starts = []
        base = 0
        for size, weight in zip(self.sizes, self.weights, strict=True):
            for _ in range(weight):
                first = int(random.integers(min(self.length, max(1, size - self.length - 2))))
                starts.append(base + np.arange(first, size - self.length - 2, self.length))
            base += size
        return torch.from_numpy(random.permutation(np.concatenate(starts))).to(self.tokens.device)

    def next(self) -> Tensor:
        """The next batch of windows."""
        if self.cursor + self.batch > len(self.starts):
            self.epoch = self.epoch + 1
            self.cursor = 0
            self.starts = self.shuffle()
        starts = self.starts[self.cursor : self.cursor + self.batch]
        self.cursor += self.batch
        return self.tokens[starts.unsqueeze(1) + self.offsets].long()

    def seek(self, epoch: int, cursor: int) -> None:
        """Continue where an earlier run stopped."""
        self.epoch = epoch
        self.cursor = cursor
        self.starts = self.shuffle()


def heldout_batches(
    stream: Tensor, length: int, rows: int, device: torch.device
) -> Iterator[Tensor]:
    """Disjoint held-out windows, whose targets cover the text once."""
    count = (len(stream) - 2) // length
    windows = torch.stack([stream[i * length : (i + 1) * length + 2] for i in range(count)])
    for batch in windows.split(rows):
        yield batch.to(device).long()


@torch.no_grad()
def evaluate(
    model: Model, stream: Tensor, length: int, rows: int, device: torch.device
) -> dict[str, Any]:
    """Held-out losses of both heads and the largest expert load over the mean one, by MoE layer."""
    model.eval()
    main = second = 0.0
    count = 0
    loads: Tensor | int = 0
    # a second set of compiled graphs would cost more than it saves
    with torch.compiler.set_stance("force_eager"):
        for window in heldout_batches(stream, length, rows, device):
            losses = model(window)
            main += losses[0].item() * len(window)
            second += losses[1].item() * len(window)
            loads = loads + losses[3]
            count += len(window)
    model.train()
    assert isinstance(loads, Tensor)
    balance = (loads.amax(1) / loads.mean(1)).tolist()
    return {"loss": main / count, "mtp": second / count, "balance": [round(x, 2) for x in balance]}


# ---------------------------------------------------------------- training


COLUMNS = ["step", "seconds", "tokens", "lr", "train_loss", "train_mtp_loss"]
COLUMNS += ["heldout_loss", "heldout_mtp_loss", "heldout_bits_per_byte", "worst_expert_load"]


class Run:
    """The state of one training run: model, optimizers, data position, clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(options.seed)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = Model(Shape(), options.dropout, dtype).to(self.device)
        self.optimizers = optimizers(self.model, options.decay)
        self.windows = Windows(
            options.data, options.length, options.batch, self.device, options.book_weight
        )
        self.heldout = load_stream(options.data / "heldout.npy.xz")
        self.bytes_per_token = json.loads((options.data / "data.json").read_text())[
            "heldout_bytes_per_token"
        ]
        self.step = 0
        self.best = math.inf
        self.spent = 0.0  # seconds of earlier starts
        self.began = time.monotonic()
        options.out.mkdir(parents=True, exist_ok=True)
        if (options.out / "last.pt").exists():
            self.resume()

    def seconds(self) -> float:
        """Seconds of training so far, those before a restart included."""
        return self.spent + time.monotonic() - self.began

    def progress(self) -> float:
        """How much of the run is over, from 0 to 1."""
        if self.options.steps:
            return min(1.0, self.step / self.options.steps)
        return min(1.0, self.seconds() / (60 * self.options.minutes - self.options.reserve))

    def resume(self) -> None:
        """Take up the state of the last checkpoint."""
        state = torch.load(
            self.options.out / "last.pt", map_location=self.device, weights_only=True
        )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.windows.seek(state["epoch"], state["cursor"])
        self.step = state["step"]
        self.best = state["best"]
        self.spent = state["seconds"]
        print(f"resumed at step {self.step}, {self.spent:.0f} s", flush=True)

    def save(self, name: str, everything: bool) -> None:
        """Write a checkpoint under a temporary name first, so that an interrupted write harms
        nothing."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "shape": asdict(self.model.shape),
            "step": self.step,
        }
        if everything:
            state |= {"optimizers": [o.state_dict() for o in self.optimizers], "best": self.best}
            state |= {
                "epoch": self.windows.epoch,
                "cursor": self.windows.cursor,
                "seconds": self.seconds(),
            }
        partial = self.options.out / f"{name}.partial"
        torch.save(state, partial)
        partial.rename(self.options.out / name)

    def set_rates(self, progress: float) -> float:
        """Linear warm-up, then linear decay to zero."""
        rate = self.options.rate * min(1.0, (self.step + 1) / self.options.warmup) * (1 - progress)
        for optimizer, factor in zip(self.optimizers, (1.0, self.options.adam_factor), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        return rate

    def train_step(self, progress: float) -> tuple[Tensor, Tensor]:
        """One optimizer step and the router-bias update that balances the experts."""
        window = self.windows.next()
        sums = [torch.zeros((), device=self.device) for _ in range(2)]
        loads: Tensor | int = 0
        mtp_weight = 0.3 - 0.2 * progress
        pieces = window.chunk(self.options.accumulate)
        for piece in pieces:
            main, second, balance, load = self.model(piece)
            loss = main + mtp_weight * second + self.options.balance * balance
            (loss / len(pieces)).backward()
            sums = [
                total + part.detach() / len(pieces)
                for total, part in zip(sums, (main, second), strict=True)
            ]
            loads = loads + load
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert isinstance(loads, Tensor)
        self.shift_biases(loads, self.options.bias_rate * min(1.0, 10 * (1 - progress)))
        self.step += 1
        return sums[0], sums[1]

    @torch.no_grad()
    def shift_biases(self, loads: Tensor, rate: float) -> None:
        """Raise the bias of underused experts and lower that of overused ones, without any
        gradient."""
        shifts = rate * (loads.mean(1, keepdim=True) - loads).sign()
        for layer, shift in zip(self.model.moe_layers(), shifts, strict=True):
            layer.bias += shift

    def report(self, rate: float, losses: tuple[Tensor, Tensor], full: bool) -> None:
        """Append a line to the log; with full, measure the held-out loss and keep the best
        model."""
        tokens = self.step * self.options.batch * self.options.length
        row: list[Any] = [self.step, round(self.seconds(), 1), tokens, f"{rate:.3e}"]
        row += [round(loss.item(), 4) for loss in losses]
        if full:
            options = self.options
            found = evaluate(
                self.model, self.heldout, options.length, options.eval_rows, self.device
            )
            bits = found["loss"] / math.log(2) / self.bytes_per_token
            row += [
                round(found["loss"], 4),
                round(found["mtp"], 4),
                round(bits, 4),
                max(found["balance"]),
            ]
            print("expert load, max/mean by layer:", *found["balance"], flush=True)
            if found["loss"] < self.best:
                self.best = found["loss"]
                self.save("best.pt", everything=False)
        print(*row, flush=True)
        row += [""] * (len(COLUMNS) - len(row))
        with (self.options.out / "log.csv").open("a", newline="") as log:
            csv.writer(log).writerow(row)

    def train(self) -> None:
        """Train until the time or the steps are used up."""
        if self.device.type == "cuda" and not self.options.eager:
            self.model.compile_parts()
        self.write_header()
        evaluated = saved = self.seconds()
        while (progress := self.progress()) < 1:
            rate = self.set_rates(progress)
            losses = self.train_step(progress)
            if self.step % self.options.log_every == 0:
                due = self.seconds() - evaluated > self.options.eval_seconds
                self.report(rate, losses, due)
                evaluated = self.seconds() if due else evaluated
                if self.seconds() - saved > 120:
                    self.save("last.pt", everything=True)
                    saved = self.seconds()
        self.report(0.0, losses, full=True)
        self.save("last.pt", everything=True)
        self.save("final.pt", everything=False)
        print(
            f"done: {self.step} steps, {self.windows.epoch} epochs, {self.seconds():.0f} s",
            flush=True,
        )

    def write_header(self) -> None:
        """Name the columns of a new log and describe the run."""
        count = sum(p.numel() for p in self.model.parameters())
        print(
            f"{count} parameters, {len(self.windows.starts)} windows an epoch, {self.device}",
            flush=True,
        )
        path = self.options.out / "log.csv"
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="folder that tokenizer.py wrote")
    parser.add_argument("out", type=Path, help="folder for checkpoints and the log")
    parser.add_argument(
        "--minutes", type=float, default=14.0, help="time for everything, compilation included"
    )
    parser.add_argument(
        "--reserve", type=float, default=15.0, help="seconds of it kept for the last evaluation"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="train this many steps instead of by the clock"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens per window")
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="pieces in which a batch is computed"
    )
    parser.add_argument(
        "--eval-rows", type=int, default=16, help="held-out windows computed at a time"
    )
    parser.add_argument(
        "--rate", type=float, default=4e-3, help="peak learning rate of the inner matrices"
    )
    parser.add_argument(
        "--adam-factor", type=float, default=0.75, help="rate of all other weights relative to it"
    )
    parser.add_argument("--warmup", type=int, default=150, help="steps of linear warm-up")
    parser.add_argument("--decay", type=float, default=0.1, help="decoupled weight decay")
    parser.add_argument(
        "--dropout", type=float, default=0.05, help="dropout on what each layer adds"
    )
    parser.add_argument(
        "--balance", type=float, default=1e-4, help="weight of the sequence-wise balance loss"
    )
    parser.add_argument(
        "--bias-rate", type=float, default=1e-3, help="size of the router-bias updates"
    )
    parser.add_argument(
        "--book-weight", type=int, default=2, help="how often books are read per epoch"
    )
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines of the log")
    parser.add_argument(
        "--eval-seconds", type=float, default=30.0, help="time between held-out evaluations"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    Run(parse()).train()
