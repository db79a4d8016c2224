"""Other architectures from released weights: what stays, what begins how, and the first loss."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from scmoe.base.errors import ConfigError
from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.models.flops import forward_flops
from scmoe.models.gpt import GPT, Pass
from scmoe.parallel.mesh import MeshConfig
from scmoe.pretrained.families import read_config
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.names import tensors
from scmoe.pretrained.released import open_released
from scmoe.pretrained.stream import flat, leaves_of, nested
from scmoe.pretrained.upcycle import fill, plan
from scmoe.run import build, placement
from scmoe.run.config import RunConfig
from scmoe.run.opened import open_run
from scmoe.training.restore import restore_stored

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released"
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 9), np.int32)


def dense_model(folder):
  """A small llama with random weights."""
  config = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 128, "hidden_act": "silu",
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
  }  # fmt: skip
  family, model, router = read_config(config)
  draw = np.random.default_rng(1).normal
  listed = tensors(family, model, router)
  weights = {t.name: draw(size=t.shape).astype(np.float32) * 0.2 for t in listed}
  folder.mkdir()
  save_file(weights, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(config))
  return folder


def logits_of(built, leaves):
  params = nested(leaves, {"params": built.shapes})["params"]
  model: GPT = nnx.merge(built.graph, jax.tree.map(lambda x: x.astype(jnp.float32), params))
  out = jax.jit(lambda model: model.logits(model(TOKENS, Pass(no_drop=True)).h_BSD))(model)
  return np.asarray(out)


def upcycled(path, text):
  released = open_released(str(path), mesh="data=1")
  source, run = dict(released.leaves()), released.built.run
  planned = plan(text, run.model, run.router)
  built = build.build(
    open_resolved(run, planned.model, planned.router), list(released.built.mesh.devices.flat)
  )
  fresh = lambda: flat(dict(zip(("params", "router"), built.init(jax.random.key(0)))))
  leaves, begun = fill(source, leaves_of(built), fresh, planned)
  return released.built, source, built, leaves, begun


def open_resolved(run, model, router):
  changed = dataclasses.replace(run, model=model, router=router)
  return changed.resolve(num_devices=1, vocab_size=0)


@pytest.mark.parametrize("text", ["experts=4", "experts=4,wiring=scmoe_pos2,top_k=1"])
def test_experts_of_a_dense_model_are_the_same_function_at_first(text, tmp_path):
  before, source, built, leaves, begun = upcycled(dense_model(tmp_path / "m"), text)
  with jax.default_matmul_precision("highest"):
    np.testing.assert_allclose(
      logits_of(built, leaves), logits_of(before, source), rtol=1e-4, atol=1e-4
    )
  up = leaves["params.stages.moe.experts.up"]
  np.testing.assert_array_equal(up[:, 3], source["params.stages.units.0.blocks.0.mlp.up"])
  assert begun["params.stages.moe.router_gate.0.weight"] == "random"


def test_a_shortcut_model_keeps_attention_and_every_moe_moves_on(tmp_path):
  said = import_model(str(GOLDEN / "olmoe_a"), tmp_path / "run", upcycle="wiring=scmoe_pos2")
  new = [line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  stages")]
  mlp = "stages.units.0.blocks.0.mlp."
  names, moe = ("up", "gate", "down"), "stages.moe."
  assert set(new) == {f"{mlp}{n}" for n in names} | {f"{moe}experts.{n}" for n in names} | {
    "stages.units.0.own_norm.scale", f"{moe}router_gate.0.weight"}  # fmt: skip
  stored = open_run(str(tmp_path / "run"), None)
  assert (stored.run.model.wiring, stored.run.model.shortcut_norm) == ("scmoe_pos2", "own")
  built = build.build(placement.on_mesh(stored.run, "data=1"))
  leaves = restore_stored(tmp_path / "run", leaves_of(built), 0)
  source = dict(open_released(str(GOLDEN / "olmoe_a"), mesh="data=1").leaves())
  for name, leaf in source.items():
    if moe not in name:
      np.testing.assert_array_equal(leaves[name], leaf)
      continue
    np.testing.assert_array_equal(leaves[name][1:], leaf[:-1])
    silent = name.endswith("experts.down")
    np.testing.assert_array_equal(leaves[name][0], leaf[0] * (not silent))
  assert not np.asarray(leaves[f"params.{mlp}down"]).any()
  norm = source["params.stages.units.0.blocks.0.norm_mlp.scale"]
  own = leaves["params.stages.units.0.own_norm.scale"]
  np.testing.assert_array_equal(own, jnp.concatenate([norm[:1], norm[:-1]]))
  assert np.isfinite(logits_of(built, leaves)).all()


def test_only_what_the_experts_read_has_moved():
  """If the experts read the current value again, the source's logits come back bit for bit."""
  before, source, built, leaves, _ = upcycled(GOLDEN / "olmoe_a", "wiring=shared_expert")
  np.testing.assert_array_equal(logits_of(built, leaves), logits_of(before, source))


def test_farskip_keeps_every_weight():
  """The start of FarSkip's conversion: the source's weights, and a shared expert that adds 0."""
  before, source, built, leaves, _ = upcycled(GOLDEN / "olmoe_a", "wiring=farskip")
  for name, value in source.items():
    np.testing.assert_array_equal(leaves[name], value, err_msg=name)
  own = leaves["params.stages.units.0.own_norm.scale"]
  np.testing.assert_array_equal(own, source["params.stages.units.0.blocks.0.norm_mlp.scale"])
  assert not np.asarray(leaves["params.stages.units.0.blocks.0.mlp.down"]).any()
  got = logits_of(built, leaves)
  assert np.isfinite(got).all()
  assert not np.allclose(got, logits_of(before, source), atol=1e-3)


def test_farskip_without_a_shared_expert_has_the_same_parameters():
  before, source, built, leaves, begun = upcycled(GOLDEN / "olmoe_a", "wiring=farskip_routed")
  assert leaves.keys() == source.keys()
  assert not begun
  for name, value in source.items():
    np.testing.assert_array_equal(leaves[name], value, err_msg=name)
  got = logits_of(built, leaves)
  assert np.isfinite(got).all()
  assert not np.allclose(got, logits_of(before, source), atol=1e-3)
  flops = [forward_flops(b.run.model, 64) for b in (before, built)]
  assert flops[0] == flops[1]


@pytest.mark.parametrize(("text", "message"), [
  ("wiring=dense", "wiring='dense' is not supported; one of: top1"),
  ("experts=8", "has experts already: leave experts"),
  ("experts=x", "experts='x' is not a number of experts"),
  ("experts=" + "9" * 5000, "is not a number of experts"),
  ("wiring=farskip,wiring=topk", "has 'wiring=topk'; write KEY=VALUE, each KEY once"),
  ("layers=3", "has 'layers=3'; write KEY=VALUE, each KEY once, with a KEY of: "),
  ("wiring", "has 'wiring'; write KEY=VALUE"),
])  # fmt: skip
def test_what_cannot_be_upcycled(text, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    import_model(str(GOLDEN / "olmoe_a"), tmp_path / "run", upcycle=text)
  assert not (tmp_path / "run").exists()


def started(model, request):
  """Parameters of a random source and of the start that a request makes of it, by dotted name."""
  source = build.build(run_of_model(model))
  draw = np.random.default_rng(0).normal
  leaves = {
    name: jax.device_put(draw(size=x.shape).astype(x.dtype), x.sharding)
    for name, x in leaves_of(source).items()
  }
  planned = plan(request, source.run.model, source.run.router)
  built = build.build(open_resolved(source.run, planned.model, planned.router))
  fresh = lambda: flat(dict(zip(("params", "router"), built.init(jax.random.key(0)))))
  return leaves, *fill(leaves, leaves_of(built), fresh, planned)


def run_of_model(model):
  sizes = {"width": 16, "num_heads": 2, "num_layers": 4, "num_experts": 4, "context": 32,
           "vocab_size": 64, "mlp_hidden": 24, "dtype": "float32"}  # fmt: skip
  run = RunConfig(
    name="source",
    model=ModelConfig(**{**sizes, **model}),
    mesh=MeshConfig(data=1, expert=1),
    data=DataConfig(seq_len=32, document_mask=False),
  )
  return run.resolve(num_devices=1, vocab_size=64)


@pytest.mark.parametrize(
  ("wiring", "moe_every", "first"),
  [("scmoe_pos2", 1, "blocks.0.norm_attention"), ("scmoe_pos2_l0", 2, "blocks.1.norm_attention")],
)
def test_the_first_units_shortcut_copies_the_norm_of_its_own_tap(wiring, moe_every, first):
  model = {"wiring": wiring, "moe_every": moe_every, "style": "llama", "shortcut_norm": "shared"}
  source, leaves, _ = started(model, "wiring=farskip")
  unit = "params.stages.units.0."
  own = np.asarray(leaves[f"{unit}own_norm.scale"])
  norm = np.asarray(source[f"{unit}blocks.0.norm_mlp.scale"])
  np.testing.assert_array_equal(own[0], source[f"{unit}{first}.scale"][0])
  np.testing.assert_array_equal(own[1:], norm[:-1] if moe_every == 1 else norm[1:])


def test_biases_of_experts_that_the_dense_model_lacks_begin_at_zero():
  model = {"wiring": "dense", "style": "llama", "expert_bias": True}
  _, leaves, begun = started(model, "experts=4,top_k=2")
  name = "params.stages.moe.experts.up_bias"
  assert not np.asarray(leaves[name]).any()
  assert begun[name] == "zeros: the layer's MLP has no such bias"


def test_a_shared_expert_has_to_stay(tmp_path):
  with pytest.raises(ConfigError, match="has no place for the shared expert of the source"):
    import_model(str(GOLDEN / "deepseek_v3_a"), tmp_path / "run", upcycle="wiring=topk")
