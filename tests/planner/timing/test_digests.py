"""A table of times is found out when its kernels change, and only then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rorqual.config.hardware import DATA
from rorqual.errors import ConfigError
from rorqual.planner.costs.parallel_costs import RankOp
from rorqual.planner.timing import digests, tables
from rorqual.planner.validation import validation

GEMM = "ops/triton/gemm/fp8_gemm.py"
TUNED = "ops/triton/tuned/nvidia-h200.json"
DECODE = RankOp("a", "a", "attention", 1, 0, 1, 1, "bfloat16", (128, 1, 8, 1, 1000))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' source as it stands, to be edited."""
    folder = tmp_path_factory.mktemp("tree") / "rorqual"
    shutil.copytree(digests.PACKAGE / "ops" / "triton", folder / "ops" / "triton")
    return folder


def edited(package: Path, name: str, edit: Callable[[str], str]) -> set[str]:
    """The families whose digest the edit changes; the file is put back."""
    path = package / name
    text = path.read_text()
    new = edit(text)
    assert new != text, "the edit is one"
    before = digests.digests(package)
    path.write_text(new)
    try:
        after = digests.digests(package)
    finally:
        path.write_text(text)
    return {family for family in before if before[family] != after[family]}


def swap(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text, old
        return text.replace(old, new, 1)

    return edit


def planted(line: str) -> Callable[[str], str]:
    return lambda text: text + f"\n\ndef planted(x, y=3):\n{line}\n"


def test_a_copy_of_the_tree_has_its_digests(source: Path) -> None:
    assert digests.digests(source) == digests.present()
    assert len(set(digests.present().values())) == len(digests.FAMILIES)


def test_an_edit_of_a_kernel_is_seen_where_it_is_run(source: Path) -> None:
    assert edited(source, GEMM, planted("    return x")) == {"gemm_fp8"}
    decode = edited(source, "ops/triton/attention/mla_decode.py", planted("    return x"))
    assert decode == {"mla_decode", "gqa_decode", "mla_prefill", "gqa_prefill"}, "who imports it"
    # imported within a function alone
    inner = "ops/triton/attention/prefill_sm90.py"
    assert edited(source, inner, planted("    return x")) == {"mla_prefill", "gqa_prefill"}


def test_one_token_of_fp8_has_kernels_of_other_modules(source: Path) -> None:
    """They are int8's and int4's as well."""
    several = {"gemm_fp8", "gemm_int4", "experts_fp8", "experts_int4"}
    kernel = "ops/triton/quantized/rounded_direct.py"
    assert edited(source, kernel, planted("    return x")) == several
    experts = "ops/triton/moe/small_batch.py"
    assert edited(source, experts, planted("    return x")) >= {"experts", "experts_fp8"}
    rule = swap('[null, 1], "columns": [4096, 4096]', '[null, 1], "columns": [4096, 4097]')
    assert edited(source, TUNED, rule) == {"gemm_fp8", "gemm_int4"}


def test_a_changed_number_operator_or_default_is_seen(source: Path) -> None:
    body = planted("    total = x + 1\n    return total")
    path = source / GEMM
    plain = path.read_text()
    path.write_text(body(plain))
    try:
        for old, new in (
            ("total = x + 1", "total = x + 2"),
            ("total = x + 1", "total = x - 1"),
            ("total = x + 1", "total = y + 1"),
            ("y=3):", "y=4):"),
            ("planted(x, y", "planted(z, y"),
            ("return total", "return x"),
            ("\n    total", "\n    global total\n    total"),
        ):
            assert edited(source, GEMM, swap(old, new)) == {"gemm_fp8"}, new
    finally:
        path.write_text(plain)


def test_comments_docstrings_layout_and_local_names_are_not(source: Path) -> None:
    body = planted(
        "    qq = x + 1\n    def qadd(z):\n        qsum = z + qq\n        return qsum\n"
        "    return [qadd(qone) for qone in qq]"
    )
    path = source / GEMM
    plain = path.read_text()
    path.write_text(body(plain))
    try:
        for edit in (
            swap("    qq = x + 1", "    # why\n    qq = (x   +   1)  # so"),
            swap("    qq = x + 1", '    """What it does."""\n    qq = x + 1'),
            lambda text: text.replace("qq", "amount"),
            lambda text: text.replace("qsum", "both"),
            lambda text: text.replace("qadd", "plus"),
            lambda text: text.replace("qone", "item"),
        ):
            assert edited(source, GEMM, edit) == set()
        # another local read in the same place is not a rename
        assert edited(source, GEMM, swap("qsum = z + qq", "qsum = z + qadd")) == {"gemm_fp8"}
    finally:
        path.write_text(plain)


def test_real_kernels_keep_their_digest_when_a_docstring_changes(source: Path) -> None:
    assert edited(
        source, GEMM, lambda text: "# a comment\n" + text.replace('"""', '"""So: ', 1)
    ) == (set())


def test_a_tuning_rule_counts_and_its_time_does_not(source: Path) -> None:
    def rules(change: Callable[[dict], None]) -> Callable[[str], str]:
        def edit(text: str) -> str:
            data = json.loads(text)
            change(data["kernels"])
            return json.dumps(data)

        return edit

    def slower(kernels: dict) -> None:
        kernels["linear_fp8"][0]["us"] = 1e6

    def wider(kernels: dict) -> None:
        kernels["linear_fp8"][0]["config"]["warps"] = 32

    assert edited(source, TUNED, rules(slower)) == set()
    assert edited(source, TUNED, rules(wider)) == {"gemm_fp8"}
    assert edited(source, TUNED, rules(lambda kernels: kernels.pop("gqa_decode"))) == {"gqa_decode"}


def test_of_what_reads_rules_only_what_chooses_counts(source: Path) -> None:
    choice = swap("(most is None or value <= most)", "(most is None or value < most)")
    assert "gqa_decode" in edited(source, digests.RULES, choice)
    reading = swap('raise TypeError(f"{kind.__name__} has no field', 'raise TypeError(f"no field')
    assert edited(source, digests.RULES, reading) == set()


def test_what_chooses_between_kernels_counts(source: Path) -> None:
    change = swap("if gemv.chosen(rows, weight.data):", "if rows.shape[0] < 3:")
    seen = edited(source, digests.BACKEND, change)
    assert seen == {"gemm_bfloat16", "gemm_fp8", "gemm_int4"}
    with pytest.raises(ConfigError, match="has no function linear"):
        edited(source, digests.BACKEND, swap("def linear(", "def product("))


# ---- tables


def table(kernels: dict[str, str] | None) -> tables.KernelTables:
    data = json.loads((DATA / "kernels_h200_rorqual.json").read_text())
    data["meta"]["kernels"] = kernels or {}
    return tables.KernelTables(data, tables.load_tables("h200_sglang"))


def test_tables_know_their_kernels() -> None:
    now = dict(digests.present())
    assert table(None).basis(DECODE, True) == ("mla_decode", tables.STALE), "no digest was kept"
    assert table(now).basis(DECODE, True) == ("mla_decode", tables.CURRENT)
    assert table(now | {"mla_decode": "0"}).basis(DECODE, True) == ("mla_decode", tables.STALE)
    assert table(now | {"experts": "0"}).basis(DECODE, True)[1] == tables.CURRENT
    product = replace(DECODE, kind="gemm", shape=(8, 2048, 2048))
    assert table(now).basis(product, True) == ("gemm_bfloat16", tables.CURRENT)
    other = replace(product, dtype="int8")
    assert table(now).basis(other, True) == ("gemm_int8", tables.BORROWED)
    assert table(now).basis_between(True) == ("between", tables.CURRENT)
    assert table(now).basis_between(False) == ("between", tables.STALE), "nothing was learnt"
    base = tables.load_tables("h200_sglang")
    assert base.basis(DECODE, True) == ("mla_decode", tables.THEIRS)


def test_a_planted_edit_fails_the_validation(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with the digests of their time pass until a kernel is edited."""
    now = table(dict(digests.present()))
    monkeypatch.setattr("rorqual.planner.timing.profiles.load_tables", lambda name: now)
    notes = validation.stale_groups(validation.validate(["offline-qwen3"]))
    assert [note for note in notes if "stale" in note] == []
    path = source / "ops/triton/moe/align.py"
    plain = path.read_text()
    path.write_text(planted("    return y")(plain))
    try:
        changed = digests.digests(source)
    finally:
        path.write_text(plain)
    monkeypatch.setattr(digests, "present", lambda: changed)
    notes = validation.stale_groups(validation.validate(["offline-qwen3"]))
    first, groups, command = notes[:3]
    assert first.startswith("stale tables: between, experts have changed")
    assert groups.endswith("offline-qwen3-30b")
    assert "rorqual bench calibrate --full" in command
