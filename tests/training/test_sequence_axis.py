"""A step whose devices divide each row's tokens is the step of devices with whole rows."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from drawn import drawn, drawn_init
from jax.sharding import PartitionSpec as P
from tiny_models import LONGCAT_FIELDS

import scmoe.evaluate
from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.inference.decode import generate
from scmoe.inference.evaluation import evaluate
from scmoe.models.config import ModelConfig
from scmoe.models.gradient_sums import accumulate
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.gradients import global_norm
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run
from scmoe.run.opened import Stored
from scmoe.run.traffic import lines
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.options import CheckpointConfig, TrainConfig
from scmoe.training.step import init_state

LENGTH, ROWS = 16, 4
SMALL = ModelConfig(
  wiring="dense",
  num_layers=2,
  width=16,
  num_heads=4,
  mlp_hidden=24,
  num_experts=4,
  vocab_size=64,
  context=LENGTH,
  dtype="float32",
)
LLAMA = {"style": "llama", "tie_embeddings": False}
MODELS = {
  # rotary positions, two heads of keys for four of queries, a window over documents
  "dense": dataclasses.replace(
    SMALL, **LLAMA, num_kv_heads=2, sliding_window=5, document_mask=True
  ),
  "top2": dataclasses.replace(SMALL, wiring="top2", document_mask=True),  # learned positions
  "pos2": dataclasses.replace(
    SMALL, **LLAMA, wiring="scmoe_pos2", top_k=1, num_layers=4, num_kv_heads=2, document_mask=False
  ),
  "latent": dataclasses.replace(
    SMALL, **{**LONGCAT_FIELDS, "v_head_dim": 6, "document_mask": True}
  ),
}
ROUTER = RouterConfig(balance_loss=0.5, z_loss=0.1, noise=1.0)
WHOLE = MeshConfig(1, 1, 1)


def batch_of(microbatches):
  """Rows of several documents, the last with padding; some tokens do not count."""
  numbers = np.random.default_rng(0)
  shape = (microbatches, ROWS // microbatches, LENGTH)
  tokens = numbers.integers(0, 64, (*shape[:2], LENGTH + 1)).astype(np.int32)
  begins = (numbers.random(shape) < 0.2).astype(np.int32)
  begins[..., 0] = 1
  segments = begins.cumsum(-1).astype(np.int32)
  first = np.maximum.accumulate(np.where(begins, np.arange(LENGTH), 0), -1)
  positions = (np.arange(LENGTH) - first).astype(np.int32)
  weights = (numbers.random(shape) < 0.8).astype(np.float32)
  segments[-1, -1, -3:], weights[-1, -1, -3:] = 0, 0
  return Batch(tokens[..., :-1], tokens[..., 1:], weights, segments, positions)


@functools.cache
def built(mesh, name, microbatches=1, remat="none"):
  run = RunConfig(
    model=MODELS[name],
    router=ROUTER,
    dispatch=DispatchConfig(transport="dropless"),
    mesh=mesh,
    train=TrainConfig(
      batch_size=ROWS // microbatches, tokens_per_step=ROWS * LENGTH, remat=remat, steps=8
    ),
  )
  run = dataclasses.replace(
    run, data=dataclasses.replace(run.data, seq_len=LENGTH, document_mask=True)
  )
  run = run.resolve(num_devices=mesh.size, vocab_size=64)
  return build(run, jax.devices()[: mesh.size])


@functools.cache
def program(mesh, name, microbatches=1, remat="none"):
  """From parameters and a batch: loss, gradients' norm, gradients, all logged values of a step."""
  own = built(mesh, name, microbatches, remat)
  shares = own.optimizer.shares
  out = own.specs if shares is None else shares.share_specs

  def local(params, batch):
    read = params if shares is None else shares.to_read(params)
    key = jax.random.key(3)
    loss, grads, aux = accumulate(own.objective, read, {}, batch, key, own.specs, shares=shares)
    scalars, arrays = own.objective.metrics(aux)
    arrays.pop("rounds", None)  # of an exchange: they follow from how many rows a device sends
    return loss, global_norm(grads, out), grads, (scalars, arrays)

  stored = out if mesh.shard_state == "parameters" else own.specs
  return jax.jit(manual(local, own.mesh, (stored, P(None, BATCH_AXES)), (P(), P(), out, P())))


@functools.cache
def gradients(mesh, name, microbatches=1, remat="none"):
  """Runs `program` with parameters that depend on the model alone; its values come to the host."""
  params = drawn(built(mesh, name, microbatches, remat).shapes, 0.3)
  return jax.device_get(program(mesh, name, microbatches, remat)(params, batch_of(microbatches)))


@functools.cache
def rounding(name):
  """Moves each parameter to one of its neighbours in float32, and says how each gradient changes.

  Returns:
    A tree like the gradients: the largest change of any element of the leaf, of three draws. A
    norm of an embedding whose row is short amplifies what was rounded before it, so this differs
    by model: up to 0.2e-6 for `top2`'s embedding, up to 7e-6 for `pos2`'s. A token that does not
    count changes each leaf by 18,000 times as much or more.
  """
  numbers, batch, want = np.random.default_rng(1), batch_of(1), gradients(WHOLE, name)[2]

  def neighbour(leaf):
    side = np.where(numbers.random(leaf.shape) < 0.5, -np.inf, np.inf)
    return np.nextafter(leaf, side.astype(leaf.dtype))

  def change():
    moved = jax.tree.map(neighbour, drawn(built(WHOLE, name).shapes, 0.3))
    got = jax.device_get(program(WHOLE, name)(moved, batch)[2])
    return jax.tree.map(lambda a, b: np.abs(a - b).max(), got, want)

  return jax.tree.map(lambda *changes: max(changes), *(change() for _ in range(3)))


def assert_same(got, name, rtol=1e-6):
  want = gradients(WHOLE, name)
  for scalar, a, b in zip(("loss", "norm"), got, want):
    np.testing.assert_allclose(a, b, rtol=rtol, err_msg=scalar)

  def assert_close(path, a, b, room):
    path = jax.tree_util.keystr(path)
    if "mutual_information" in path:
      room += rtol * np.log(4)  # it is a difference of two entropies of up to log(4 experts)
    atol = rtol * np.abs(b).max() + room
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=path)

  def gradient_is_close(path, a, b, change):
    assert_close(path, a, b, max(0.1 * rtol * want[1], change))

  jax.tree_util.tree_map_with_path(gradient_is_close, got[2], want[2], rounding(name))
  jax.tree_util.tree_map_with_path(lambda *leaf: assert_close(*leaf, 0), got[3], want[3])


def divided(way, parts=2, **axes):
  return MeshConfig(**({"data": 1} | axes), sequence=parts, sequence_attention=way)


NOW = [("ring", "top2"), ("heads", "dense")]
OTHERS = [(way, name) for way in ("ring", "heads") for name in MODELS if (way, name) not in NOW]


@pytest.mark.parametrize(
  ("way", "name"),
  NOW + [pytest.param(*other, marks=pytest.mark.nightly) for other in OTHERS],
)
def test_loss_gradients_and_logged_values_are_those_of_whole_rows(way, name):
  expert = 1 if name == "dense" else 2
  assert_same(gradients(divided(way, expert=expert), name), name)


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("mesh", "microbatches", "remat"),
  [
    (divided("ring", data=2), 2, "full"),
    (divided("ring", data=2, shard_state="parameters"), 1, "none"),
    (divided("heads", tensor=2), 1, "none"),
  ],
  ids=["accumulation", "shared state", "tensor"],
)
def test_other_ways_to_divide_go_with_it(mesh, microbatches, remat):
  assert_same(gradients(mesh, "dense", microbatches, remat), "dense")


def test_evaluation_counts_what_it_counts_of_whole_rows():
  class Validation:
    domains = ("text",)

    class tokenizer:
      token_bytes = staticmethod(lambda: np.arange(64))

    @staticmethod
    def validation(max_batches):
      own = jax.tree.map(lambda x: x[0], batch_of(1))
      return [dataclasses.replace(own, domain=np.zeros(ROWS, np.int32))]

  found = []
  for mesh in (WHOLE, divided("ring", expert=2)):
    own = built(mesh, "top2")
    params = jax.device_put(drawn(own.shapes, 0.3), own.shardings[0])
    found.append(evaluate(own.model(params), Validation, mesh=own.mesh))
  assert found[0]["tokens"] == found[1]["tokens"] > 0
  for name in ("loss", "bits_per_byte", "accuracy", "drop"):
    np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-6)


def test_evaluation_on_another_mesh_refuses_rows_that_it_cannot_divide(monkeypatch):
  """The stored run had whole rows; two devices of a ring would read 16 of the 18 tokens of each."""
  own = built(WHOLE, "dense").run
  own = dataclasses.replace(own, data=dataclasses.replace(own.data, seq_len=18))
  monkeypatch.setattr(scmoe.evaluate, "open_run", lambda *args: Stored(own, 1, {}))
  with pytest.raises(ConfigError, match=r"data.seq_len=18 is no multiple of 4.*use 20"):
    scmoe.evaluate.evaluate_run("runs/a", mesh="sequence=2")


@pytest.mark.nightly  # by day test_decode.py writes on a mesh
def test_devices_that_divide_rows_in_training_take_rows_of_their_own_to_write():
  texts = []
  for mesh in (WHOLE, divided("ring")):
    own = built(mesh, "dense")
    params = jax.device_put(drawn(own.shapes, 0.3), own.shardings[0])
    prompts = [[1, 2, 3], [5, 8, 13, 21, 34]]
    texts.append(generate(own.model(params), prompts, max_new_tokens=4, mesh=own.mesh))
  assert texts[0] == texts[1]


def test_a_checkpoint_loads_on_a_mesh_that_divides_rows_and_on_others_bit_for_bit(tmp_path):
  abstracts = [built(mesh, "dense").abstract_state() for mesh in (divided("ring"), WHOLE)]
  own = built(divided("ring"), "dense")
  state = init_state(drawn_init(own), own.optimizer, 0, abstracts[0])
  Checkpointer(tmp_path, CheckpointConfig()).save_now(3, state.for_checkpoint(), {}, {})
  for abstract in (
    *abstracts,
    built(divided("heads", expert=1, tensor=2), "dense").abstract_state(),
  ):
    reader = Checkpointer(tmp_path, CheckpointConfig())
    read = reader.restore_latest_valid(abstract.for_checkpoint())
    got = read.state.like(abstract).placed(abstract)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
      np.testing.assert_array_equal(a, b)


def resolved(mesh, **changed):
  fields = {"model": MODELS["dense"], "mesh": mesh, "train": TrainConfig(batch_size=2)} | changed
  run = RunConfig(**fields)
  run = dataclasses.replace(
    run, data=dataclasses.replace(run.data, seq_len=LENGTH, document_mask=True)
  )
  return run.resolve(num_devices=mesh.size, vocab_size=64)


def test_the_dry_run_divides_activations():
  one, two = (dry_run(resolved(mesh)) for mesh in (WHOLE, divided("ring")))
  assert two.memory.parameters == one.memory.parameters
  assert two.memory.activations <= one.memory.activations // 2
  # Two layers, two rows of 8 tokens, 2 heads of keys of width 4, keys and values, float32: forward
  # once, and backward once more with their gradients; a block of the ring also has its places.
  sent = 2 * (2 * 8 * 2 * 4) * 2 * 4
  assert 3 * sent <= two.traffic.sequence < 3.3 * sent
  heads = dry_run(resolved(divided("heads")))
  # Queries and results of 4 heads, keys and values of 2; half of each stays; the gradients again.
  assert heads.traffic.sequence == 2 * 2 * (2 * 8 * 12 * 4 * 4) // 2
  assert any("attention (heads)" in line for line in lines(heads.traffic, heads.run.mesh))
  assert heads.run.mesh.words == "data 1 x expert 1 x tensor 1 x sequence 2"


@pytest.mark.parametrize(
  ("length", "mesh", "words"),
  [
    (18, divided("ring"), r"data.seq_len=18 is no multiple of 4.*mesh.sequence=2.*ring.*use 20"),
    (15, divided("heads"), r"data.seq_len=15 is no multiple of 2.*mesh.sequence=2.*use 16"),
    (16, divided("heads", 8), r"model.num_heads=4 .*mesh.sequence=8.*mesh.sequence_attention=ring"),
  ],
)  # fmt: skip
def test_rows_and_heads_that_do_not_divide_are_refused(length, mesh, words):
  run = RunConfig(model=dataclasses.replace(MODELS["dense"], context=32), mesh=mesh)
  run = dataclasses.replace(
    run, data=dataclasses.replace(run.data, seq_len=length, document_mask=True)
  )
  with pytest.raises(ConfigError, match=words):
    run.resolve(num_devices=mesh.size, vocab_size=64)


@pytest.mark.parametrize(
  ("name", "words"),
  [("shapes_vit", r"mesh.sequence=2 .*model.architecture='vit'"),
   ("preference_small", r"mesh.sequence=2 .*data.source='preference'")],
)  # fmt: skip
def test_images_and_preferences_are_refused(name, words):
  run = load_config(find_config(name), "smoke")
  run = dataclasses.replace(run, mesh=divided("ring"))
  with pytest.raises(ConfigError, match=words):
    run.resolve(num_devices=2, vocab_size=512)


def test_the_mesh_counts_the_axis():
  mesh = divided("heads", 4, data=-1)
  with pytest.raises(ConfigError, match=r"mesh.sequence=4 = 4 does not divide the 6 devices"):
    mesh.resolve(6)
  found = mesh.resolve(8)
  assert (found.data, found.size, found.batch_shards, found.token_shards) == (2, 8, 2, 8)
  assert dict(make_mesh(found).shape) == {
    "data": 2, "expert": 1, "shard": 1, "sequence_ring": 1, "sequence_heads": 4, "tensor": 1
  }  # fmt: skip
