"""The examples for SLURM and Kubernetes: their syntax, and that torchrun and octavo take the options in them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from patience import HANG
from torch.distributed.run import get_args_parser

import octavo
from octavo.train.processes import check_parallel, find_degrees
from octavo.train.settings import load_config

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(octavo.__file__).parents[2] / "examples"
SLURM, KUBERNETES = EXAMPLES / "slurm.sh", EXAMPLES / "kubernetes.yaml"

# The fields of the Kubernetes API (1.28) that the example uses: name -> type, or the fields of an object.
METADATA = {"name": str, "labels": {"app": str}}
CONTAINER = {
    "name": str, "image": str, "command": [str], "env": [{"name": str, "value": str}],
    "resources": {"limits": {"nvidia.com/gpu": int}}, "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD = {
    "subdomain": str, "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
}  # fmt: skip
SERVICE = {
    "clusterIP": str, "publishNotReadyAddresses": bool, "selector": {"job-name": str},
    "ports": [{"name": str, "port": int}],
}  # fmt: skip
JOB = {
    "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
    "template": {"metadata": METADATA, "spec": POD},
}  # fmt: skip
KINDS = {("v1", "Service"): SERVICE, ("batch/v1", "Job"): JOB}


def check(value, schema, where):
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert value.keys() <= schema.keys(), f"{where}: {value.keys() - schema.keys()}"
        for key, entry in value.items():
            check(entry, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for index, entry in enumerate(value):
            check(entry, schema[0], f"{where}[{index}]")
    else:
        assert type(value) is schema, f"{where}: {value!r}"


def test_the_manifest_is_of_kubernetes_objects():
    documents = list(yaml.safe_load_all(KUBERNETES.read_text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kind = document["apiVersion"], document["kind"]
        check(document, {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": KINDS[kind]}, kind[1])
    service, job = documents
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    command = parsed(container["command"])
    assert command.nnodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert command.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    port = service["spec"]["ports"][0]["port"]
    assert command.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"


def parsed(command):
    """The arguments that torchrun reads; those of octavo are checked."""
    assert command[0] == "torchrun"
    found = get_args_parser().parse_args(command[1:])
    assert (found.module, found.training_script) == (True, "octavo")
    train, preset, *settings = found.training_script_args
    assert (train, settings[-1]) == ("train", "--or-resume")
    config = load_config(preset, settings[:-1])
    processes = int(found.nnodes) * int(found.nproc_per_node)
    check_parallel(config, find_degrees(config.parallel, processes), torch.device("cpu"))
    return found


def test_the_manifest_check_can_fail():
    with pytest.raises(AssertionError, match="Job.parralelism|parralelism"):
        check({"parralelism": 8}, JOB, "Job")
    with pytest.raises(AssertionError, match=r"Job.completions: '8'"):
        check({"completions": "8"}, JOB, "Job")


def run(*words, **options):
    return subprocess.run(words, text=True, capture_output=True, timeout=HANG, **options)


def test_the_script_is_valid_bash():
    assert run("bash", "-n", str(SLURM)).returncode == 0
    if shutil.which("shellcheck"):
        checked = run("shellcheck", str(SLURM))
        assert checked.returncode == 0, checked.stdout
    without = run("bash", str(SLURM))
    assert (without.returncode, without.stderr.partition(" ")[0]) == (2, "usage:")


def test_the_script_starts_one_torchrun_a_machine(tmp_path):
    """With a scontrol and an srun that print what they get."""
    for name, script in (("scontrol", "printf 'first\\nsecond\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-8]", "SLURM_JOB_NUM_NODES": "8",
        "SLURM_JOB_ID": "123",
    }  # fmt: skip
    ended = run("bash", str(SLURM), "llama-3-70b", "--data", "a b", env=environment)
    assert ended.returncode == 0, ended.stderr
    bad, *command = ended.stdout.splitlines()
    assert bad == "--kill-on-bad-exit=1"
    found = parsed(command)
    assert (found.nnodes, found.rdzv_endpoint) == ("8", "first:20123")
    assert "a b" in found.training_script_args
    text = SLURM.read_text()
    assert re.search(r"^#SBATCH --nodes=8$", text, re.M)
    assert re.search(r"^#SBATCH --ntasks-per-node=1$", text, re.M)
