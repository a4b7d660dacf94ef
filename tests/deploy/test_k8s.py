"""deploy/k8s: valid by the schemas, restarts by lmtrain's exit codes, the same run after restarts, no secrets."""

import re
from itertools import pairwise

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
LOST = (1, 134)  # by an error of JAX, or by its SIGABRT


def load(name: str) -> dict:
    return yaml.safe_load(FILES[name])


def comments(name: str) -> str:
    return "\n".join(re.findall(r"#.*", FILES[name]))


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
    spec = manifest.pop("spec")
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest.keys() == {"apiVersion", "kind", "metadata"}
    (replicated,), policy = spec["replicatedJobs"], spec["failurePolicy"]
    assert policy["maxRestarts"] > 0
    mistake = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert spec == {
        "network": {"enableDNSHostnames": True, "subdomain": spec["network"]["subdomain"]},
        "failurePolicy": {
            "maxRestarts": policy["maxRestarts"],
            "rules": [{"name": policy["rules"][0]["name"]} | mistake],
        },
        "replicatedJobs": [{"name": replicated["name"], "replicas": 1, "template": {"spec": job}}],
    }
    # names of pods are host names of at most 63 characters
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", f"{manifest['metadata']['name']}-{replicated['name']}")
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] > 1
    assert job["backoffLimit"] == 0  # a failure without a rule fails the job for another reason
    (rule,) = job["podFailurePolicy"]["rules"]
    container = job["template"]["spec"]["containers"][0]["name"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container, "operator": "In", "values": [MISTAKE]}
    assert {MISTAKE, STOPPED_BY_SIGNAL, *LOST} <= {int(code) for code in re.findall(r"\b\d+\b", comments(name))}


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


def test_a_tpu_slice_has_a_host_for_every_four_chips():
    (pod,), (job,) = pods("train-tpu.yaml"), jobs("train-tpu.yaml")
    x, y = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert x * y == job["parallelism"] * pod["containers"][0]["resources"]["limits"]["google.com/tpu"]


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


def test_claims_refer_to_the_volume():
    volume = load("volume.yaml")
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes = [entry for name in WITH_PODS for pod in pods(name) for entry in pod.get("volumes", [])]
    claims = [entry["persistentVolumeClaim"]["claimName"] for entry in volumes if "persistentVolumeClaim" in entry]
    assert set(claims) == {volume["metadata"]["name"]}


def test_the_ray_job_has_the_fields_of_its_interface():
    manifest = load("preprocess-ray.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    assert spec.keys() == {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert spec["shutdownAfterJobFinishes"] is True
    head, (workers,) = spec["rayClusterSpec"].pop("headGroupSpec"), spec["rayClusterSpec"].pop("workerGroupSpecs")
    assert spec["rayClusterSpec"] == {}
    assert head.keys() == {"rayStartParams", "template"}
    assert workers.keys() == head.keys() | {"groupName", "replicas", "minReplicas", "maxReplicas"}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert all(isinstance(value, str) for group in (head, workers) for value in group["rayStartParams"].values())


def shell_snippets(value: object) -> list[str]:
    """The shell code of a manifest: `sh -c` commands and Ray's entrypoint."""
    if isinstance(value, list):
        shells = [after for word, after in pairwise(value) if word in ("-c", "-ec", "-euc")]
        return shells + [snippet for entry in value for snippet in shell_snippets(entry)]
    if isinstance(value, dict):
        own = [value["entrypoint"]] if isinstance(value.get("entrypoint"), str) else []
        return own + [snippet for entry in value.values() for snippet in shell_snippets(entry)]
    return []


def test_shell_within_manifests_is_clean():
    snippets = [snippet for name in FILES for snippet in shell_snippets(load(name))]
    assert len(snippets) >= 1
    for snippet in snippets:
        shellcheck("--shell=bash", "-", text=f"{snippet}\n")


def test_the_page_lists_every_file():
    page = (K8S / "README.md").read_text()
    assert all(f"]({name})" in page for name in FILES)
