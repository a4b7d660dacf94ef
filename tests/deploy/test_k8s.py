"""deploy/k8s: valid by the schemas, restarts by lmtrain's exit codes, the same run after restarts, no secrets."""

import re

import kubernetes_validate
import pytest
import yaml
from deploy.scripts import DEPLOY, shellcheck

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL

K8S = DEPLOY / "k8s"
FILES = {path.name: path.read_text() for path in K8S.glob("*.yaml")}
JOBSETS = ["train-gpu.yaml", "train-tpu.yaml"]
# The oldest version on the page, where pod failure policies are stable, and the newest known one.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]
MISTAKE = 2


def load(name: str) -> dict:
    return yaml.safe_load(FILES[name])


def jobs(name: str) -> list[dict]:
    """The Job specs of a manifest."""
    manifest = load(name)
    if manifest["kind"] == "Job":
        return [manifest["spec"]]
    return [job["template"]["spec"] for job in manifest["spec"].get("replicatedJobs", [])]


def pods(name: str) -> list[dict]:
    """The Pod specs of a manifest."""
    manifest = load(name)
    if manifest["kind"] == "RayJob":
        cluster = manifest["spec"]["rayClusterSpec"]
        return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [job["template"]["spec"] for job in jobs(name)]


WITH_PODS = sorted(name for name in FILES if pods(name))


def validate(kind: str, api: str, spec: dict, version: str) -> None:
    whole = {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(whole, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(FILES))
def test_every_part_is_valid_by_the_schemas(name, version):
    manifest = load(name)
    if manifest["kind"] not in ("JobSet", "RayJob"):
        kubernetes_validate.validate(manifest, version, strict=True)
    for spec in jobs(name):
        validate("Job", "batch/v1", spec, version)
    for spec in pods(name):
        validate("Pod", "v1", spec, version)


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_is_one_indexed_job_that_a_mistake_fails_and_any_other_failure_restarts(name):
    manifest, (job,) = load(name), jobs(name)
    policy = manifest["spec"]["failurePolicy"]
    (replicated,), (restart,) = manifest["spec"]["replicatedJobs"], policy["rules"]
    assert policy["maxRestarts"] > 0
    assert restart.items() >= {("action", "FailJobSet")}
    assert restart["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert replicated["replicas"] == 1
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] > 1
    assert job["backoffLimit"] == 0  # a failure without a rule fails the job for another reason
    (rule,) = job["podFailurePolicy"]["rules"]
    container = job["template"]["spec"]["containers"][0]["name"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container, "operator": "In", "values": [MISTAKE]}


def test_the_batch_job_restarts_without_counting_clean_stops_and_preemptions():
    (job,) = jobs("preprocess.yaml")
    rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in job["podFailurePolicy"]["rules"]]
    assert rules == [("FailJob", [MISTAKE]), ("Ignore", [STOPPED_BY_SIGNAL]), ("Ignore", None)]
    assert job["podFailurePolicy"]["rules"][2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["backoffLimit"] > 0


def settings(name: str) -> dict[str, str]:
    """--name=value of the container's arguments."""
    (pod,) = pods(name)
    return dict(word.removeprefix("--").split("=", 1) for word in pod["containers"][0]["args"] if word.startswith("--"))


def test_gpu_hosts_find_the_first_pod_by_its_name():
    manifest = load("train-gpu.yaml")
    (job,) = manifest["spec"]["replicatedJobs"]
    host = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['spec']['network']['subdomain']}"
    given = settings("train-gpu.yaml")
    assert given["trainer.distributed.coordinator_address"].rpartition(":")[0] == host
    assert int(given["trainer.distributed.num_processes"]) == job["template"]["spec"]["parallelism"]
    assert given["trainer.distributed.process_id"] == "$(JOB_COMPLETION_INDEX)"


@pytest.mark.parametrize("name", WITH_PODS)
def test_commands_are_accepted_by_lmtrain(name, run_cli, write_config):
    """`config check` accepts the flags of every manifest."""
    entry = load(name)["spec"].get("entrypoint")
    words = entry.partition("lmtrain ")[2].split() if entry else pods(name)[0]["containers"][0]["args"]
    verb, _, *flags = words
    assert verb in ("train", "preprocess")
    write_config({"data": {"train_urls": ["x.jsonl"], "tokenizer": "byte"}})
    flags = [flag.replace("$(JOB_COMPLETION_INDEX)", "1") for flag in flags]
    flags = [f"--trainer.ray.{flag[2:]}" if flag == "--address" else flag for flag in flags]
    run_cli("config", "check", "tiny.yaml", *flags, code=0)


@pytest.mark.parametrize("name", WITH_PODS)
def test_pods_have_no_privileges_and_contain_no_secrets(name):
    for pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000  # the user of the images
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        secrets = [entry for entry in container["env"] if re.search("KEY|TOKEN", entry["name"])]
        assert {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} <= {entry["name"] for entry in secrets}
        assert all(entry.keys() == {"name", "valueFrom"} for entry in secrets)
        assert all(entry["valueFrom"]["secretKeyRef"]["key"] == entry["name"] for entry in secrets)


@pytest.mark.parametrize("name", JOBSETS)
def test_a_run_keeps_its_id_and_checkpoints_and_has_time_to_save(name):
    (pod,) = pods(name)
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["RUN_ID"] == load(name)["metadata"]["name"]
    assert "WANDB_API_KEY" in environment
    assert pod["terminationGracePeriodSeconds"] >= 300
    assert pod["restartPolicy"] == "Never"
    bucket = settings(name).get("trainer.checkpointer.base_path", "").startswith("gs://")
    claims = {volume["name"] for volume in pod.get("volumes", []) if "persistentVolumeClaim" in volume}
    mounted = {mount["mountPath"] for mount in container.get("volumeMounts", []) if mount["name"] in claims}
    assert bucket or container.get("workingDir") in mounted


def test_the_shell_code_of_the_ray_job_is_clean():
    shellcheck("--shell=bash", "-", text=f"{load('preprocess-ray.yaml')['spec']['entrypoint']}\n")
