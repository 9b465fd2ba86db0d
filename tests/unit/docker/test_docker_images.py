"""The Dockerfile: what it copies is there, no user is root, and images hold what the operator's pods start."""

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem_operator.api.model_service import ModelServiceStatus, Security
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import OperatorSettings
from tandem_services.cli.main import COMMANDS
from tandem_testing.dockerfile import Stage, read_dockerfile
from tandem_testing.kube_cluster import service_of

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
STAGES = read_dockerfile(DOCKER / "Dockerfile")
IMAGES = ("engine-cpu", "engine-cuda", "services", "operator", "redis")
OURS = IMAGES[:-1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETTINGS = OperatorSettings()


def constraints(name: str = "constraints.txt") -> dict[str, str]:
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every container of every pod of a service with this spec."""
    plan = make_plan(service_of(spec), Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, SETTINGS)
    pods = [one["spec"]["template"]["spec"] for one in plan.apply if one["kind"] == "Deployment"]
    return [container for pod in pods for container in [*pod.get("initContainers", []), *pod["containers"]]]


def sent_to_builds(path: str) -> bool:
    """Whether .dockerignore lets it through; the last pattern that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted, pattern = pattern.startswith("!"), pattern.removeprefix("!").removeprefix("**/")
        parents = [path, *(str(parent) for parent in Path(path).parents)]
        if any(fnmatch.fnmatchcase(one, pattern) or fnmatch.fnmatchcase(Path(one).name, pattern) for one in parents):
            sent = wanted
    return sent


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_copied_files_exist_and_are_in_build_contexts(stage: Stage):
    for copy in stage.of("COPY"):
        *sources, _ = copy.words()
        origin = copy.flag("from")
        for source in sources:
            if origin is not None:
                assert origin in STAGES, copy.text
            else:
                assert (ROOT / source).exists(), copy.text
                assert sent_to_builds(source), copy.text


def test_bytecode_and_everything_else_stay_outside():
    assert not sent_to_builds("engine/tandem_engine/__pycache__/config.cpython-311.pyc")
    assert not sent_to_builds(".venv/bin/python")
    assert not sent_to_builds("tests/conftest.py")
    assert not sent_to_builds(".git/config")


@pytest.mark.parametrize("name", IMAGES)
def test_images_run_as_the_user_of_the_pods(name: str):
    user = STAGES[name].last("USER")
    assert user is not None
    assert user.text == f"{Security().run_as_user}:{Security().run_as_user}"
    assert STAGES[name].instructions.index(user) > max(
        (STAGES[name].instructions.index(one) for one in STAGES[name].of("RUN")), default=-1
    ), "what is installed belongs to root"


@pytest.mark.parametrize("name", OURS)
def test_container_user_has_a_name(name: str):
    """kopf asks getpass for its user, and died in a container whose user was a number alone."""
    runtime = STAGES[name].base
    assert runtime == "runtime"
    assert "USER=tandem" in STAGES[runtime].of("ENV")[0].text.split()
    assert f"useradd --uid {Security().run_as_user} " in STAGES[runtime].of("RUN")[0].text


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_bases_are_pinned_by_digest(stage: Stage):
    assert stage.base in STAGES or re.search(r":[^:@]+@sha256:[0-9a-f]{64}$", stage.base), stage.base


def test_builds_need_nothing_from_a_registry_but_their_base():
    """`# syntax=` would have BuildKit fetch a frontend from Docker Hub, of whatever version it has that day."""
    comments = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if line.startswith("#")]
    assert not [line for line in comments if re.match(r"#\s*syntax\s*=", line)]


@pytest.mark.parametrize("name", IMAGES)
def test_image_labels_follow_oci_annotations(name: str):
    text = " ".join(label.text for label in STAGES[name].of("LABEL"))
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text


def test_version_is_the_projects():
    for name in IMAGES:
        assert f"VERSION={PROJECT['version']}" in [one.text for one in STAGES[name].of("ARG")]


def test_apt_installs_skip_recommends_and_remove_lists():
    for stage in STAGES.values():
        for run in stage.of("RUN"):
            if "apt-get install" in run.text:
                assert "--no-install-recommends" in run.text
                assert run.text.endswith("rm -rf /var/lib/apt/lists/*") or "rm -rf /var/lib/apt/lists/*" in run.text


def test_apt_installs_are_cleaned_for_reproducible_builds():
    """What is in images; the stage with pip is not."""
    kept = [run for name, stage in STAGES.items() if name != "build" for run in stage.of("RUN")]
    installs = [run for run in kept if "apt-get install" in run.text]
    assert len(installs) == 3
    for run in installs:
        assert run.text.endswith("&& /mnt/clean.sh")
        assert "--mount=type=bind,source=docker/clean.sh,target=/mnt/clean.sh" in run.text
    assert os.access(DOCKER / "clean.sh", os.X_OK)


@pytest.mark.parametrize("script", ["clean.sh", "install-dependencies.sh"])
def test_bytecode_of_images_ignores_dates(script: str):
    """All files of an image have one date; bytecode that records another would be compiled at each start."""
    text = (DOCKER / script).read_text()
    [line] = [line for line in text.splitlines() if "compileall" in line]
    assert "--invalidation-mode unchecked-hash" in line
    # The interpreter of the environment has compiled what `.pth` files import, with a date, before it runs this.
    assert script == "clean.sh" or " -f " in line
    assert "__pycache__ -prune -exec rm -rf" in text


@pytest.mark.parametrize("target", IMAGES)
def test_build_script_names_the_image_of_each_target(target: str):
    command = [str(DOCKER / "build.sh"), "--names", target]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()
    name = "engine" if target.startswith("engine-") else target
    suffix = "-cuda" if target == "engine-cuda" else ""
    assert printed == [f"ghcr.io/tandem-serving/{name}:{PROJECT['version']}{suffix}"]


@pytest.mark.parametrize("example", ["minimal", "gpu", "full"])
def test_images_contain_commands_of_pods(example: str):
    spec = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())["spec"]
    subcommands = {getattr(command, "__name__", str(command)).rpartition(".")[2] for command in COMMANDS}
    for container in containers({**spec, "images": {}}):
        command = container["command"]
        match container["name"]:
            case "worker" | "gateway":
                assert command[0] == "tandem"
                assert command[1] in subcommands
            case "download":
                assert command[0] == "hf"
            case "redis":
                assert command[0] == "sh"
                assert "exec redis-server " in command[2]
            case other:
                pytest.fail(f"no image is known for container {other}")
    assert "redis-server" in " ".join(run.text for run in STAGES["redis"].of("RUN"))
    # `hf` comes with tokenizers, by way of huggingface-hub.
    assert "huggingface-hub" in constraints()


@pytest.mark.parametrize("name", OURS)
def test_entry_points_are_started_by_our_wrapper(name: str):
    """Every one is a link to the wrapper, which starts the console script of the same name under tini."""
    entry = STAGES[name].last("ENTRYPOINT")
    assert entry is not None
    (command,) = entry.words()
    wrapper = DOCKER / "bin" / command
    assert wrapper.resolve() == DOCKER / "bin" / "tandem"
    assert os.access(wrapper, os.X_OK)
    assert 'exec tini -s -- "/opt/tandem/app/bin/$(basename "$0")" "$@"' in wrapper.read_text()
    assert command in PROJECT["scripts"]
    installed = " ".join(run.text for run in STAGES["base"].of("RUN"))
    assert " tini" in installed
    path = next(one.text for one in STAGES["base"].of("ENV")).split("PATH=")[1].split()[0].split(":")
    assert path[:3] == ["/opt/tandem/bin", "/opt/tandem/app/bin", "/opt/tandem/venv/bin"]


def test_operator_deployment_command_matches_image_entry():
    manifests = yaml.safe_load_all((ROOT / "charts/install.yaml").read_text())
    (pod,) = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Deployment"]
    (container,) = pod["containers"]
    entry = STAGES["operator"].last("ENTRYPOINT")
    assert entry is not None
    assert container["command"] == entry.words()
    assert container["image"] == f"ghcr.io/tandem-serving/operator:{PROJECT['version']}"


def test_bundled_model_is_where_the_examples_name_it():
    spec = yaml.safe_load((ROOT / "examples" / "minimal.yaml").read_text())["spec"]
    folder = Path(spec["model"]["path"])
    assert folder.parent == Path("/opt/tandem/models")
    assert (ROOT / "models" / folder.name / "config.json").is_file()
    for name in ("engine-cpu", "engine-cuda", "services"):
        copied = [copy.words() for copy in STAGES[name].of("COPY") if copy.flag("from") == "app"]
        assert ["/opt/tandem/models", "/opt/tandem/models"] in copied


def test_every_image_installs_its_own_lock():
    locks = {
        stage.name: run.text.split("install-dependencies.sh ")[1].split()[0]
        for stage in STAGES.values()
        for run in stage.of("RUN")
        if "install-dependencies.sh " in run.text
    }
    assert locks == {
        "services-dependencies": "services",
        "operator-dependencies": "operator",
        "engine-cpu-dependencies": "engine-cpu",
        "engine-cuda-dependencies": "engine-cuda",
    }


def test_everything_that_images_install_is_pinned():
    pinned = constraints()
    command = [sys.executable, str(DOCKER / "requirements.py"), "engine", "operator", "otel", "router"]
    wanted = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name}: run docker/pin.py"
        assert requirement.specifier.contains(pinned[name]), f"{line}, but pinned is {pinned[name]}"


def test_torch_is_the_version_of_the_set_up():
    setup = (ROOT / "tools" / "setup.sh").read_text()
    assert f"torch_version={constraints()['torch']}\n" in setup


LOCK_LINE = re.compile(r"([a-z0-9-]+)={2,3}([^=\s]+)((?: --hash=sha256:[0-9a-f]{64})+)")


def locked(name: str) -> dict[str, str]:
    """Name → version; every line has a hash."""
    lines = [line for line in (DOCKER / "locks" / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [LOCK_LINE.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {match[1]: match[2] for match in matches if match}


@pytest.mark.parametrize("name", [*OURS, "build"])
def test_locks_have_the_pinned_versions(name: str):
    pinned = constraints() | constraints("constraints-cuda.txt")
    plain = {each: version.removesuffix("+cpu") for each, version in locked(name).items()}
    assert {each: pinned.get(each, version) for each, version in plain.items()} == plain, "run docker/lock.py"
    if name != "build":
        assert plain.keys() <= pinned.keys(), "run docker/pin.py and docker/lock.py"


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("services", ["router", "otel"]),
        ("operator", ["operator"]),
        ("engine-cpu", ["engine", "otel"]),
        ("engine-cuda", ["engine", "otel"]),
    ],
)
def test_locks_have_all_that_the_project_requires(name: str, extras: list[str]):
    command = [sys.executable, str(DOCKER / "requirements.py"), *extras]
    wanted = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    names = {canonicalize_name(Requirement(line).name) for line in wanted}
    assert names <= locked(name).keys(), "run docker/lock.py"


DEBIAN_12 = {"python_version": "3.11", "python_full_version": "3.11.2"}
"""Its Python, as requirements compare with it."""


@pytest.mark.parametrize("name", OURS)
def test_locks_satisfy_requirements_of_image_python(name: str):
    """redis requires async-timeout before 3.11.3: no container started, and no environment here had missed it."""
    there = locked(name)
    for package in distributions():
        if canonicalize_name(package.name) not in there:
            continue
        for line in map(Requirement, package.requires or []):
            if line.marker is not None and line.marker.evaluate({"extra": "", **DEBIAN_12}):
                assert canonicalize_name(line.name) in there, f"{package.name} requires {line}"


def test_only_engine_images_lock_torch_for_their_device():
    version = constraints()["torch"]
    found = {name: locked(name).get("torch") for name in OURS}
    assert found == {"engine-cpu": f"{version}+cpu", "engine-cuda": version, "services": None, "operator": None}
    # Of "==" pip took the newer 2.13.0+cpu of a folder of wheels, whose hash is another: the image was not built.
    assert f"\ntorch==={version} --hash" in (DOCKER / "locks" / "engine-cuda.txt").read_text()


def test_builds_install_nothing_without_a_hash():
    script = (DOCKER / "install-dependencies.sh").read_text()
    installs = [line for line in script.splitlines() if "pip install" in line]
    assert installs == ['install() { pip install --require-hashes --no-deps --no-compile "$@"; }']
    commands = [run.text for stage in STAGES.values() for run in stage.of("RUN") if "pip install" in run.text]
    assert all("--require-hashes" in text or "--no-index" in text for text in commands)


def test_cuda_packages_are_pinned_once():
    known, added = constraints(), constraints("constraints-cuda.txt")
    assert added.keys().isdisjoint(known)
    assert {"triton", "nvidia-nccl-cu13", "nvidia-nvjitlink", "cuda-bindings"} <= added.keys()
    dev = [Requirement(line) for line in PROJECT["optional-dependencies"]["dev"]]
    [triton] = [one for one in dev if one.name == "triton"]
    assert triton.specifier.contains(added["triton"]), "what kernels are tested with"
