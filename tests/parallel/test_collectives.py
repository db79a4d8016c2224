"""All-to-alls by copy engines: what is asked for, and what becomes of an earlier environment."""

import pytest

from scmoe.base.errors import ConfigError
from scmoe.parallel import collectives
from scmoe.parallel.collectives import COPY_ENGINE_FLAG, request_copy_engines


@pytest.fixture
def new_jax(monkeypatch):
  monkeypatch.setattr(collectives, "jax_version", lambda: (0, 11, 2))


def test_flag_and_policy_join_what_is_there(new_jax):
  environment = {"XLA_FLAGS": "--xla_dump_to=here"}
  request_copy_engines(environment)
  assert environment["XLA_FLAGS"] == f"--xla_dump_to=here {COPY_ENGINE_FLAG}"
  assert environment["NCCL_CTA_POLICY"] == "2"


def test_asking_twice_changes_nothing(new_jax):
  environment = {}
  request_copy_engines(environment)
  once = dict(environment)
  request_copy_engines(environment)
  assert environment == once


def test_a_policy_of_the_users_own_stays(new_jax):
  environment = {"NCCL_CTA_POLICY": "0"}
  request_copy_engines(environment)
  assert environment["NCCL_CTA_POLICY"] == "0"


def test_an_old_jax_would_abort_at_the_flag(monkeypatch):
  monkeypatch.setattr(collectives, "jax_version", lambda: (0, 10, 2))
  environment = {}
  with pytest.raises(ConfigError, match=r"overlap\.copy_engines=True needs jax 0\.11"):
    request_copy_engines(environment)
  assert not environment
