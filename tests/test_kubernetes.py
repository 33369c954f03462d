"""The manifests of docs/kubernetes say what the command line and the server know, and fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from helpers.fake_engine import FakeEngine, FakeEngineThread
from tierax.cli.config_file import add_config_option, parse
from tierax.cli.option import Parser, add_options
from tierax.cli.options import NAME_OPTION, add_engine_options, engine_config
from tierax.cli.options_of_server import SERVER_OPTIONS, server_config
from tierax.engine.config import EngineConfig
from tierax.serving.app import make_app
from tierax.serving.config import ServerConfig

FOLDER = Path(__file__).parents[1] / "docs" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))


def objects(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def find(kind: str) -> dict[str, Any]:
    (found,) = [one for path in FILES for one in objects(path) if one.get("kind") == kind]
    return found


def pod() -> dict[str, Any]:
    return find("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (one,) = pod()["containers"]
    return one


def settings(args: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """What `tierax serve` makes of these arguments; fails for a flag that there is not."""
    assert args[0] == "serve"
    parser = Parser("tierax serve", "")
    add_config_option(parser)
    add_options(parser, (*SERVER_OPTIONS, NAME_OPTION), "server")
    add_engine_options(parser)
    values = parse(parser, args[1:])
    return engine_config(values, parser), server_config(values, {})


def arguments() -> Iterator[Any]:
    for path in FILES:
        for one in objects(path):
            for each in one["spec"].get("template", {}).get("spec", {}).get("containers", []):
                yield pytest.param(each["args"], id=path.name)


@pytest.mark.parametrize("args", [*arguments()])
def test_every_flag_is_one_of_the_command_line(args: list[str]) -> None:
    engine, server = settings(args)
    assert engine.host_disk_cache_dir is not None
    assert engine.disk_cache_shared, "several replicas write there"
    assert server.host == "0.0.0.0", "pods are reached from outside"
    assert server.metrics_alias == "vllm", "what the endpoint picker reads"


def test_every_probe_asks_for_a_route_that_needs_no_key() -> None:
    app = make_app(FakeEngineThread(FakeEngine()), ServerConfig())
    routes = {resource.canonical for resource in app.router.resources()}
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container()[probe]["httpGet"]
        assert asked["path"] in routes & {"/health", "/ready"}
        assert ports[asked["port"]] == settings(container()["args"])[1].port
    annotations = find("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes
    (rule,) = find("HTTPRoute")["spec"]["rules"]
    prefix = rule["matches"][0]["path"]["value"]
    assert any(route.startswith(prefix + "/") for route in routes)


def test_ports_are_those_that_the_server_listens_on() -> None:
    _, server = settings(container()["args"])
    events = server.kv_events_config()
    assert events is not None
    assert events.binds
    assert events.replay_endpoint is not None
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {
        "http": server.port,
        "kv-events": int(events.endpoint.rpartition(":")[2]),
        "kv-replay": int(events.replay_endpoint.rpartition(":")[2]),
    }
    assert [port["targetPort"] for port in find("Service")["spec"]["ports"]] == ["http"]
    assert find("InferencePool")["spec"]["targetPorts"] == [{"number": server.port}]
    # Kubernetes puts in what the environment has.
    names = {one["name"] for one in container()["env"]}
    assert events.topic == "kv@$(POD_IP)@demo"
    assert "POD_IP" in names


def test_drain_fits_into_the_time_that_a_pod_gets() -> None:
    _, server = settings(container()["args"])
    pause = container()["lifecycle"]["preStop"]["exec"]["command"][-1]
    seconds = int(pause.removeprefix("import time; time.sleep(").removesuffix(")"))
    needed = seconds + server.shutdown_timeout + server.disk_drain_timeout
    assert needed < pod()["terminationGracePeriodSeconds"]


def test_objects_name_each_other() -> None:
    labels = find("Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "InferencePool"):
        assert find(kind)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert find("Service")["spec"]["selector"].items() <= labels.items()
    (rule,) = find("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == find("InferencePool")["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["name"]: PurePosixPath(mount["mountPath"]) for mount in container()["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    claim = volumes["kv"]["persistentVolumeClaim"]["claimName"]
    assert claim == find("PersistentVolumeClaim")["metadata"]["name"]
    engine, _ = settings(container()["args"])
    assert PurePosixPath(str(engine.host_disk_cache_dir)) == mounts["kv"]
    (patch,) = objects(FOLDER / "s3-patch.yaml")
    assert [one["name"] for one in patch["spec"]["template"]["spec"]["containers"]] == [container()["name"]]
