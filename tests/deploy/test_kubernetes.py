"""tools/deploy/kubernetes: valid by the schemas of Kubernetes, and its commands, users and secrets are ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from own_server import DEPLOY, USERS

from vla_stream.cli.main import LazyGroup
from vla_stream.config import load

FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.34")
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def objects() -> Iterator[tuple[Path, dict[str, Any]]]:
    for name in KUSTOMIZATION["resources"]:
        for item in yaml.safe_load_all((FOLDER / name).read_text()):
            yield FOLDER / name, item


def containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(kind, pod, container) of all."""
    pods = [
        (item["kind"], item["spec"]["template"]["spec"]) for _, item in objects() if "template" in item.get("spec", {})
    ]
    return [(kind, pod, container) for kind, pod in pods for container in pod["containers"]]


def parse(name: str, words: list[str]) -> None:
    """As the command line does; it raises for what it does not know."""
    group = LazyGroup("vla-stream")
    context = click.Context(group)
    command = group.get_command(context, name)
    assert command is not None, name
    command.make_context(name, words, parent=context)


def words_of(container: dict[str, Any]) -> list[str]:
    """What comes after `vla-stream`."""
    if container.get("command") == ["sh", "-c"]:
        (script,) = container["args"]
        return shlex.split(re.sub(r"\$\(.*\)", "--resume", script))[2:]
    return list(container["args"])


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    seen = []
    for path, item in objects():
        kubernetes_validate.validate(item, version, strict=True)
        seen.append(item["kind"])
        assert path.exists()
    assert sorted(seen) == [
        "Deployment",
        "Deployment",
        "Job",
        "Namespace",
        "PersistentVolumeClaim",
        "Service",
        "StatefulSet",
    ]
    wrong = next(item for _, item in objects() if item["kind"] == "Deployment")
    wrong["spec"]["replicas"] = "four"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_every_container_has_limits_and_a_probe_and_time_to_drain() -> None:
    found = containers()
    assert len(found) == 4
    for kind, pod, container in found:
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), (kind, container["name"])
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        # A liveness probe of ours could only ask Redis, and would kill pods that wait for it.
        probes = {name for name in container if name.endswith("Probe")}
        redis = {"startupProbe", "readinessProbe", "livenessProbe"}
        assert probes == (redis if kind == "StatefulSet" else {"readinessProbe"})
        assert pod["terminationGracePeriodSeconds"] >= 60


def test_commands_are_ours_and_urls_come_from_a_secret_of_the_roles_user() -> None:
    ours = [container for _, _, container in containers() if container["image"] == "vla-stream"]
    keys = {}
    for container in ours:
        name, *rest = words_of(container)
        rest = [word.replace("/config/", f"{FOLDER}/") for word in rest]
        parse(name, rest)
        probe, *words = container["readinessProbe"]["exec"]["command"]
        assert probe == "vla-stream"
        parse(words[0], words[1:])
        (variable,) = container["env"]
        assert variable["name"] == "VLA_STREAM_REDIS" and "value" not in variable
        keys[name] = variable["valueFrom"]["secretKeyRef"]["key"]
    assert keys == {"run": "launcher", "generators": "generator", "simulators": "simulator"}
    assert set(keys.values()) <= set(USERS)


def test_the_run_that_is_shipped_is_valid_and_starts_no_pool() -> None:
    config = load([FOLDER / "run.yaml"])
    assert (config.simulators.count, config.generators.count) == (0, 0)


def test_what_is_mounted_exists_and_what_the_kustomization_names_too() -> None:
    secrets = {"redis-tls", "redis-acl", "redis-urls"}
    generated = {item["name"] for item in KUSTOMIZATION["configMapGenerator"]}
    claims = {item["metadata"]["name"] for _, item in objects() if item["kind"] == "PersistentVolumeClaim"}
    for _, pod, container in containers():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            assert mount["name"] in {*volumes, "data"}
        for volume in volumes.values():
            assert volume.get("secret", {}).get("secretName", "redis-tls") in secrets
            assert volume.get("configMap", {}).get("name", "run-config") in generated
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "runs") in claims
    text = (DEPLOY / "README.md").read_text()
    assert all(f"secret generic {name}" in text for name in secrets)
    assert all((FOLDER / file).exists() for item in KUSTOMIZATION["configMapGenerator"] for file in item["files"])
