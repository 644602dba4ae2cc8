"""``deploy/kubernetes``: the manifests fit their schemas and each other, and the keys in a Secret work."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs import RANKWATCH, ROOT, environment

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with transformers")

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.slow]

KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
RESOURCES = {found["kind"]: found for found in yaml.safe_load_all((KUBERNETES / "collector.yaml").read_text())}
POD = RESOURCES["Deployment"]["spec"]["template"]["spec"]
(COLLECTOR,), (KEYS,) = POD["containers"], POD["initContainers"]
SECRETS = {
    made["name"]: made["files"]
    for made in yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["secretGenerator"]
}

TRAIN = """\
import torch, rankwatch
model = torch.nn.Linear(2, 1)
with rankwatch.watch(model):
    model(torch.ones(1, 2)).sum().backward()
"""


def job(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text())


def environment_of_ranks() -> list[list[dict[str, Any]]]:
    replicas = job("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"].values()
    containers = [replica["template"]["spec"]["containers"][0] for replica in replicas]
    return [*(container["env"] for container in containers), job("trainjob.yaml")["spec"]["trainer"]["env"]]


@pytest.mark.parametrize("kind", RESOURCES)
def test_each_manifest_fits_its_schema(kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    validate(RESOURCES[kind], "1.29", strict=True)


def test_the_pods_of_jobs_fit_their_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    for replica in job("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rank"}, **replica["template"]}
        validate(pod, "1.29", strict=True)


def test_references_between_manifests_resolve() -> None:
    labels = RESOURCES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert RESOURCES["Service"]["spec"]["selector"] == labels
    assert RESOURCES["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    (port,), (outer,) = COLLECTOR["ports"], RESOURCES["Service"]["spec"]["ports"]
    assert outer["targetPort"] == port["name"] == COLLECTOR["readinessProbe"]["tcpSocket"]["port"]
    assert f"RANKWATCH_LISTEN=tcp://*:{port['containerPort']} " in DOCKERFILE
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    for container in (COLLECTOR, KEYS):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    assert volumes["secret"]["secret"]["secretName"] in SECRETS
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == RESOURCES["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_ranks_get_the_connection_but_not_the_collectors_own_key() -> None:
    for env in environment_of_ranks():
        (reference,) = [entry["valueFrom"]["secretKeyRef"] for entry in env if entry["name"] == "RANKWATCH_CONNECTION"]
        assert reference["key"] in SECRETS[reference["name"]] == ["connection.json"]


def test_the_service_sets_no_rankwatch_option() -> None:
    """Kubernetes gives each pod NAME_PORT and NAME_SERVICE_HOST of each service, and RANKWATCH_PORT is an option."""
    assert not RESOURCES["Service"]["metadata"]["name"].startswith("rankwatch")


class Collector:
    """A collector process, up."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(words, env=environment(**env), cwd=folder, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.address = re.findall(r"collecting on (\S+);", self._process.stderr.readline())

    def end(self, number: signal.Signals = signal.SIGTERM) -> str:
        self._process.send_signal(number)
        _, log = self._process.communicate()
        assert self._process.returncode == 0
        return log


def test_the_keys_in_a_secret_outlive_the_pod(tmp_path: Path) -> None:
    """The documented command makes the keys once; then two pods run one after the other, and ranks use the Secret's text."""
    secret, keys, data = (tmp_path / name for name in ("secret", "keys", "data"))
    secret.mkdir()
    text = (KUBERNETES / "kustomization.yaml").read_text().replace("\\\n#", " ")
    (command,) = re.findall(r"rankwatch (collector .*)", text)
    words = shlex.split(command.replace(":27077", ":0").replace("training-watch.NAMESPACE", "127.0.0.1"))
    words[words.index("--runs-dir") + 1] = str(tmp_path / "none")
    first = Collector([*RANKWATCH, *words], {}, secret)
    first.end(signal.SIGINT)
    assert sorted(path.name for path in secret.iterdir()) == sorted(SECRETS["rankwatch-keys"])
    for path in secret.iterdir():
        path.chmod(0o440)  # the mode that an fsGroup sets
    connection = (secret / "connection.json").read_text()
    for attempt in range(2):
        keys.mkdir()
        install = [word.replace("/secret", str(secret)).replace("/keys", str(keys)) for word in KEYS["command"]]
        subprocess.run(install, check=True)
        words = [word.replace("/keys", str(keys)) for word in COLLECTOR["args"]]
        pod = Collector([*RANKWATCH, *words], {"RANKWATCH_RUNS_DIR": str(data)}, tmp_path)
        rank = environment(RANKWATCH_CONNECTION=connection, RANKWATCH_JOB=f"train{attempt}")
        subprocess.run([sys.executable, "-c", TRAIN], env=rank, check=True)
        pod.end()
        assert "finished: 1 rank, 1 batch" in (data / f"train{attempt}-0" / "report.txt").read_text()
        assert [path for path in keys.rglob("*") if path.is_file()] == []
        shutil.rmtree(keys)
