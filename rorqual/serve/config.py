"""How to serve: address, names and how many engines. Needs nothing of the extra `serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rorqual.config.option import MOST_SECONDS, check_options, option, options_of
from rorqual.disagg.transfer_config import ON_FAILURE, ROLES, TRANSPORTS, TransferConfig
from rorqual.disagg.transports.installed import LIBRARIES, package_of
from rorqual.errors import ConfigError
from rorqual.registry.address import SCHEME, etcd_address, is_private
from rorqual.serve.cors import CorsConfig
from rorqual.serve.kv_events_config import KVEventsConfig
from rorqual.serve.limits import ServerLimits
from rorqual.text.tool_calls import FORMATS

ATTENTION = "attention"
_server = partial(option, group="Server")
APART = "Prefill and decode apart"
_transfer = partial(option, group=APART)
_routers = partial(option, group="Routers")


@dataclass(frozen=True)
class ServeConfig:
    """engine: fields of EngineConfig but the model. tokenizer: a folder or an id in place of the
    model's own."""

    model: str | None = None
    tokenizer: str | None = None
    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(8000, "0 takes a free one.", least=0, most=65535)
    api_key: str | None = _server(
        None,
        "Needed on every route but /live and /health; several, with commas between them, are "
        "clients of their own.",
        env="RORQUAL_API_KEY",
    )
    names: tuple[str, ...] = _server(
        (), "A name to answer to; may be repeated.", flags=("--served-model-name",)
    )
    restart: bool = _server(False, "Start a dead engine again; else the server ends.")
    replicas: int = _server(
        1, "Engine processes behind this server, each with the whole model.", least=1
    )
    stall: float = _server(
        300.0,
        "Seconds without a word after which a working engine counts as dead.",
        flags=("--stall-seconds",),
        least=1,
        most=MOST_SECONDS,
    )
    tool_format: str = _server(
        "auto",
        "auto (looks at the model), hermes, deepseek_v3, deepseek_v31 or kimi_k2.",
        choices=("auto", *FORMATS),
    )
    reasoning: str = _server(
        "auto",
        "Split <think> off: auto (where the model has it), on or off.",
        choices=("auto", "on", "off"),
    )
    metrics_names: str = _server(
        "rorqual",
        "Prefix, labels and meanings of /metrics: rorqual, vllm (for boards and rules made for "
        "it), or both.",
        choices=("rorqual", "vllm", "both"),
    )
    profile_dir: str | None = _server(
        None,
        "A folder: POST /start_profile, from this machine and with the API key, has the next steps "
        "recorded into it, for Perfetto. Without it there is no such route.",
    )
    otlp_endpoint: str | None = _server(
        None,
        "http://HOST:4318 of an OpenTelemetry collector that spans of requests are sent to (OTLP "
        "over HTTP); needs rorqual[otel].",
    )
    role: str = _transfer(
        "none",
        "prefill: keep the pages of prompts whose answers go on elsewhere, and serve them; decode: "
        "fetch the pages of prompts that were computed elsewhere; both; attention: experts are in "
        "other processes (needs --experts or --experts-from, which the other roles may have too).",
        choices=("none", *ROLES, ATTENTION),
    )
    kv_host: str = _transfer("127.0.0.1", "Private address on which pages are served.")
    kv_port: int = _transfer(
        0,
        "With --role prefill or both, its port; 0 takes a free one. Further ranks have the next "
        "ones, then replicas.",
    )
    kv_peers: tuple[str, ...] = _transfer(
        ("127.0.0.1",),
        "HOST, HOST:PORT or NETWORK/BITS that pages may be fetched from; may be repeated.",
    )
    kv_secret_file: str | None = _transfer(
        None, "A file with the secret that all who exchange pages know; needed with --role."
    )
    kv_lease_seconds: float = _transfer(
        30.0, "How long pages wait to be fetched before they may be used for something else."
    )
    kv_load_failure: str = _transfer(
        "recompute",
        "Where pages do not come: compute the prompt here, or fail the request (503).",
        choices=ON_FAILURE,
    )
    kv_transport: str = _transfer(
        "tcp",
        "What carries the bytes of pages, the same on both sides: tcp (the authenticated link "
        "itself), handles (GPUs of one host copy from each other), or a library that reads the "
        "other side's memory and does not ask who reads: nixl (needs rorqual[nixl]) or mooncake "
        "(rorqual[mooncake]).",
        choices=TRANSPORTS,
    )
    kv_staging_mb: int = _transfer(
        256,
        "MiB through which pages pass where a library carries them (of host memory) or handles "
        "do (of each GPU's).",
    )
    kv_overlap: bool = _transfer(
        False,
        "Answer a prefill request once a first chunk of its prompt is computed: pages are fetched "
        "while the rest is.",
    )
    kv_by_layer: bool = _transfer(
        False,
        "Answer a prefill request before its prompt is computed: pages are fetched layer by layer.",
    )
    kv_events: str | None = _routers(
        None,
        "tcp://ADDRESS:PORT where stored and removed pages of the prefix cache are published, in "
        "vLLM's form. Replicas have the next ports.",
    )
    kv_events_replay: str | None = _routers(
        None, "tcp://ADDRESS:PORT where the last of these are published again; needs --kv-events."
    )
    kv_events_topic: str = _routers("", "Their topic.")
    register: tuple[str, ...] = _routers(
        (),
        "URL of a `rorqual route` to join, or etcd://HOST:PORT where routers look (--registry); "
        "may be repeated.",
    )
    register_secret_file: str | None = _routers(
        None, "A file with the router's --admin-secret-file secret; needed with --register."
    )
    register_url: str | None = _routers(
        None, "Where the router finds this server; else http://HOST:PORT."
    )
    structured: bool = option(
        True,
        "Offer grammars; needs xgrammar and a process to compile in.",
        group="Structured output",
        flags=("--structured-output",),
    )
    engine: dict[str, Any] = field(default_factory=dict)
    limits: ServerLimits = field(default_factory=ServerLimits)
    cors: CorsConfig = field(default_factory=CorsConfig)

    def __post_init__(self) -> None:
        check_options(self)
        if not all(map(str.strip, self.names)):
            raise ConfigError(
                "--served-model-name is empty; accepted: a name for requests to give as their model"
            )
        if self.engine.get("expert_balance", "natural") != "natural":
            raise ConfigError(
                f"expert_balance={self.engine['expert_balance']!r} changes tokens and is for "
                "benchmarks; accepted by a server: natural"
            )
        if self.api_key is not None and not any(map(str.strip, self.api_key.split(","))):
            raise ConfigError(
                f"api_key={self.api_key!r} holds no key; accepted: keys with commas between them, "
                "or none at all for an open server"
            )
        if self.role == ATTENTION and not (
            self.engine.get("experts") or self.engine.get("experts_from")
        ):
            raise ConfigError("role='attention' needs experts or experts_from")
        if self.role in ROLES:
            self._check_role()
        else:
            self._check_no_role()
        self._check_register()
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError("kv_events_replay needs kv_events")
        if self.kv_events and not self.engine.get("enable_prefix_caching", True):
            raise ConfigError("kv_events needs enable_prefix_caching")
        self.events()
        if self.register and self.register_secret_file is None:
            raise ConfigError("register needs register_secret_file")

    def _check_register(self) -> None:
        etcd = [url for url in self.register if url.startswith(SCHEME)]
        for url in (*self.register, *((self.register_url,) if self.register_url else ())):
            if url in etcd:
                etcd_address(url)
            elif not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is no URL; accepted: http://HOST:PORT")
        host = urlsplit(self.register_url).hostname if self.register_url else self.host
        if etcd and not is_private(host or ""):
            raise ConfigError(
                f"routers take no server at {host!r} from etcd; accepted as host, or as that of "
                "register_url: an address of loopback or of a private network, or a name"
            )

    def _check_role(self) -> None:
        if self.kv_secret_file is None:
            raise ConfigError(f"role={self.role!r} needs kv_secret_file")
        if not self.engine.get("enable_prefix_caching", True):
            raise ConfigError(f"role={self.role!r} needs enable_prefix_caching")
        if self.role == "decode" and self.kv_port:
            raise ConfigError(
                "--kv-port goes with --role prefill or both: a decode server serves no pages"
            )

    def _check_no_role(self) -> None:
        """Options about pages of prompts have no effect on a server that exchanges none."""
        for item in fields(self):
            if item.name in TRANSFER and getattr(self, item.name) != item.default:
                roles = "prefill or both" if item.name == "kv_port" else "prefill, decode or both"
                raise ConfigError(f"{TRANSFER[item.name].flag(item.name)} goes with --role {roles}")

    def events(self) -> KVEventsConfig | None:
        """Where cache events are published; None where not configured."""
        if self.kv_events is None:
            return None
        return KVEventsConfig(self.kv_events, self.kv_events_replay, self.kv_events_topic)

    def transfer(self) -> TransferConfig | None:
        """KV transfer settings, with the secret read from its file; None without a role."""
        if self.role not in ROLES:
            return None
        assert self.kv_secret_file is not None
        if self.kv_transport in LIBRARIES:
            package_of(self.kv_transport)  # fail now, not after minutes of loading weights
        try:
            secret = Path(self.kv_secret_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"kv_secret_file={self.kv_secret_file!r} cannot be read: {error}"
            ) from None
        return TransferConfig(
            self.role,
            secret,
            self.kv_host,
            self.kv_port,
            self.kv_peers,
            self.kv_lease_seconds,
            self.kv_load_failure,
            self.kv_overlap,
            self.kv_transport,
            self.kv_staging_mb,
            self.kv_by_layer,
        )


# what only servers that exchange pages of prompts have
TRANSFER = {
    name: found
    for name, found in options_of(ServeConfig).items()
    if found.group == APART and name != "role"
}
