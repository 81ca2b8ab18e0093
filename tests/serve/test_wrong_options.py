"""Options of `rorqual serve` that would break a server, or have no effect, are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

pytest.importorskip("fastapi")

from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.config.option import options_of
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.serve.config import ServeConfig
from rorqual.serve.limits import ServerLimits
from rorqual.text.grammar_limits import GrammarLimits
from tests import forked

OURS = (ServeConfig, ServerLimits, GrammarLimits)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as found:
        CliRunner().invoke(app, ["serve", *words], catch_exceptions=False)
    said = str(found.value)
    assert "\n" not in said
    return said


def flags_of(cls: type, kind: type) -> list[str]:
    hints = get_type_hints(cls)
    return [found.flag(name) for name, found in options_of(cls).items() if hints[name] is kind]


TIMES = [flag for cls in OURS for flag in flags_of(cls, float) if flag != "--kv-lease-seconds"]


def test_there_are_times() -> None:
    assert {"--client-seconds", "--request-timeout", "--stall-seconds", "--drain-seconds"} <= {
        *TIMES
    }


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
@pytest.mark.parametrize("flag", TIMES)
def test_times_that_no_clock_counts_are_refused(flag: str, value: str) -> None:
    assert refused(flag, value).startswith(f"{flag}={float(value)} is ")


@pytest.mark.parametrize("flag", sorted({*TIMES} - {"--drain-seconds"}))
def test_a_time_of_0_is_refused(flag: str) -> None:
    assert refused(flag, "0").startswith(f"{flag}=0.0 is out of range; accepted: ")


def test_ending_at_once_is_accepted() -> None:
    assert ServerLimits(drain=0.0).drain == 0


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("flag", [*flags_of(EngineConfig, float), "--kv-lease-seconds"])
def test_other_numbers_are_finite(flag: str, value: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough")
    role = ("--role", "both", "--kv-secret-file", str(secret))
    experts = ("--experts", "127.0.0.1:9", "--expert-secret-file", str(secret))
    beside = role if "lease" in flag else experts if flag.startswith("--expert-") else ()
    assert refused(flag, value, *beside).startswith(f"{flag.strip('-').replace('-', '_')}=")


COUNTS = [flag for cls in (ServerLimits, GrammarLimits) for flag in flags_of(cls, int)]


@pytest.mark.parametrize("flag", COUNTS)
def test_counts_are_named_by_their_flags(flag: str) -> None:
    assert re.match(
        rf"{flag}=-5 is out of range; accepted: (at least )?[01]\b", refused(flag, "-5")
    )


def test_a_server_ends_with_one_sentence() -> None:
    done = forked.completed("rorqual", ["serve", "--client-seconds", "nan"])
    assert done.returncode == 2
    assert done.stderr == (
        "rorqual: --client-seconds=nan is not a finite number; accepted: above 0, up to "
        "1,000,000,000\n"
    )


# ---- without effect


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ("--kv-port 19001", "prefill or both"),
        ("--kv-peers 10.0.0.1", "prefill, decode or both"),
        ("--kv-secret-file /nowhere", "prefill, decode or both"),
        ("--kv-lease-seconds 20", "prefill, decode or both"),
        ("--kv-by-layer", "prefill, decode or both"),
        ("--role none --kv-port 19001", "prefill or both"),
    ],
)
def test_pages_need_a_role(words: str, roles: str) -> None:
    flag = re.findall(r"--kv-[a-z-]+", words)[0]
    assert refused(*words.split()) == f"{flag} goes with --role {roles}"


def test_a_decode_server_serves_no_pages(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    given: dict[str, Any] = {"kv_port": 19001, "kv_secret_file": str(secret)}
    with pytest.raises(ConfigError, match="--kv-port goes with --role prefill or both"):
        ServeConfig(role="decode", **given)
    for role in ("prefill", "both"):
        assert ServeConfig(role=role, **given).kv_port == 19001


@pytest.mark.parametrize("name", ["", "  "])
def test_a_model_has_a_name(name: str) -> None:
    assert refused("--served-model-name", "one", "--served-model-name", name).startswith(
        "--served-model-name is empty"
    )
