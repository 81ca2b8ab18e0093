"""Sampling ops against their definition, in fp64 and token by token: reference, compiled CPU
kernels, Triton kernels.

A faster version may move a boundary between two tokens by a share of the whole mass, and may decide
otherwise where top-p or min-p lies as close to a token's limit: 1e-6 on the GPU, rounding of
doubles on the CPU. What is checked holds for any such version.
"""

from __future__ import annotations

import pytest

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton

# isort: split
import torch
from torch import Tensor

from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops
from rorqual.ops.reference import Distribution
from rorqual.ops.rng import uniform
from rorqual.ops.select import ops_for

pytestmark = pytest.mark.exhaustive

TOLERANCE = {"reference": 1e-12, "cpu": 1e-12, "triton": 1e-6}
LOWEST = 0.0
HIGHEST = 1 - 2.0**-53
OFF = (1.0, 0.0, 0)  # top_p, min_p, top_k
SETTINGS = [  # temperature and cuts
    (1.0, *OFF),
    (0.7, 0.9, 0.0, 0),
    (1.0, 1.0, 0.0, 40),
    (0.8, 0.95, 0.02, 20),
    (1.3, 1.0, 0.1, 0),
    (1.0, 1.0, 0.0, 1),
    (1.0, 1e-6, 0.0, 0),
    (100.0, 0.9, 0.0, 0),
    (1e-5, 0.9, 0.0, 0),
    (0.01, 1.0, 0.0, 5),
    (100.0, 0.6, 0.0, 300),
    (1.0, 0.999999, 0.0, 0),
    (0.0, 0.5, 0.0, 7),
    (1.0, 1.0, 1.0, 0),
    (1.0, 0.5, 0.0, 10**6),
    (2.0, 1.0, 1e-7, 0),
    (1.0, 0.3, 0.5, 3),
    (1.0, 1.0, 0.0, 300),
]


def logits_like(kind: str, rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, vocab, generator=generator) * 3
    if kind == "equal":
        return torch.full_like(x, -1.25)
    if kind == "masked":  # as a grammar leaves them: few tokens, or one
        allowed = torch.rand(rows, vocab, generator=generator) < 0.05
        allowed[: rows // 2] = False
        allowed[:, vocab // 3] = True
        return x.masked_fill(~allowed, float("-inf"))
    if kind == "ties":
        # both zeros among them
        return (
            x.round().clamp(-2, 2) * 0.5 * torch.tensor([1.0, -1.0]).repeat(vocab // 2 + 1)[:vocab]
        )
    return x + 1e4 if kind == "far" else x


def drawing_case(
    kind: str, vocab: int, seed: int = 0, settings: list[tuple[float, ...]] = SETTINGS
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [M, vocab], settings [M, 4] and numbers [M], a row a setting; the first numbers are
    the least and the largest."""
    generator = torch.Generator().manual_seed(seed)
    logits = logits_like(kind, len(settings), vocab, generator)
    numbers = torch.rand(len(settings), dtype=torch.float64, generator=generator)
    numbers[seed % len(settings)] = LOWEST
    numbers[(seed + 3) % len(settings)] = HIGHEST
    return (
        logits.to(DEVICE),
        torch.tensor(settings, dtype=torch.float64, device=DEVICE),
        numbers.to(DEVICE),
    )


def weights_of(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.double()
    return ((wide - wide.max()) / max(temperature, 1e-5)).exp()


def check_kept(
    logits: Tensor, settings: list[float], floor: float, filters: bool, tolerance: float
) -> None:
    """One row: what reaches `floor` is what the cuts keep, but for limits met within the
    tolerance."""
    temperature, top_p, min_p, top_k = settings if filters else (settings[0], *OFF)
    weights = weights_of(logits, temperature)
    among = weights > 0
    if 0 < top_k < logits.numel():
        among &= weights >= weights.sort(descending=True).values[int(top_k) - 1]
    kept = (logits >= floor) & (weights > 0)
    total = weights[among].sum()
    assert not (kept & ~among).any(), "top-k keeps fewer"
    least = weights[kept].min()
    above = top_p * total
    if top_p < 1:
        assert weights[weights > least].sum() < above + tolerance * total, "top-p keeps fewer"
    assert least >= min_p * (1 - tolerance), "min-p keeps fewer"
    left = among & ~kept
    if left.any():
        best = weights[left].max()
        enough = top_p < 1 and weights[weights > best].sum() >= above - tolerance * total
        assert best < least, "ties are kept or left together"
        assert enough or best < min_p * (1 + tolerance), "more should be kept"


def check_draw(weights: Tensor, number: float, token: int, tolerance: float) -> None:
    """The token is that of the inverse cumulative distribution, or the number lies within the
    tolerance of its boundary."""
    assert weights[token] > 0, "a token that is cut was drawn"
    passed = weights.cumsum(0) / weights.sum()
    before = passed[token] - weights[token] / weights.sum()
    assert before - tolerance <= number <= passed[token] + tolerance


def check_distribution(
    ops: Ops, logits: Tensor, settings: Tensor, numbers: Tensor, filters: bool
) -> Distribution:
    tolerance = TOLERANCE[ops.name]
    given = ops.distribution(logits, settings, filters)
    tokens = ops.sample_from(given, numbers)
    assert given.best.tolist() == logits.argmax(-1).tolist()
    assert given.summary.isfinite()[:, [0, 1, 3]].all()
    for row, asked in enumerate(settings.tolist()):
        floor = float(given.summary[row, 2])
        token = int(tokens[row])
        check_kept(logits[row], asked, floor, filters, tolerance)
        weights = weights_of(logits[row], asked[0]).masked_fill(logits[row] < floor, 0)
        assert float(given.summary[row, 3]) == pytest.approx(float(weights.sum()), rel=tolerance)
        if asked[0] < 1e-5:
            assert token == int(given.best[row])
        else:
            check_draw(weights, float(numbers[row]), token, tolerance)
    return given


KINDS = ("random", "equal", "masked", "ties", "far")
ON_CPU = [Ops(), CpuOps(native=False), CpuOps()]
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="the tensors are on the card")
EVERY = [
    *(pytest.param(ops, marks=on_cpu) for ops in ON_CPU),
    pytest.param(None if SKIP_REASON else ops_for("cuda"), marks=needs_triton),
]
NAMES = ["reference", "torch", "native", "triton"]


@on_cpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [50, 4096])
@pytest.mark.parametrize("ops", ON_CPU, ids=NAMES[:3])
def test_draws_follow_the_definition(ops: Ops, kind: str, vocab: int) -> None:
    for seed in range(3 if vocab == 50 else 1):
        case = drawing_case(kind, vocab, seed)
        check_distribution(ops, *case, filters=True)
        check_distribution(ops, *case, filters=False)


@on_cpu
def test_native_draws_over_a_real_vocabulary() -> None:
    for kind, settings in (
        ("random", SETTINGS[1:5]),
        ("ties", SETTINGS[3:4]),
        ("random", SETTINGS[7:8]),
    ):
        check_distribution(CpuOps(), *drawing_case(kind, 129_280, settings=settings), filters=True)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "vocab"),
    [("masked", 50), ("random", 4096), ("ties", 9001), ("equal", 4097), ("far", 300)],
)
def test_kernels_draws_follow_the_definition(kind: str, vocab: int) -> None:
    ops = ops_for("cuda")
    settings = SETTINGS if kind == "random" else SETTINGS[1::3]
    case = drawing_case(kind, vocab, seed=4, settings=settings)
    check_distribution(ops, *case, filters=True)
    check_distribution(ops, *case, filters=False)


@needs_triton
def test_kernels_draws_over_a_real_vocabulary() -> None:
    """The last row's candidates do not fit their places, and are searched where they lie."""
    check_distribution(
        ops_for("cuda"),
        *drawing_case("random", 129_280, settings=[SETTINGS[3], SETTINGS[1]]),
        filters=True,
    )
    check_distribution(
        ops_for("cuda"),
        *drawing_case("equal", 9000, settings=[SETTINGS[7], SETTINGS[2]]),
        filters=True,
    )


@pytest.mark.parametrize("ops", EVERY, ids=NAMES)
def test_a_row_without_cuts_is_drawn_alike_beside_rows_with_cuts(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(3, 5000, generator=generator).to(DEVICE).expand(3, -1)
    settings = torch.tensor(
        [(0.9, *OFF), (0.9, 0.7, 0, 9), (0.9, *OFF)], dtype=torch.float64, device=DEVICE
    )
    for _ in range(4):
        numbers = torch.rand(3, dtype=torch.float64, generator=generator).to(DEVICE)
        mixed, plain = (
            ops.sample_from(ops.distribution(logits, settings, filters), numbers)
            for filters in (True, False)
        )
        assert mixed[[0, 2]].tolist() == plain[[0, 2]].tolist()
        alone = ops.sample_from(ops.distribution(logits[2:], settings[2:], False), numbers[2:])
        assert alone.tolist() == mixed[2:].tolist()


@pytest.mark.parametrize("ops", EVERY, ids=NAMES)
def test_a_number_on_a_boundary_draws_the_token_behind_it(ops: Ops) -> None:
    places = [0, 1, 127, 128, 4095, 4096, 8191]
    logits = torch.zeros(len(places), 8192, device=DEVICE)
    settings = torch.tensor([(1.0, *OFF)] * len(places), dtype=torch.float64, device=DEVICE)
    numbers = torch.tensor(places, dtype=torch.float64, device=DEVICE) / 8192
    assert ops.sample_from(ops.distribution(logits, settings, False), numbers).tolist() == places


def test_native_and_reference_agree_token_by_token() -> None:
    for seed in range(6):
        logits, settings, numbers = (t.cpu() for t in drawing_case("random", 1000, seed))
        for filters in (False, True):
            draws = [
                ops.sample_from(ops.distribution(logits, settings, filters), numbers).tolist()
                for ops in ON_CPU
            ]
            assert draws[0] == draws[1] == draws[2]


def test_native_thresholds_of_every_size() -> None:
    """However many are kept: few are sorted, more are narrowed down by histograms whose bins end
    anywhere."""
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(5)).expand(1000, -1)
    shares = torch.linspace(0.001, 0.999, 1000, dtype=torch.float64)
    off = torch.ones_like(shares)
    none = torch.zeros_like(shares)
    warm = torch.full_like(shares, 0.8)
    for columns in (
        (warm, off, none, torch.arange(1, 2000, 2).double()),
        (warm, shares, none, none),
    ):
        settings = torch.stack(columns, 1)
        floors = [
            ops.distribution(logits, settings, True).summary[:, 2] for ops in (CpuOps(), Ops())
        ]
        assert torch.equal(*floors)


# ---- speculation


@pytest.mark.parametrize("ops", EVERY, ids=NAMES)
def test_probabilities_are_written_and_looked_up(ops: Ops) -> None:
    logits, settings, _ = drawing_case("random", 700, seed=2, settings=SETTINGS[:4])
    given = ops.distribution(logits, settings, True)
    plane = torch.full((9, 700), float("nan"), device=DEVICE)
    rows = torch.tensor([7, 0, 3, 4], device=DEVICE)
    ops.write_probs(given, plane, rows)
    expected = Ops().distribution(logits, settings, True).probs()
    torch.testing.assert_close(plane[rows].double(), expected, rtol=3e-6, atol=1e-9)
    assert plane[[1, 2, 5, 6, 8]].isnan().all()
    # in rows 0 and 2, the first of every two
    tokens = torch.tensor([[3], [int(logits[2].argmax())]], device=DEVICE)
    at = given.probability(tokens).squeeze(1)
    torch.testing.assert_close(at, expected[[0, 2], tokens[:, 0]], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("ops", EVERY, ids=NAMES)
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("vocab", [60, 5000])
def test_what_a_refused_draft_leaves(ops: Ops, certain: bool, vocab: int) -> None:
    """p of rows 5, 0 and 2; q of rows 1, 3 and 0. The third draw finds nothing left over, the
    last is not wanted."""
    tolerance = TOLERANCE[ops.name]
    logits, settings, numbers = drawing_case(
        "random", vocab, seed=1, settings=[(1.0, *OFF)] * 3 + [(0.9, 0.8, 0, 30)] * 3
    )
    logits[2] = float("-inf")
    logits[2, 7] = 0.0  # one token alone, which is refused, or of which q is as sure
    given = ops.distribution(logits, settings, True)
    q = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)).softmax(-1).to(DEVICE)
    q[0] = torch.nn.functional.one_hot(torch.tensor(7), vocab).to(DEVICE)
    rows, q_rows = (torch.tensor(x, device=DEVICE) for x in ([5, 0, 2, -1], [1, 3, 0, 2]))
    refused = torch.tensor([int(logits[5].argmax()), 4, 7, 1], device=DEVICE)
    p = given.probs()
    for number in (LOWEST, 0.3, 0.8, HIGHEST):
        numbers = torch.full((4,), number, dtype=torch.float64, device=DEVICE)
        found = ops.sample_residual(
            given, rows, numbers, refused, *(() if certain else (q, q_rows))
        )
        assert found[2:].tolist() == [-1, -1]
        for i in range(2):
            rest = p[rows[i]] - (
                torch.nn.functional.one_hot(refused[i], vocab) if certain else q[q_rows[i]].double()
            )
            check_draw(rest.clamp(min=0), number, int(found[i]), 3 * tolerance)


@pytest.mark.parametrize("ops", EVERY, ids=NAMES)
def test_random_numbers_are_the_same_bits(ops: Ops) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345], device=DEVICE)[:, None].expand(
        6, 40
    )
    positions = torch.arange(40, device=DEVICE).expand(6, 40) * 1001
    for stream in range(4):
        assert torch.equal(ops.uniform(seeds, positions, stream), uniform(seeds, positions, stream))
        assert torch.equal(
            ops.uniform(seeds.contiguous(), positions.contiguous(), stream),
            uniform(seeds, positions, stream),
        )
