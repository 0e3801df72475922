"""What is in `deploy/`: manifests against Kubernetes's own schemas, and against what they name and
start of ours. Nothing here talks to a cluster or builds an image."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import InvalidInput
from kvfs.meta.url import parse_url
from kvfs.peers.address import bulk_port, parse_address
from kvfs.settings.load import parse_config
from kvfs.shell.arguments import build_parser
from scripts.redis_rig import USER_RIGHTS

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="run scripts/setup main")
yaml = pytest.importorskip("yaml", reason="run scripts/setup main")

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.35"
SECRET_FILE = "/etc/kvfs/secret/metadata"
Manifest = dict[str, Any]


@dataclass
class Problem(Exception):
    """What is wrong, and in which file."""

    file: str
    text: str


def read(file: Path) -> list[Manifest]:
    return [item for item in yaml.safe_load_all(file.read_text(encoding="utf-8")) if item]


def built(directory: Path) -> dict[str, Manifest]:
    """All manifests of a kustomization, with those that it builds on, by `Kind/name`."""
    kustomization = directory / "kustomization.yaml"
    [table] = read(kustomization)
    found: dict[str, Manifest] = {}
    for resource in table["resources"]:
        path = directory / resource
        if path.is_dir():
            found |= built(path)
            continue
        if not path.exists():
            raise Problem(str(kustomization), f"{resource} is not there")
        for item in read(path):
            found[f"{item['kind']}/{item['metadata']['name']}"] = item
    unlisted = {file.name for file in directory.glob("*.yaml")} - {*table["resources"]}
    if unlisted != {kustomization.name}:
        raise Problem(str(kustomization), f"does not list {sorted(unlisted)}")
    return found


def pod_of(item: Manifest) -> Manifest:
    pod: Manifest = item["spec"]["template"]["spec"]
    return pod


def workloads(items: dict[str, Manifest]) -> Iterator[tuple[str, Manifest]]:
    for name, item in items.items():
        if "template" in item.get("spec", {}):
            yield name, item


def check_schemas(items: dict[str, Manifest]) -> None:
    for name, item in items.items():
        message = what_schema_says(json.dumps(item))
        if message is not None:
            raise Problem(name, message)


@cache  # reading the schemas takes a third of a second
def what_schema_says(packed: str) -> str | None:
    try:
        kubernetes_validate.validate(json.loads(packed), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return None


def check_references(items: dict[str, Manifest]) -> None:
    """Everything that a manifest names is there: volumes, what they are of, ports, services."""
    for name, item in workloads(items):
        pod = pod_of(item)
        labels = item["spec"]["template"]["metadata"]["labels"]
        if not item["spec"]["selector"]["matchLabels"].items() <= labels.items():
            raise Problem(name, "selects other pods than it makes")
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {v["metadata"]["name"] for v in item["spec"].get("volumeClaimTemplates", [])}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    raise Problem(name, f"has no volume {mount['name']}")
        for volume in pod.get("volumes", []):
            of = {
                "ConfigMap": volume.get("configMap", {}).get("name"),
                "Secret": volume.get("secret", {}).get("secretName"),
            }
            for kind, wanted in of.items():
                if wanted is not None and f"{kind}/{wanted}" not in items:
                    raise Problem(name, f"there is no {kind} {wanted}")
        service = item["spec"].get("serviceName")
        if service is not None and f"Service/{service}" not in items:
            raise Problem(name, f"there is no Service {service}")
    for name, item in items.items():
        if item["kind"] != "Service":
            continue
        chosen = [
            pod_of(workload)
            for _, workload in workloads(items)
            if item["spec"]["selector"].items()
            <= workload["spec"]["template"]["metadata"]["labels"].items()
        ]
        ports = {p["name"] for pod in chosen for c in pod["containers"] for p in c["ports"]}
        if missing := {port["targetPort"] for port in item["spec"]["ports"]} - ports:
            raise Problem(name, f"no pod has the ports {missing}")


def check_node(items: dict[str, Manifest], secret: Path) -> None:
    """kvfs itself takes the configuration, and every command; paths and ports agree."""
    pod = pod_of(items["DaemonSet/kvfs-node"])
    [container] = pod["containers"]
    text = items["ConfigMap/kvfs-config"]["data"]["kvfs.toml"]
    url = items["Secret/kvfs-metadata"]["stringData"]["metadata"]
    secret.write_text(url)
    try:
        config = parse_config(tomllib.loads(text.replace(SECRET_FILE, str(secret))))
    except (InvalidInput, tomllib.TOMLDecodeError) as error:
        raise Problem("kvfs.toml", str(error)) from error
    assert config.cluster is not None and config.cluster.metadata == url
    commands = [[*container["command"], *container["args"]]]
    commands += [container[probe]["exec"]["command"] for probe in container if "Probe" in probe]
    commands.append(container["lifecycle"]["preStop"]["exec"]["command"])
    for program, *words in commands:
        if program != "kvfs":
            raise Problem("DaemonSet", f"starts {program}")
        try:
            arguments = build_parser().parse_args(words)
        except SystemExit as error:
            raise Problem("DaemonSet", f"kvfs refuses {words}") from error
        store = getattr(arguments, "store", None)
        if store is not None and store != config.home:
            raise Problem("DaemonSet", f"asks the store {store}")
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    if str(config.home) not in mounts or str(Path(SECRET_FILE).parent) not in mounts:
        raise Problem("DaemonSet", "lacks the volume of the store, or of the Secret")
    mountpoint = Path(container["args"][-1])
    if mounts[str(mountpoint.parent)].get("mountPropagation") != "Bidirectional":
        raise Problem("DaemonSet", "its mount stays in the container")
    listen = parse_address(config.cluster.listen)
    ports = {"peers": listen.port, "bulk": bulk_port(listen, config.cluster.bulk_port)}
    for name, port in ports.items():
        if {p["name"]: p["containerPort"] for p in container["ports"]}.get(name) != port:
            raise Problem("DaemonSet", f"listens at {port}")
    service = {p["name"]: p["port"] for p in items["Service/kvfs-nodes"]["spec"]["ports"]}
    if service != ports:
        raise Problem("Service", f"has {service}, and the node {ports}")


def check_all(deploy: Path, secret: Path) -> None:
    """Raises `Problem` for the first thing that is wrong with the manifests."""
    base = built(deploy / "kubernetes/base")
    everything = built(deploy / "kubernetes/valkey")
    [example] = read(deploy / "kubernetes/examples/vllm.yaml")
    assert base.keys() < everything.keys()
    check_schemas(everything | {"vllm": example})
    check_references(base)
    check_references(everything)
    check_node(base, secret)


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    """A copy to break."""
    copied = tmp_path / "deploy"
    shutil.copytree(ROOT / "deploy", copied)
    return copied


def test_all_manifests_are_right(tmp_path: Path) -> None:
    check_all(ROOT / "deploy", tmp_path / "secret")


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("base/daemonset.yaml", "maxUnavailable: 1", "maxAvailable: 1", "maxAvailable"),
        ("base/daemonset.yaml", "periodSeconds: 15", "periodSeconds: soon", "not of type"),
        ("base/daemonset.yaml", "name: kvfs-config", "name: config", "no ConfigMap config"),
        ("base/daemonset.yaml", "kvfs-metadata", "other", "no Secret other"),
        ("base/daemonset.yaml", '"--foreground"', '"--forground"', "kvfs refuses"),
        ("base/daemonset.yaml", '["kvfs", "umount"', '["kvfs", "unmount"', "kvfs refuses"),
        ("base/daemonset.yaml", '"--store", "/var/lib/kvfs"', '"--store", "/x"', "the store /x"),
        ("base/daemonset.yaml", "Bidirectional", "HostToContainer", "stays in the container"),
        ("base/daemonset.yaml", "containerPort: 7400", "containerPort: 7401", "listens at 7400"),
        ("base/daemonset.yaml", "containerPort: 7401", "containerPort: 7402", "listens at 7401"),
        ("base/configmap.yaml", "bulk_port = 7401", "bulk_port = 7500", "listens at 7500"),
        ("base/service.yaml", "port: 7401", "port: 7402", "and the node"),
        ("base/configmap.yaml", "max_bytes", "max_byte", "max_byte"),
        ("base/configmap.yaml", '"80%"', '"80 apples"', "apples"),
        ("base/secret.yaml", "redis://", "http://", "no such URL"),
        ("base/service.yaml", "targetPort: peers", "targetPort: peer", "no pod has the ports"),
        ("base/kustomization.yaml", "  - service.yaml\n", "", "does not list"),
        ("base/kustomization.yaml", "service.yaml", "services.yaml", "is not there"),
        ("valkey/statefulset.yaml", "serviceName: kvfs-valkey", "serviceName: x", "no Service x"),
        ("valkey/statefulset.yaml", "- name: users\n              m", "- name: u\n              m",
         "has no volume u"),
        ("examples/vllm.yaml", "replicas: 1", "replicas: one", "not of type"),
    ],
)  # fmt: skip
def test_a_broken_manifest_is_found(
    deploy: Path, tmp_path: Path, file: str, old: str, new: str, words: str
) -> None:
    broken = deploy / "kubernetes" / file
    text = broken.read_text()
    assert old in text
    broken.write_text(text.replace(old, new))
    with pytest.raises(Problem) as caught:
        check_all(deploy, tmp_path / "secret")
    assert words in caught.value.text


def test_the_optional_server_knows_the_nodes_password() -> None:
    items = built(ROOT / "deploy/kubernetes/valkey")
    url = parse_url(items["Secret/kvfs-metadata"]["stringData"]["metadata"])
    users = items["Secret/kvfs-valkey-users"]["stringData"]["users.acl"]
    name = tomllib.loads(items["ConfigMap/kvfs-config"]["data"]["kvfs.toml"])["cluster"]["name"]
    allowed = " ".join(USER_RIGHTS)
    assert f"user {url.user} on >{url.password} ~{{kvfs:{name}}}:* {allowed}\n" in users
    service = items["Service/kvfs-valkey"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert url.hosts == ((host, service["spec"]["ports"][0]["port"]),)


def test_the_engine_is_started_as_kvfs_says(
    capsys: pytest.CaptureFixture[str], run_kvfs: Callable[[list[str]], int]
) -> None:
    [example] = read(ROOT / "deploy/kubernetes/examples/vllm.yaml")
    arguments = pod_of(example)["containers"][0]["args"]
    written = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert run_kvfs(["config", "vllm", "--store", "/var/lib/kvfs"]) == 0
    printed = re.search(r"--kv-transfer-config '(.*)'", capsys.readouterr().out)
    assert printed is not None and json.loads(printed[1]) == written


@pytest.fixture
def run_kvfs() -> Callable[[list[str]], int]:
    from kvfs.cli import main

    return main


def test_the_image_is_made_of_what_is_there() -> None:
    text = (ROOT / "deploy/Containerfile").read_text()
    copied = [words.split()[1:-1] for words in re.findall(r"^COPY (?!--from).*$", text, re.M)]
    assert copied
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
    setup = (ROOT / "scripts/setup").read_text()
    [parts] = re.findall(r"scripts/setup ([a-z ]+)$", text, re.M)
    for part in parts.split():
        assert f"setup_{part}" in setup + (ROOT / "scripts/setup_passthrough.sh").read_text()
    pinned = re.search(r"Python (3\.\d+)", (ROOT / "requirements/main.txt").read_text())
    assert pinned is not None
    assert set(re.findall(r"^FROM python:(3\.\d+)", text, re.M)) == {pinned[1]}
