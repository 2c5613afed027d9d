"""What starts a run under Kubernetes, SkyPilot and Ray: schemas, rules, and each file's command on two nodes."""

import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import forked_python
from tests.hosts import PATIENCE_S, free_port
from tests.launching import REPOSITORY, clean_environment
from tests.runs import small_run_arguments

NUM_NODES, GPUS_OF_A_NODE = 2, 8
FILES = {path.name: path for path in (*Path(REPOSITORY, "scripts/kubernetes").glob("*.yaml"),)}
FILES["skypilot.yaml"] = Path(REPOSITORY, "scripts/skypilot.yaml")
FILES["ray_train.py"] = Path(REPOSITORY, "scripts/ray_train.py")


def read(name):
    return yaml.safe_load(FILES[name].read_text())


def containers(jobset):
    """The pods' specification and the only container of it."""
    (job,) = jobset["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return job, pod, container


def command_of(name):
    """As a shell's line."""
    match name:
        case "ray_train.py":
            # As the file's own function makes it; it imports Ray, which is not installed, elsewhere.
            program = runpy.run_path(str(FILES[name]))
            return shlex.join(program["command_of"]("$RANK", "$MASTER_ADDR")).replace("'", '"')
        case "jobset.yaml":
            return shlex.join(containers(read(name))[2]["args"])
        case "trainjob.yaml":
            return shlex.join(read(name)["spec"]["trainer"]["args"])
        case "skypilot.yaml":
            return read(name)["run"].strip().replace("\\\n", "")


def environment_of(name, node, port):
    """What the platform tells a node's first process."""
    match name:
        case "jobset.yaml":
            return {}
        case "trainjob.yaml":
            place = {"NNODES": NUM_NODES, "NPROC_PER_NODE": 1, "NODE_RANK": node}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            return {f"PET_{key}": str(value) for key, value in place.items()}
        case "skypilot.yaml":
            place = {"NUM_NODES": NUM_NODES, "NUM_GPUS_PER_NODE": 1, "NODE_RANK": node}
            place["NODE_IPS"] = "127.0.0.1\n127.0.0.2\n"
            return {f"SKYPILOT_{key}": str(value) for key, value in place.items()}
        case "ray_train.py":
            # What Ray Train sets beside, for processes of its own, must not count.
            place = {"RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": NUM_NODES, "LOCAL_WORLD_SIZE": 1}
            place |= {"NODE_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            return {key: str(value) for key, value in place.items()}


@pytest.mark.parametrize(
    ("name", "model"), [("jobset.yaml", JobsetV1alpha2JobSet), ("trainjob.yaml", TrainerV1alpha1TrainJob)]
)
def test_every_field_is_one_of_the_api(name, model):
    # What it does not know it leaves out.
    assert model.from_dict(read(name)).to_dict() == read(name)


def test_pods_of_the_jobset_meet_at_the_first_one_and_share_the_run_directory():
    jobset = read("jobset.yaml")
    job, pod, container = containers(jobset)
    name = jobset["metadata"]["name"]
    assert f"--master-addr={name}-{job['name']}-0-0.{name}" in container["args"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == NUM_NODES
    assert f"--nnodes={NUM_NODES}" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == GPUS_OF_A_NODE
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", FILES)
def test_arguments_pass_the_rules(name, broken_rules):
    arguments = shlex.split(command_of(name))
    overrides = arguments[arguments.index("gpt_pretrain") + 1 :]
    assert "run_dir=/runs/llama3_8b" in overrides
    overrides = [each for each in overrides if not each.startswith("run_dir=")]
    world = {"world_size": NUM_NODES * GPUS_OF_A_NODE, "local_world_size": GPUS_OF_A_NODE}
    assert broken_rules(*overrides, "plan.gpu=h100", **world) == []


@pytest.mark.parametrize("name", FILES)
def test_its_command_trains_on_two_nodes(name, parent, tmp_path, cache_dir):
    port = free_port()
    launch, _, _ = command_of(name).partition("-m gpt_pretrain")
    for old, new in (
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        ("llama3-8b-node-0-0.llama3-8b", "127.0.0.1"),
        ("29500", str(port)),
    ):
        assert name != "jobset.yaml" or old in launch
        launch = launch.replace(old, new)
    run = shlex.join(small_run_arguments(tmp_path / "run", cache_dir, ["parallelism=dp", "trainer.max_steps=2"]))
    nodes = []
    with forked_python(parent, tmp_path) as python:
        (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
        (tmp_path / "torchrun").chmod(0o755)
        for node in range(NUM_NODES):
            own = clean_environment({**environment_of(name, node, port), "PYTHON_EXEC": str(python)})
            own["PATH"] = f"{tmp_path}:{own['PATH']}"
            # The kubelet puts a variable in the place of its name, which the shell has quoted.
            line = launch.replace("'--node-rank=$(NODE_RANK)'", f"--node-rank={node}") + run
            nodes.append(
                subprocess.Popen(
                    ["bash", "-c", line],
                    cwd=REPOSITORY,
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    assert f"processes: {NUM_NODES} on {NUM_NODES} nodes" in outputs[0]
    assert [record.step for record in load_metrics(tmp_path / "run").train] == [1, 2]
