"""Zero experts in training: the controller holds their share, and a stopped run is the same run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.base.errors import Preempted
from scmoe.models.flops import forward_flops
from scmoe.moe.losses import init_bias, router_sums, statistics, update_bias
from scmoe.moe.options import RouterConfig
from scmoe.moe.route import route
from scmoe.run.build import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.train import train
from scmoe.training.metrics import read_metrics
from scmoe.training.restore import restore_part

EXPERTS, ZERO, K = 8, 4, 3


@pytest.mark.parametrize("real", [0.0, 1.2, 2.6])
def test_the_controller_holds_the_share(real):
  """Within 2 %, from a router that likes zero experts, for tokens of changing batches."""
  config = RouterConfig(
    normalise=False, bias="pid", bias_rate=0.06, bias_proportional=0.1, real_experts=real
  )
  rng = np.random.default_rng(0)
  gate = jnp.asarray(rng.normal(size=(16, EXPERTS + ZERO)) * 0.2, jnp.float32)
  lean = jnp.asarray([0.0] * EXPERTS + [0.5] * ZERO)

  def step(state, key):
    x = jax.random.normal(key, (512, 16))
    given = {"k": K, "zero_experts": ZERO, "bias_E": state["bias"][0]}
    routing = route(x, lambda x: x @ gate + lean, config, **given)
    sums = router_sums(routing, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))
    sums = jax.tree.map(lambda a: a[None], sums)
    return update_bias(state, sums, config), statistics(sums)

  start = init_bias(1, EXPERTS + ZERO, config)
  keys = jax.random.split(jax.random.key(0), 300)
  state, stats = jax.jit(lambda s: jax.lax.scan(step, s, keys))(start)
  target = 1 - (real or K * EXPERTS / (EXPERTS + ZERO)) / K
  shares = np.asarray(stats["zero_share"])[:, 0]
  assert abs(shares[0] - target) > 0.05
  assert np.abs(shares[-50:] - target).mean() < 0.02
  np.testing.assert_array_equal(state["bias"][0, EXPERTS:], 0)
  np.testing.assert_allclose(stats["real_experts"][:, 0], K * (1 - shares), rtol=1e-5)


def smoke(**fields):
  run = load_config(find_config("longcat_flash_small"), "smoke")
  fields = {"mesh.data": "1", "mesh.expert": "2", "train.steps": "4", "top_k": "2"} | fields
  fields |= {"train.sample_tokens": "0", "train.tensorboard": "false"}
  fields |= {"data.validation_fraction": "0"}  # an evaluation is a program of its own
  for path, text in fields.items():
    run = with_field(run, path if "." in path else f"model.{path}", text)
  return run


@pytest.mark.nightly  # by day test_balancing_bias.py resumes the controller
def test_a_stopped_longcat_run_goes_on_bitwise(tmp_path):
  whole = train(smoke(), tmp_path / "whole")
  with pytest.raises(Preempted):
    train(smoke(**{"train.stop_after": "2"}), tmp_path / "stopped")
  train(smoke(), tmp_path / "stopped")
  resolved = smoke().resolve(num_devices=jax.device_count(), vocab_size=257)
  built = build(resolved)
  wanted = {"params": built.shapes, "router": built.router_shapes}
  again = restore_part(tmp_path / "stopped", wanted, 4)
  same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  jax.tree.map(same, again, {"params": whole.params, "router": whole.router})
  assert set(again["router"]) == {"bias", "error", "error_before"}
  figures = read_metrics(tmp_path / "whole")[-1]
  assert figures["real_experts"] == pytest.approx(2 * (1 - figures["zero_share"]), rel=1e-5)
  assert np.isfinite(figures["loss"])


def test_a_share_is_aimed_at_by_a_balancing_bias_alone():
  """Four experts of eight compute, unless `router.real_experts` says otherwise, and K is 2."""
  share = lambda **fields: build(smoke(**fields).resolve(num_devices=8, vocab_size=257)).aimed_share
  assert share() == 0.5
  assert share(**{"router.real_experts": "0.5"}) == 0.25
  none = {"router.bias": "none", "router.bias_rate": "0.001", "router.bias_proportional": "0"}
  assert share(**none) is None
  assert share(zero_experts="0") is None


def test_flops_count_what_is_computed():
  model = smoke().resolve(num_devices=8, vocab_size=257).model
  none = dataclasses.replace(model, zero_experts=0)
  every = forward_flops(none, 16)
  assert forward_flops(model, 16, 1.0).routed == every.routed
  assert forward_flops(model, 16, 0.25).routed == every.routed / 4
  assert forward_flops(model, 16).routed == every.routed / 2  # four of each
  built = build(smoke().resolve(num_devices=8, vocab_size=257))
  per_expert = built.flops_per_token({"real_experts": 2.0}) - built.flops_per_token(
    {"real_experts": 1.0}
  )
  assert per_expert == pytest.approx(3 * every.routed / 2)
