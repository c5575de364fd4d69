"""Manifests, containers and the unit name what the server has: options, paths, variables, metrics.

`make check-deploy` checks them by their own tools.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import twolane
from tests.server.serving import serving, write_tiny_model
from twolane.cli.main import Commands
from twolane.server.http.gate import LIVE_PATHS, PROBES
from twolane.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
CONTAINERS = sorted(DEPLOY.glob("container/Containerfile.*"))
UNIT = DEPLOY / "systemd/twolane.service"
GATEWAY = (DEPLOY / "gateway/endpoint-picker.yaml", DEPLOY / "gateway/llm-d-values.yaml")


def name(path: Path) -> str:
    return path.name


def documents(path: Path) -> dict[str, Any]:
    """The manifests of a file by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


def options(path: Path) -> dict[str, Any]:
    """The --config file of a manifest's server."""
    return yaml.safe_load(documents(path)["ConfigMap"]["data"]["serve.yaml"])


def flags() -> set[str]:
    return {flag for param in Commands.load("serve").params for flag in param.opts}


def variables() -> set[str]:
    found = {str(param.envvar) for param in Commands.load("serve").params if param.envvar}
    return {*found, "TWOLANE_CACHE"}


def pod(path: Path) -> Any:
    return documents(path)["Deployment"]["spec"]["template"]["spec"]


def container(path: Path) -> Any:
    [found] = pod(path)["containers"]
    return found


@pytest.fixture(params=MANIFESTS, ids=name)
def manifest(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_are_manifests_for_both_devices() -> None:
    assert [path.stem for path in MANIFESTS] == ["cpu", "gpu"]
    assert [options(path)["device"] for path in MANIFESTS] == ["cpu", "cuda"]
    assert [path.suffix for path in CONTAINERS] == [".cpu", ".cuda"]


def test_chart_and_manifests_have_the_version_of_the_package(manifest: Path) -> None:
    chart = yaml.safe_load((DEPLOY / "helm/twolane/Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {twolane.__version__}
    assert container(manifest)["image"].startswith(f"twolane:{twolane.__version__}-")


def test_every_option_of_a_manifest_exists(manifest: Path) -> None:
    assert {f"--{key}" for key in options(manifest)} - {"--model"} <= flags()
    command, *given = container(manifest)["args"]
    assert command == "serve"
    assert {one for one in given if one.startswith("--")} <= flags()
    names = {one["name"] for one in container(manifest)["env"]}
    assert {one for one in names if one.startswith("TWOLANE_")} <= variables()


def test_the_options_are_found_where_they_are_mounted(manifest: Path) -> None:
    path = Path(container(manifest)["args"][2])
    mounts = {one["mountPath"]: one["name"] for one in container(manifest)["volumeMounts"]}
    [volume] = [one for one in pod(manifest)["volumes"] if one["name"] == mounts[str(path.parent)]]
    config = documents(manifest)["ConfigMap"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert path.name in config["data"]


def test_probes_ask_what_the_server_answers(manifest: Path) -> None:
    probes = {
        kind: container(manifest)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness")
    }
    assert {probe["path"] for probe in probes.values()} == {"/health"}
    live = container(manifest)["livenessProbe"]["httpGet"]
    assert live["path"] in LIVE_PATHS
    assert {live["path"], "/health"} <= PROBES
    ports = {one["name"]: one["containerPort"] for one in container(manifest)["ports"]}
    assert {probe["port"] for probe in (*probes.values(), live)} == {"http"}
    assert ports["http"] == options(manifest)["port"]
    assert documents(manifest)["Service"]["spec"]["ports"][0]["targetPort"] == "http"


def test_a_pod_has_the_time_that_its_server_takes_to_drain(manifest: Path) -> None:
    _, waits = container(manifest)["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(waits) + options(manifest)["drain-seconds"]
    assert pod(manifest)["terminationGracePeriodSeconds"] >= needed + 20


def test_a_pod_has_no_rights_and_writes_to_volumes_alone(manifest: Path) -> None:
    rights = pod(manifest)["securityContext"]
    assert rights["runAsNonRoot"]
    assert rights["runAsUser"] == 10001
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod(manifest)["automountServiceAccountToken"]
    assert container(manifest)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {one["mountPath"] for one in container(manifest)["volumeMounts"]}
    assert {"/cache", "/tmp", "/dev/shm"} <= mounts


def test_selectors_find_the_pods(manifest: Path) -> None:
    found = documents(manifest)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        found["Service"]["spec"]["selector"],
        *(
            found[kind]["spec"]["selector"]["matchLabels"]
            for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool")
            if kind in found
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()


def test_gpus_are_asked_for_where_they_are_used() -> None:
    limits = {path.stem: container(path)["resources"]["limits"] for path in MANIFESTS}
    assert limits["gpu"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in limits["cpu"]


def test_rules_and_gateways_name_metrics_that_there_are() -> None:
    page = (ROOT / "docs/guides/metrics.md").read_text()
    defined = set(re.findall(r"^\| `(twolane:\S+)` \|", page, re.MULTILINE))
    [trigger] = documents(MANIFESTS[1])["ScaledObject"]["spec"]["triggers"]
    used = set(re.findall(r"twolane:\w+", trigger["metadata"]["query"]))
    for path in GATEWAY:
        used |= set(re.findall(r"twolane:\w+", path.read_text()))
    assert len(used) == 4
    assert used <= defined


def pickers() -> Iterator[Any]:
    yield yaml.safe_load(GATEWAY[0].read_text())
    epp = yaml.safe_load(GATEWAY[1].read_text())["router"]["epp"]
    yield yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])


def test_endpoint_pickers_refer_to_plugins_that_they_have() -> None:
    engines = []
    for picker in pickers():
        assert picker["kind"] == "EndpointPickerConfig"
        plugins = {one["type"]: one.get("parameters", {}) for one in picker["plugins"]}
        refs = re.findall(r'"pluginRef": "([\w-]+)"', json.dumps(picker))
        assert set(refs) <= set(plugins)
        engines.append(plugins["core-metrics-extractor"])
    assert engines[0] == engines[1]
    labels = documents(MANIFESTS[1])["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engines[0]["defaultEngine"]
    events = {one["name"]: one["containerPort"] for one in container(MANIFESTS[1])["ports"]}
    assert f"socketPort: {events['kv-events']}" in GATEWAY[1].read_text()


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a container file."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line]


@pytest.mark.parametrize("path", CONTAINERS, ids=name)
def test_a_container_is_built_from_files_that_there_are_and_serves_as_nobody(path: Path) -> None:
    found = instructions(path)
    last = dict(found)
    assert last["USER"] == "10001:10001"
    assert "/health" in last["HEALTHCHECK"]
    assert json.loads(last["ENTRYPOINT"]) == ["twolane"]
    assert json.loads(last["CMD"])[0] == "serve"
    ignored = (ROOT / ".containerignore").read_text().split()
    for kind, words in found:
        if kind == "COPY" and not words.startswith("--from"):
            for source in words.split()[:-1]:
                assert source == "dist/*.whl" or (ROOT / source).exists()
                assert f"!{source}" in ignored
    assert set(re.findall(r"\bTWOLANE_\w+", path.read_text())) <= variables()
    assert any("--require-hashes" in words for _, words in found)


def test_the_bare_debian_has_the_user_and_the_folders_of_the_cpu_image() -> None:
    """What `make check-root` runs where no container runtime is."""
    program = (DEPLOY / "debian_root.py").read_text()
    found = dict(instructions(CONTAINERS[0]))
    assert f'USER = "{found["USER"].partition(":")[0]}"' in program
    assert re.search(r"PATH=(\S+):\$PATH", found["ENV"])[1] in program
    assert f'"{found["WORKDIR"]}"' in program


def test_the_locks_have_what_the_package_needs_and_a_hash_for_each_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonical(one) for one in project["dependencies"]}
    extras = project["optional-dependencies"]
    optional = {canonical(one) for extra in ("sentencepiece", "otel") for one in extras[extra]}
    for kind, more, without in (
        ("cpu", set(), {"torch"}),
        ("cuda", {canonical(one) for one in extras["cuda"]}, set()),
    ):
        text = (DEPLOY / f"container/{kind}.lock").read_text()
        locked = set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))
        assert needed | optional | more <= locked | without
        assert not without & locked
        entries = re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in entry for entry in entries)


def canonical(requirement: str) -> str:
    """The name of a requirement, as locks write it."""
    return re.split(r"[\[<>=~; ]", requirement)[0].lower().replace("_", "-")


@pytest.mark.full
def test_the_check_of_a_container_s_health_asks_its_own_port(tiny_model: Path) -> None:
    """What HEALTHCHECK runs, against a server with the options of the CPU manifest."""
    given = options(MANIFESTS[0])
    config = tiny_model.parent / "serve.yaml"
    config.write_text(yaml.safe_dump(given))
    arguments = ("--config", str(config), "--load-format", "dummy", "--host", "127.0.0.1")
    with serving(str(tiny_model), *arguments) as served:
        for path in ("/health", "/livez"):
            assert served.request(path)[0] == 200
        port = served.base.rsplit(":", 1)[1]
        for path in CONTAINERS:
            command = json.loads(dict(instructions(path))["HEALTHCHECK"].partition("CMD ")[2])
            assert healthy(command, port)
    assert not healthy(command, port)


def healthy(command: list[str], port: str) -> bool:
    words = [sys.executable, *command[1:]]
    return not subprocess.run(
        words, env={"TWOLANE_PORT": port}, stderr=subprocess.DEVNULL
    ).returncode


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("deploy") / "tiny")


def test_the_unit_gives_the_server_time_and_options_that_it_has() -> None:
    lines = [line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line]
    unit = {key: value for key, _, value in lines if not key.startswith("#")}
    words = shlex.split(unit["ExecStart"])
    assert words[1] == "serve"
    assert {one for one in words if one.startswith("--")} <= flags()
    assert set(re.findall(r"\bTWOLANE_\w+", UNIT.read_text())) <= variables()
    assert int(unit["TimeoutStopSec"]) > ServerOptions().drain_seconds + 20
    assert unit["DynamicUser"] == "yes"
