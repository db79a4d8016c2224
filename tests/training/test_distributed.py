"""How the processes of a run are found, without starting any."""

import jax
import pytest

from scmoe.base.errors import ConfigError
from scmoe.training.distributed import Cluster, find_cluster, lost_peer
from scmoe.training.options import DistributedConfig

SLURM = {
  "SLURM_NTASKS": "4",
  "SLURM_PROCID": "2",
  "SLURM_JOB_ID": "8193",
  "SLURM_STEP_NODELIST": "gpu[007-008,020],login1",
  "SLURM_STEP_NUM_NODES": "2",
}
OURS = {
  "SCMOE_COORDINATOR": "node1:29500",
  "SCMOE_NUM_PROCESSES": "2",
  "SCMOE_PROCESS_ID": "1",
}


@pytest.mark.parametrize(
  ("cfg", "environment", "expected"),
  [
    ({}, {}, None),
    ({}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, None),
    ({}, SLURM, Cluster("gpu007:57345", 4, 2)),
    # A batch script, which is no step.
    ({}, {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NODELIST": "a[1-2]"}, None),
    ({}, SLURM | {"SLURM_STEP_NUM_NODES": "1"}, Cluster("127.0.0.1:57345", 4, 2)),
    ({}, SLURM | {"SLURM_STEP_NODELIST": "a1,b2"}, Cluster("a1:57345", 4, 2)),
    ({}, OURS, Cluster("node1:29500", 2, 1)),
    ({"process_id": 0}, OURS, Cluster("node1:29500", 2, 0)),
    ({"coordinator": "10.0.0.1:80"}, SLURM, Cluster("10.0.0.1:80", 4, 2)),
  ],
)
def test_found_in_configuration_environment_or_slurm(cfg, environment, expected):
  assert find_cluster(DistributedConfig(**cfg), environment) == expected


@pytest.mark.parametrize(
  ("cfg", "environment", "message"),
  [
    ({"coordinator": "node1"}, {}, r"coordinator='node1' is not host:port"),
    ({"coordinator": "node1:1", "num_processes": 0}, {}, "without a number of processes"),
    ({"num_processes": 2, "process_id": 0}, {}, r"coordinator='' is not host:port"),
    ({"coordinator": "a:1", "num_processes": 2}, {}, "process_id=-1 is not a process of 2"),
    ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, {}, "use 0 to 1"),
    ({}, OURS | {"SCMOE_PROCESS_ID": "one"}, "SCMOE_PROCESS_ID='one' is not a number"),
    ({"process_id": 3}, {}, "process_id=3 without other processes; set distributed.coordinator"),
    ({}, {"SCMOE_NUM_PROCESSES": "1", "SCMOE_PROCESS_ID": "3"}, "process_id=3 without other"),
    ({"heartbeat_seconds": 0}, {}, r"distributed\.heartbeat_seconds=0 is too small"),
  ],
)
def test_errors_name_the_field(cfg, environment, message):
  with pytest.raises(ConfigError, match=message):
    find_cluster(DistributedConfig(**cfg), environment)


@pytest.mark.parametrize(
  ("processes", "said", "lost"),
  [
    (2, "UNKNOWN: Gloo all-reduce failed: Connection closed by peer", True),
    (2, "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited", True),
    (2, "INTERNAL: NCCL operation ncclCommInitRank failed: Cuda failure 'out of memory'", False),
    (2, "INTERNAL: Mosaic failed", False),
    (1, "UNKNOWN: Gloo all-reduce failed: Connection closed by peer", False),
  ],
)
def test_a_collective_that_breaks_off_means_a_lost_process(monkeypatch, processes, said, lost):
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  found = lost_peer(jax.errors.JaxRuntimeError(said))
  assert (found is not None) == lost
  if found is not None:
    assert said in str(found)
    assert found.code == 86
