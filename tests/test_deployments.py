"""The container file, units and manifest of deploy/ start commands that exist, with options that
these take. The manifest is checked against Kubernetes' own schema where kubernetes-validate is
installed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from rorqual.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy"
MANIFEST = FOLDER / "kubernetes" / "prefill-decode.yaml"
SERVICES = sorted((FOLDER / "systemd").glob("*.service"))


def parse(words: list[str]) -> dict[str, Any]:
    """Raises for a command or an option that there is not."""
    command: Any = get_command(app)
    name, *rest = words
    with command.commands[name].make_context(name, rest) as context:
        return dict(context.params)


def documents() -> list[Any]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def containers() -> Iterator[Any]:
    for document in documents():
        if document["kind"] == "Deployment":
            yield from document["spec"]["template"]["spec"]["containers"]


def test_units_start_what_there_is() -> None:
    assert len(SERVICES) == 2
    for path in SERVICES:
        (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), flags=re.M)
        words = shlex.split(line.replace("$OPTIONS", "").replace("%i", "8001"))
        assert words[0].endswith("/rorqual")
        assert parse(words[1:])
        (options,) = re.findall(r"OPTIONS=(.*)$", path.read_text(), flags=re.M) or [""]
        assert parse(["serve", *shlex.split(options)])


def test_the_manifest_starts_what_there_is() -> None:
    found = {}
    for container in containers():
        words = [word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]]
        found[words[0], container["name"]] = params = parse(words)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == {"route": 8080, "serve": 8000}[words[0]]
        if params.get("kv_port"):
            assert ports["pages"] == params["kv_port"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        files = [word.partition("=")[2] or word for word in words if "/secrets/" in word]
        assert files
        assert all(str(Path(file).parent) in mounts for file in files)
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
    assert len(found) == 2  # router, and servers of either role


def test_the_manifest_has_one_router_one_prefill_and_one_decode_server() -> None:
    found = {}
    for document in documents():
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            role = parse([w.replace("$(POD_IP)", "10.1.2.3") for w in container["args"]]).get(
                "role"
            )
            found[document["metadata"]["name"]] = (role, document["spec"]["replicas"])
    assert found == {
        "rorqual-router": (None, 1),
        "rorqual-prefill": ("prefill", 1),
        "rorqual-decode": ("decode", 1),
    }


def test_services_find_their_pods() -> None:
    pods = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in documents()
        if document["kind"] == "Deployment"
    ]
    (service,) = (one for one in documents() if one["kind"] == "Service")
    assert service["spec"]["selector"] in pods
    name = service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    for container in containers():
        if container["args"][0] == "serve":
            assert f"--register=http://{name}:{port}" in container["args"]


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed",
)
def test_the_manifest_has_kubernetes_form() -> None:
    import kubernetes_validate

    for document in documents():
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_the_container_copies_and_installs_what_there_is() -> None:
    text = (FOLDER / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, flags=re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)
    (extras,) = re.findall(r"/src\[([\w,]+)\]", text)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, flags=re.M) for extra in extras.split(","))
    (command,) = re.findall(r"^CMD \[(.*)\]$", text, flags=re.M)
    assert parse([word.strip(' "') for word in command.split(",")])
