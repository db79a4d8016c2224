"""The mesh of an elastic run for the processes that are left, its command, and its launch files."""

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import time
from pathlib import Path

import jax
import pytest
import yaml

from scmoe import train
from scmoe.base.errors import INTERRUPTED_EXIT, ConfigError, Preempted, Unavailable
from scmoe.models.config import ModelConfig
from scmoe.run import elastic
from scmoe.run.command_line import TRAIN_FLAGS, parse, run_config
from scmoe.run.config import RunConfig
from scmoe.run.elastic import address, choose_mesh, flags, member_of, variables
from scmoe.training import distributed
from scmoe.training.distributed import Cluster, find_cluster, initialize
from scmoe.training.members import Plan
from scmoe.training.options import DistributedConfig
from scmoe.training.restarts import FINAL

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def run_of(*, batch=24, experts=8, **mesh):
  run = RunConfig()
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, num_experts=experts),
    train=dataclasses.replace(run.train, batch_size=batch),
    mesh=dataclasses.replace(run.mesh, **mesh),
  )


@pytest.mark.parametrize(
  ("run", "processes", "devices", "want"),
  [
    # All four processes have the mesh as configured, with data=-1 as with its number.
    (run_of(expert=2), 4, 2, (4, 4, 2)),
    (run_of(data=4, expert=2), 4, 2, (4, 4, 2)),
    (run_of(expert=2), 3, 2, (3, 3, 2)),
    # 8 experts do not divide over 6 devices: the expert axis shrinks, all three processes train.
    (run_of(expert=8), 3, 2, (3, 3, 2)),
    # 16 rows do not divide over 6 devices: one process has to wait.
    (run_of(batch=16, expert=2), 3, 2, (2, 2, 2)),
    (run_of(batch=16, expert=8), 3, 8, (2, 2, 8)),
    (run_of(batch=16), 3, 1, (2, 2, 1)),
    # The tensor axis stays: two processes of two devices make two places for rows.
    (run_of(tensor=2), 2, 2, (2, 2, 1)),
    (run_of(expert=4, tensor=2), 3, 8, (3, 3, 4)),
    (run_of(), 1, 1, (1, 1, 1)),
  ],
)
def test_the_largest_mesh_that_batch_experts_and_processes_allow(run, processes, devices, want):
  choice = choose_mesh(run, processes, devices, most=4)
  assert (choice.processes, choice.data, choice.expert) == want
  assert choice.data * choice.expert * run.mesh.tensor == choice.processes * devices
  assert f"data {want[1]} x expert {want[2]} x tensor" in choice.words


def test_why_a_process_waits_is_said():
  words = choose_mesh(run_of(batch=16, expert=2), 3, 2, most=4).words
  assert words == (
    "data 2 x expert 2 x tensor 1 on 2 of 4 processes; not 3 processes: train.batch_size=16 is not "
    "divisible by mesh.data x mesh.expert = 6"
  )
  assert "not" not in choose_mesh(run_of(expert=2), 3, 2, most=4).words


def test_no_mesh_at_all():
  with pytest.raises(ConfigError, match=r"no mesh like .* tensor 4 on 3 processes of 1 devices"):
    choose_mesh(run_of(tensor=4, expert=1), 3, 1, most=4)
  with pytest.raises(ConfigError, match=r"batch_size=3 is not divisible by"):
    choose_mesh(run_of(batch=3), 1, 2, most=4)


def test_one_turns_command_finds_its_mesh_and_its_peers():
  plan = Plan(2, (0, 2, 3), ("a", "b", "c"), "node0:4444", 3, 2, "words")
  run = dataclasses.replace(run_of(), distributed=DistributedConfig("other:1", 4, 3))
  argv = ["--config.mesh.expert=8", "--config.distributed.num_processes=4"]
  argv += ["--config.distributed.coordinator=other:1", "--config.distributed.process_id=3"]
  values, given = parse([*argv, *flags(plan, run.distributed != DistributedConfig())], TRAIN_FLAGS,
                        with_fields=True)  # fmt: skip
  found = run_config(values, given)
  assert (found.mesh.data, found.mesh.expert) == (3, 2)
  assert find_cluster(found.distributed, variables(plan, 1)) == Cluster("node0:4444", 3, 1)
  alone = Plan(3, (2,), ("b",), "node2:4444", 1, 2, "words")
  assert find_cluster(found.distributed, variables(alone, 0)) is None


def test_the_address_at_which_others_reach_a_process():
  at = lambda coordinator, process, **environment: address(
    Cluster(coordinator, 4, process), environment
  )
  assert at("127.0.0.1:1", 2, SCMOE_HOST="x") == "127.0.0.1"
  assert at("node0:1", 2, SCMOE_HOST="x", SLURMD_NODENAME="node2") == "x"
  assert at("node0:1", 2, SLURMD_NODENAME="node2") == "node2"
  assert at("node0:1", 0) == "node0"
  assert at("node0:1", 1) not in ("", "node0")


def test_devices_are_counted_by_another_process(monkeypatch, capsys):
  assert elastic.count_devices(6) == 6
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
  assert elastic.count_devices(0) == 3
  monkeypatch.setenv("JAX_PLATFORMS", "nothing")
  with pytest.raises(Unavailable, match="jax finds no devices here"):
    elastic.count_devices(0)
  monkeypatch.setattr(elastic, "_COUNT", "import time; time.sleep(60)")
  monkeypatch.setattr(elastic, "_COUNT_SECONDS", 0.1)
  with pytest.raises(Unavailable, match=r"has not found this host's devices in 0\.1 s"):
    elastic.count_devices(0)
  assert Unavailable.code not in FINAL
  counted = elastic.begin_count(0)
  while (devices := counted()) is None:
    time.sleep(0.02)
  assert devices == 0
  assert "has not found this host's devices" in capsys.readouterr().err


def test_processes_that_do_not_reach_each_other_may_try_again(monkeypatch):
  def refuses(*args, **options):
    raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

  monkeypatch.setattr(jax.distributed, "initialize", refuses)
  monkeypatch.setattr(distributed, "_COORDINATOR_SECONDS", 0.3)
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else may
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unavailable, match=r"process 1 of 2 could not connect \(.*is process 0 run"):
      initialize(DistributedConfig(address, 2, 1))
    taken.listen()
    with pytest.raises(Unavailable, match="process 1 of 2 could not connect: DEADLINE_EXCEEDED"):
      initialize(DistributedConfig(address, 2, 1))


def test_the_command_runs_as_a_member(tmp_path, monkeypatch):
  members = []
  monkeypatch.setattr(train.elastic, "supervise", lambda member: members.append(member) or 86)
  for name, value in {
    "COORDINATOR": "127.0.0.1:9",
    "NUM_PROCESSES": "4",
    "PROCESS_ID": "2",
  }.items():
    monkeypatch.setenv(f"SCMOE_{name}", value)
  argv = ["--restarts=3", "--elastic", "--simulate=2", "--workdir", str(tmp_path / "a")]
  with pytest.raises(SystemExit) as caught:
    train.main(argv)
  assert caught.value.code == 86
  (member,) = members
  assert (member.number, member.count, member.restarts, member.silent) == (2, 4, 3, 15.0)
  assert (member.me.devices, member.me.host) == (2, "127.0.0.1")
  started = []
  monkeypatch.setattr(elastic, "start_child", lambda *args: started.append(args))
  member.launch.start(Plan(1, (2, 3), ("a", "b"), "127.0.0.1:8", 4, 1, ""), 0)
  ((command, environment),) = started
  assert command[3:] == [*argv, "--restarts=0", "--elastic=false", "--config.mesh.data=4",
                         "--config.mesh.expert=1"]  # fmt: skip
  assert environment["SCMOE_PROCESS_ID"] == "0"
  monkeypatch.setattr(elastic, "QuietChild", lambda *args: started.append(args))
  member.launch.compile(Plan(1, (2,), ("a",), "127.0.0.1:7", 2, 1, ""), 0)
  command, environment = started[1]
  assert command[-3:] == ["--config.mesh.data=2", "--config.mesh.expert=1", "--compile_only"]
  assert environment["SCMOE_NUM_PROCESSES"] == "1"
  assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
  beat = tmp_path / "a" / "heartbeat" / "process_0.json"
  assert not member.launch.trains(7)
  beat.parent.mkdir()
  beat.write_text(json.dumps({"pid": 7, "step": 1}))
  assert not member.launch.held()
  lock = {"pid": 1, "host": "elsewhere"}
  (tmp_path / "a" / "run.lock").write_text(json.dumps(lock))
  assert member.launch.held()
  member.launch.release()
  assert not member.launch.held()
  assert member.launch.trains(7)
  assert not member.launch.trains(8)


@pytest.mark.parametrize(
  ("environment", "want"),
  [
    ({}, True),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".90"}, True),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}, False),
    ({"XLA_CLIENT_MEM_FRACTION": "0.95"}, False),
    ({"XLA_CLIENT_MEM_FRACTION": ""}, True),
  ],
)
def test_nothing_is_compiled_ahead_on_a_gpu_that_the_training_fills(environment, want, capsys):
  assert elastic.leaves_room(environment) == want
  said = capsys.readouterr().err
  assert ("MEM_FRACTION=0.95 leaves a second process too little memory" in said) != want


def test_the_step_is_compiled_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
  asked = []
  monkeypatch.setattr(train, "compile_only", lambda built, workdir: asked.append((built, workdir)))
  argv = ["--config=quickstart", "--smoke", "--compile_only", "--workdir", str(tmp_path / "a")]
  train.main([*argv, "--config.mesh.data=4"])
  ((built, workdir),) = asked
  assert (built.run.mesh.data, workdir) == (4, tmp_path / "a")
  assert "for a start on data 4 x expert 1 x tensor 1" in capsys.readouterr().out
  assert not (tmp_path / "a").exists()
  with pytest.raises(ConfigError, match="--compile_only compiles one run's step; leave --beside"):
    train.main([*argv, f"--beside=1={tmp_path / 'b'}"])


def test_a_step_that_does_not_compile_for_want_of_memory_is_one_line(tmp_path, monkeypatch):
  def refuses(built, workdir):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

  told = lambda built, error: ConfigError(f"{built.run.name} needs more: {error}")
  monkeypatch.setattr(train, "compile_only", refuses)
  monkeypatch.setattr(train, "out_of_memory", told)
  argv = ["--config=quickstart", "--smoke", "--compile_only", "--workdir", str(tmp_path / "a")]
  with pytest.raises(ConfigError, match=r"needs more: RESOURCE_EXHAUSTED"):
    train.main([*argv, "--config.mesh.data=4"])


def test_mistakes_of_the_call(tmp_path):
  with pytest.raises(ConfigError, match=r"--elastic restarts a run .* add --restarts=5"):
    train.main(["--elastic"])
  with pytest.raises(ConfigError, match="--elastic is for runs of several processes"):
    member_of(RunConfig(), tmp_path / "a", [], restarts=1, simulated=2)


def accepted(words):
  """The run that `scmoe.train` makes of a launch file's arguments; raises for one it has not."""
  values, given = parse(words, TRAIN_FLAGS, with_fields=True)
  assert values["elastic"]
  assert values["restarts"] > 0
  assert values["workdir"]
  return run_config(values, given)


def test_the_jobset_is_what_train_accepts():
  job = yaml.safe_load((DOCS / "launch_jobset.yaml").read_text())
  assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  (workers,) = job["spec"]["replicatedJobs"]
  spec = workers["template"]["spec"]
  count = spec["completions"]
  assert spec["parallelism"] == count
  assert spec["completionMode"] == "Indexed", "a pod that is made again has its number again"
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  assert container["command"] == ["python", "-m", "scmoe.train"]
  run = accepted(container["args"])
  variables = {e["name"]: e for e in container["env"]}
  index = variables.pop("SCMOE_PROCESS_ID")["valueFrom"]["fieldRef"]["fieldPath"]
  assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  environment = {name: e["value"] for name, e in variables.items()}
  cluster = find_cluster(run.distributed, environment | {"SCMOE_PROCESS_ID": str(count - 1)})
  first = f"{job['metadata']['name']}-{workers['name']}-0-0.{job['spec']['network']['subdomain']}"
  assert cluster == Cluster(f"{first}:8476", count, count - 1)
  (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/runs"]
  assert mount["name"] in [v["name"] for v in pod["volumes"]]
  failing = spec["podFailurePolicy"]["rules"][0]
  mended = (0, Preempted.code, INTERRUPTED_EXIT)  # no user types Ctrl-C at a pod
  assert failing["onExitCodes"]["values"] == [code for code in FINAL if code not in mended]
  for processes in range(1, count + 1):
    assert choose_mesh(run, processes, 8, most=count).processes == processes


def test_the_slurm_script_is_what_train_accepts():
  text = (DOCS / "launch_slurm_elastic.sh").read_text()
  (call,) = re.findall(r"python -m scmoe\.train (.*?)(?: &)?\n", text.replace("\\\n", " "))
  words = [word for word in shlex.split(call) if word != "$@"]
  (example,) = re.findall(r"# +sbatch docs/launch_slurm_elastic\.sh (.*)", text)
  run = accepted(words + shlex.split(example))
  given = dict(re.findall(r"export (SCMOE_\w+)=(\S+)", text))
  assert set(given) == {"SCMOE_COORDINATOR", "SCMOE_NUM_PROCESSES"}
  assert "SCMOE_PROCESS_ID=$number" in text
  assert "case $code in " + "|".join(map(str, FINAL)) + ") return" in text
  assert "#SBATCH --no-kill" in text, "the job outlives a node"
  assert choose_mesh(run, 3, 8, most=4).processes == 3
  assert isinstance(run.model, ModelConfig)


FAKE_SRUN = """#!/usr/bin/env bash
echo "$SCMOE_PROCESS_ID of $SCMOE_NUM_PROCESSES at $SCMOE_COORDINATOR: ${*: -4}" >> "$SAID"
trap 'kill $child 2>/dev/null; exit 75' TERM
if [ "$SCMOE_PROCESS_ID" = 1 ] && [ ! -e "$SAID.failed" ]; then touch "$SAID.failed"; exit 137; fi
touch "$SAID.$SCMOE_PROCESS_ID"
sleep 60 & child=$!
wait $child
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'node7\\nnode9\\n'; else echo "scontrol $*" >> "$SAID"; fi
"""


def test_the_slurm_script_starts_a_node_again_and_requeues(tmp_path):
  """Commands of SLURM that a test plays: one node fails, then the time limit comes."""
  for name, text in {"srun": FAKE_SRUN, "scontrol": FAKE_SCONTROL}.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  script, said = tmp_path / "script.sh", tmp_path / "said"
  launch = (DOCS / "launch_slurm_elastic.sh").read_text()
  script.write_text(launch.replace("sleep 30", "sleep 0"))
  environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said)}
  environment |= {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_ID": "12"}
  job = subprocess.Popen(["bash", str(script), "--workdir", "runs/a"], env=environment)
  try:
    end = time.monotonic() + 60
    while not ((tmp_path / "said.0").exists() and (tmp_path / "said.1").exists()):
      assert time.monotonic() < end
      time.sleep(0.02)
    job.terminate()
    assert job.wait(60) == 75
  finally:
    job.kill()
  lines = said.read_text().splitlines()
  start = "{} of 2 at node7:8476: --workdir runs/a --restarts=5 --elastic"
  assert sorted(lines[:3]) == [start.format(0), start.format(1), start.format(1)]
  assert lines[3:] == ["scontrol requeue 12"]


def test_the_slurm_script_hears_a_signal_between_two_starts(tmp_path):
  """SLURM's signal comes while a node's process is not running: it is not started again."""
  for name, text in {
    "srun": "#!/bin/sh\necho ran >> $SAID\nexit 1\n",
    "scontrol": FAKE_SCONTROL,
  }.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  said = tmp_path / "said"
  environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said)}
  environment |= {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_ID": "12"}
  script = str(DOCS / "launch_slurm_elastic.sh")
  job = subprocess.Popen(["bash", script, "--workdir", "runs/a"], env=environment)
  try:
    end = time.monotonic() + 60
    while not said.exists() or said.read_text().count("ran") < 2:
      assert time.monotonic() < end
      time.sleep(0.02)
    time.sleep(0.5)  # both pause for 30 s now
    job.terminate()
    began = time.monotonic()
    job.wait(60)
    assert time.monotonic() - began < 15, "the signal ends the pause"
  finally:
    job.kill()
  assert said.read_text().splitlines().count("ran") == 2
