"""Experts in another order, and fewer of them: the same function, every way out, and refusals."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import leaving
import numpy as np
import pytest
from adapting import ALPHA, RANK, adapt
from covering import night
from flax import nnx
from leaving import run_of, write_run

from scmoe import convert, evaluate, train
from scmoe.base.errors import CheckpointError, ConfigError, DataError
from scmoe.inference.placement.devices import order_of
from scmoe.models.gpt import Pass
from scmoe.models.low_rank import Adapters, LoraConfig
from scmoe.models.matrices import MATRICES
from scmoe.moe.gates import arrays_of_experts
from scmoe.parallel.mesh import MeshConfig
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.inference import InferenceFolder
from scmoe.pretrained.requests import smaller
from scmoe.pretrained.stream import flat, leaves_of, nested
from scmoe.pretrained.taken import gate_norms
from scmoe.pretrained.taken import take as take_arrays
from scmoe.run import placement
from scmoe.run.adapters import BASE
from scmoe.run.build import build
from scmoe.run.modality import modality_of
from scmoe.run.opened import open_run
from scmoe.run.rearranged import PLACED, PRUNED, Source, best, choices_of
from scmoe.training.restore import restore_part, restore_stored

TOKENS = np.random.default_rng(0).integers(0, leaving.VOCAB, (2, 24), np.int32)


def random_leaves(built):
  """Random values for all parameters and biases of a model, by dotted name."""
  draw = np.random.default_rng(0).normal
  shapes = leaves_of(built)
  named = lambda n, x: np.full(x.shape, 1, x.dtype) if not x.shape else (
    0.3 * draw(size=x.shape) + ("norm" in n)).astype(x.dtype)  # fmt: skip
  return {name: jax.device_put(named(name, x), x.sharding) for name, x in shapes.items()}


@functools.cache
def logits_program(graph):
  def run(params, router):
    model = nnx.merge(graph, params)
    return model.logits(model(TOKENS, Pass(no_drop=True, router=router)).h_BSD)

  return jax.jit(run)


def logits(built, leaves):
  """float32 logits of TOKENS; nothing is dropped."""
  like = {"params": built.shapes} | ({"router": built.router_shapes} if built.router_shapes else {})
  state = nested(leaves, like)
  with jax.default_matmul_precision("highest"):
    return np.asarray(logits_program(built.graph)(state["params"], state.get("router")))


def take(leaves, index_LE, zero_experts, built):
  arrays = arrays_of_experts(built.run.router.gate)
  return take_arrays(leaves, index_LE, zero_experts, leaves_of(built), arrays)


# A bias and its controller with zero experts, groups, a gate of cosines, and two gatings.
@pytest.mark.parametrize("name", ["a controller's bias", "groups", "cosine gate",
                                  "dgmoe, dense layers"])  # fmt: skip
def test_another_order_is_the_same_function(name):
  built = build(run_of(name))
  leaves, model = random_leaves(built), built.run.model
  groups = built.run.router.n_group
  rng = np.random.default_rng(1)
  by_group = [rng.permutation(groups).repeat(8 // groups) for _ in range(model.num_pairs)]
  order_LE = order_of(np.stack(by_group)) if groups > 1 else np.stack(
    [rng.permutation(8) for _ in range(model.num_pairs)])  # fmt: skip
  placed = take(leaves, order_LE, model.zero_experts, built)
  moved = {n for n in leaves if not np.array_equal(leaves[n], placed[n])}
  assert moved
  assert all(".moe." in n or n.startswith("router.") for n in moved)
  np.testing.assert_allclose(logits(built, placed), logits(built, leaves), rtol=2e-5, atol=2e-5)
  back = take(placed, np.argsort(order_LE, -1), model.zero_experts, built)
  for leaf, value in leaves.items():
    np.testing.assert_array_equal(back[leaf], value, leaf)


def test_fewer_experts_are_the_model_with_a_mask():
  """Experts whose logits are -1e9 get weight 0 and no choice: the smaller model's function."""
  built = build(run_of("affine gate"))
  leaves = random_leaves(built)
  kept_LE = np.stack([[0, 2, 3, 7], [1, 4, 5, 6]])
  less = build(smaller(built.run, "4"))
  masked, bias = dict(leaves), "params.stages.moe.router_gate.0.bias"
  gone_LE = np.ones((2, 8), bool)
  np.put_along_axis(gone_LE, kept_LE, False, 1)
  masked[bias] = jnp.where(gone_LE, -1e9, leaves[bias])
  kept = take(leaves, kept_LE, 0, less)
  want = logits(built, masked)
  np.testing.assert_allclose(logits(less, kept), want, rtol=2e-5, atol=2e-5)
  assert not np.allclose(want, logits(built, leaves), atol=1e-2)
  for name, value in leaves.items():
    if ".moe." not in name:
      np.testing.assert_array_equal(kept[name], value, name)


def test_a_share_gives_a_number_of_experts():
  run = run_of("top1 gpt2")
  run = dataclasses.replace(run, model=dataclasses.replace(run.model, num_experts=100))
  assert [smaller(run, keep).model.num_experts for keep in ("0.07", "0.29", ".5", "7")] == [
    7, 29, 50, 7]  # fmt: skip


def test_scores_and_what_they_keep():
  worth_LE = np.array([[3.0, 1, 2, 2], [0, 0, 0, 1]])
  np.testing.assert_array_equal(best(worth_LE, 2), [[0, 2], [0, 3]])
  np.testing.assert_array_equal(best(worth_LE, 2, groups=2), [[0, 2], [0, 3]])
  np.testing.assert_array_equal(best(np.array([[9.0, 8, 1, 2]]), 2, groups=2), [[0, 3]])
  weight = np.zeros((1, 2, 3))
  weight[0, :, 0], weight[0, :, 1] = (3, 4), (0, 2)
  gates = {"params.stages.moe.router_gate.0.weight": jnp.asarray(weight)}
  np.testing.assert_allclose(gate_norms(gates, 2), [[5, 2]])


# -- the commands ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """`a`: a run of eight experts with zero experts and biases; `t.txt`: text."""
  root = tmp_path_factory.mktemp("runs")
  for name, case in (("a", "a controller's bias"), ("groups", "groups"), ("cosine", "cosine gate"),
                     ("dense", "dense gpt2"), ("scaled", "multipliers")):  # fmt: skip
    write_run(run_of(case), root / name)
  run = run_of("topk llama", MeshConfig(data=4, expert=1))
  dropping = dataclasses.replace(run.dispatch, capacity_factor=0.5)
  write_run(dataclasses.replace(run, dispatch=dropping), root / "dropping")
  run = run_of("a controller's bias")
  kept = dataclasses.replace(run.optimizer, ema=0.5)
  write_run(dataclasses.replace(run, optimizer=kept), root / "averaged")  # weights, no average
  for file in ("released/config.json", "packed/inference.json", "bare/m-1.safetensors"):
    (root / file).parent.mkdir()
    (root / file).write_text("{}")
  words = np.random.default_rng(0).integers(97, 123, 9000, np.uint8)
  words[::7] = ord(" ")
  (root / "t.txt").write_bytes(words.tobytes())
  return root


@pytest.fixture(scope="module")
def made(root):
  """`placed`, and of it `small`: both by the command line."""
  text = ["--text", str(root / "t.txt")]
  convert.main([f"--from={root / 'a'}", f"--workdir={root / 'placed'}", *text,
                "--place=devices=4,batches=4"])  # fmt: skip
  convert.main([f"--from={root / 'placed'}", f"--workdir={root / 'small'}", *text,
                "--prune=keep=0.5,by=use,batches=2"])  # fmt: skip
  return root


def leaves_in(workdir):
  stored = open_run(str(workdir), None)
  built = build(stored.run)
  return built, restore_stored(workdir, leaves_of(built), stored.step)


def test_a_placed_run_and_what_it_says(made):
  said = json.loads((made / "placed" / PLACED).read_text())
  assert (said["by"], said["devices"], said["batches"]) == ("balance", 4, 4)
  built, placed = leaves_in(made / "placed")
  _, before = leaves_in(made / "a")
  order_LE = np.array(said["order"])
  for name, value in take(before, order_LE, 4, built).items():
    np.testing.assert_array_equal(placed[name], value, name)
  assert said["after"]["rounds"] <= said["before"]["rounds"]
  np.testing.assert_allclose(logits(built, placed), logits(built, before), rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def adapted(root):
  """A run with adapters and their average, over a base of its own."""
  write_run(run_of("topk llama"), root / "adapted" / BASE)
  return adapt(root / "adapted")


@pytest.mark.parametrize(("ema", "asked"), [
  (False, "--place=devices=4,batches=2"), night(True, "--place=devices=4,batches=2"),
  night(False, "--prune=keep=4,by=use,batches=1"), (True, "--prune=keep=4,by=random,seed=1"),
])  # fmt: skip
def test_adapters_and_averages_are_merged_before_experts_are_taken(ema, asked, adapted, root):
  """The new run holds W + alpha/r · A · B, or that of the averages, and trains no adapters."""
  new = root / f"of_adapted{asked[:4]}{ema}{len(asked)}"
  text = [] if "random" in asked else [f"--text={root / 't.txt'}"]
  convert.main([f"--from={adapted}", f"--workdir={new}", asked, *text, *["--ema"] * ema])
  said = json.loads((new / (PLACED if "place" in asked else PRUNED)).read_text())
  index_LE = np.array(said.get("order", said.get("kept")))
  built, found = leaves_in(new)
  assert built.run.lora == LoraConfig()
  _, base = leaves_in(adapted / BASE)
  run = open_run(str(adapted), None).run
  shapes = Adapters(run.lora, build(run).shapes).shapes
  part = "average" if ema else "params"
  own = flat(jax.device_get(restore_part(adapted, {part: shapes})[part]))
  for name, value in base.items():
    want = np.asarray(value)
    if (stem := f"{name.removeprefix('params.')}.lora") + "_a" in own:
      a, b = own[f"{stem}_a"], own[f"{stem}_b"]
      sides = MATRICES[name.rpartition(".")[2]]
      a = a.reshape(*want.shape[: want.ndim - sum(map(len, sides))], -1, RANK)
      change = np.einsum("...ir,...ro->...io", a, b.reshape(*a.shape[:-2], RANK, -1))
      want = want + ALPHA / RANK * change.reshape(want.shape)
    if ".experts." in name:
      want = np.stack([layer[kept] for layer, kept in zip(want, index_LE)])
    elif "router_gate" in name:
      want = np.stack([layer[..., kept] for layer, kept in zip(want, index_LE)])
    np.testing.assert_allclose(found[name], want, atol=2e-6, rtol=0, err_msg=name)


def test_gates_that_adapters_leave_alone_say_nothing_about_experts(adapted, root):
  with pytest.raises(ConfigError, match="the gates have not changed since --start"):
    convert.main([f"--from={adapted}", f"--workdir={root / 'no'}", "--prune=keep=4",
                  f"--start={adapted / BASE}"])  # fmt: skip
  assert not (root / "no").exists()


@pytest.mark.parametrize("name", ["a", "scaled", "dropping"])
def test_choices_are_the_models_own(name, root):
  """Loads from the recorded choices against the router sums of the same tokens."""
  stored = open_run(str(root / name), None)
  choices = choices_of(Source(root / name, text=str(root / "t.txt")), stored, 1)
  single = placement.single_device(stored.run)
  built = build(placement.with_capacity_groups_of(single, stored.run))  # as evaluation does
  leaves = restore_stored(root / name, leaves_of(built), stored.step)
  like = {"params": built.shapes} | ({"router": built.router_shapes} if built.router_shapes else {})
  state = nested(leaves, like)
  model = built.model(state["params"])
  data = dataclasses.replace(stored.run.data, source="text", path=str(root / "t.txt"))
  run = dataclasses.replace(stored.run, data=dataclasses.replace(data, validation_fraction=0))
  batch = next(iter(modality_of(run).open_data(run, evaluated=True).validation(max_batches=1)))
  given = Pass(batch.positions, mask_BS=batch.segment_ids > 0, router=state.get("router"))
  sums = jax.jit(lambda model: model(batch.inputs, given).sums)(model)
  load_LE = np.asarray(sums.load_E)[:, :8]
  np.testing.assert_array_equal(choices.load_LE(), load_LE)


def test_a_smaller_run_leaves_by_every_door(made):
  """--to and in again, --inference, and evaluation."""
  small, text = made / "small", str(made / "t.txt")
  kept_LE = np.array(json.loads((small / PRUNED).read_text())["kept"])
  built, leaves = leaves_in(small)
  _, before = leaves_in(made / "placed")
  assert built.run.model.num_experts == 4
  for name, value in take(before, kept_LE, 4, built).items():
    np.testing.assert_array_equal(leaves[name], value, name)
  convert.main([f"--workdir={small}", f"--to={made / 'out'}", "--mesh=data=1"])
  import_model(str(made / "out"), made / "again", mesh="data=1")
  _, again = leaves_in(made / "again")
  for name in again:
    if name in leaves and not name.startswith("router.error"):
      np.testing.assert_array_equal(again[name], leaves[name], name)
  convert.main([f"--workdir={small}", f"--inference={made / 'plain'}", "--mesh=data=1"])
  folder = InferenceFolder(made / "plain")
  np.testing.assert_array_equal(folder.whole("stages.0.moe.experts.up"),
                                leaves["params.stages.moe.experts.up"][0])  # fmt: skip
  options = {"mesh": "data=1", "max_batches": 1, "changed": {"data.path": text}}
  ours = evaluate.evaluate_run(str(small), **options)["loss"]
  assert evaluate.evaluate_run(model=str(made / "plain"), **options)["loss"] == ours


@pytest.mark.nightly  # by day a run that a conversion made trains in test_upcycled_run.py
def test_a_smaller_run_trains(made, capsys):
  small, text = made / "small", str(made / "t.txt")
  train.main([
    f"--config_json={small / 'config.json'}", f"--workdir={small}", "--config.train.steps=1",
    "--config.data.source=text", f"--config.data.path={text}", "--config.train.batch_size=4",
    "--config.overlap.schedule=off", "--config.train.sample_tokens=0",
    "--config.train.eval_batches=1", "--config.train.eval_every=1",
  ])  # fmt: skip
  _, after = leaves_in(small)
  assert after["params.stages.moe.experts.up"].shape[1] == 4
  assert "step" in capsys.readouterr().out


def test_the_new_run_depends_on_no_other(made):
  """It trains no adapters, begins from no other run, and has its balancing state."""
  stored = open_run(str(made / "small"), 0)
  assert stored.run.lora == LoraConfig()
  assert stored.run.train.init_from == ""
  assert set(flat(build(stored.run).router_shapes)) == {"bias", "error", "error_before"}


@pytest.mark.parametrize(("argv", "message"), [
  (["--place=devices=3"], "devices=3 does not divide 8 experts"),
  (["--place=by=balance"], "--place: devices='' is not such a number"),
  (["--place=devices=4,by=near"], "by='near' is unknown; one of: balance, together, affinity"),
  (["--place=devices=4,devices=2"], "has 'devices=2'; write KEY=VALUE, each KEY once"),
  (["--place=devices=4,batches=1"], "leaves no half of the text to judge"),
  (["--place=devices=4", "--prune=keep=4"], "give one of --place and --prune"),
  (["--place=devices=4", "--dtype=bfloat16"], "--dtype has no effect with --place"),
  (["--place=devices=4", "--to=x"], "--to has no effect with --place"),
  (["--prune=keep=2,by=use"], "keep=2 is fewer than model.top_k=3"),
  (["--prune=keep=8,by=use"], "keep='8' of 8 experts is not a number of experts from 1 to 7"),
  (["--prune=keep=0.3,by=use"], "keep='0.3' of 8 experts is not"),
  (["--prune=by=use"], "keep='' of 8 experts is not"),
  (["--prune=keep=4,by=size"], "by='size' is unknown; one of: router_norm, use, random"),
  (["--prune=keep=1.0,by=use"], "keep='1.0' of 8 experts is not a number of experts from 1 to 7"),
  (["--prune=keep=4,batches=2", "--start=a"], "batches='2' has no effect with by=router_norm"),
  (["--prune=keep=4,by=use,seed=1"], "seed='1' has no effect with by=use; leave it out, or use"),
  (["--prune=keep=4,by=random", "--text=t.txt"], "--text has no effect with --prune by=random"),
  (["--dtype=bfloat16"], "--dtype goes with --to, --peft and --inference"),
  (["--prune=keep=4", "--start=a"], "the gates have not changed since --start; use by=use"),
  (["--place=devices=4", "--workdir=released"], "'released' holds config.json, which belongs to"),
  (["--prune=keep=4,by=use", "--workdir=packed"], "'packed' holds inference.json, which bel"),
  (["--upcycle=wiring=topk", "--workdir=bare"], "'bare' holds m-1.safetensors, which belongs to"),
  (["--from=averaged", "--prune=keep=4,by=random", "--ema"], "--ema: step 3 of averaged holds no "
    "average.embedding.*; leave --ema out"),
  (["--from=averaged", "--upcycle=wiring=scmoe_pos2", "--ema"], "--ema: step 3 of averaged holds "
    "no average.*; leave --ema out"),
  (["--prune=keep=4"], "by=router_norm needs --start"),
  (["--prune=keep=4", "--start=groups"], "has parameters of other shapes than --from"),
  (["--prune=keep=4,by=use", "--start=a"], "--start has no effect with --prune by=use"),
  (["--from=groups", "--prune=keep=6,by=use"], "keep=6 does not divide among router.n_group=4"),
  (["--from=groups", "--place=devices=3"], "devices=3 does not divide 8 experts"),
  (["--from=cosine", "--prune=keep=4", "--start=a"],
   "a gate's matrix `weight`, and router.gate='cosine' has none; use by=use"),
  (["--from=dense", "--prune=keep=4,by=use"], "model.wiring='dense' has no experts"),
  (["--from=t.txt", "--prune=keep=4,by=use"], "is not the folder of a run, which --prune needs"),
  (["--prune=keep=4,by=random", "--mesh=expert=8"], "keep=4 is fewer than mesh.expert=8"),
  (["--prune=keep=6,by=random", "--mesh=expert=4"], "num_experts=6 is not divisible by mesh.exp"),
  (["--text=t.txt"], "--text goes with --place or --prune"),
  (["--prune=keep=4,by=use", "--text=none.txt"], "none.txt"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_writes_nothing(argv, message, root, monkeypatch):
  monkeypatch.chdir(root)
  from_a = [] if any(word.startswith("--from") for word in argv) else ["--from=a"]
  with pytest.raises((ConfigError, CheckpointError, DataError), match=message) as caught:
    convert.main([*from_a, "--workdir=new", *argv])
  assert "\n" not in str(caught.value)
  assert not (root / "new").exists()


def test_devices_that_divide_the_experts_take_the_same(made):
  convert.main([f"--from={made / 'a'}", f"--workdir={made / 'wide'}", "--mesh=data=2,expert=4",
                "--prune=keep=4,by=random,seed=3"])  # fmt: skip
  kept_LE = np.array(json.loads((made / "wide" / PRUNED).read_text())["kept"])
  _, before = leaves_in(made / "a")
  built, wide = leaves_in(made / "wide")
  assert built.mesh.size == 1  # of the source; the conversion had eight devices
  for name, value in before.items():
    want = np.asarray(value)
    if ".experts." in name:
      want = np.stack([layer[kept] for layer, kept in zip(want, kept_LE)])
    elif "router_gate" in name or want.shape == (2, 12):
      kept = [[*row, 8, 9, 10, 11] for row in kept_LE]
      want = np.stack([layer[..., columns] for layer, columns in zip(want, kept)])
    np.testing.assert_array_equal(wide[name], want, name)


def test_a_run_is_not_written_over(made):
  with pytest.raises(ConfigError, match="has a run already"):
    convert.main([f"--from={made / 'a'}", f"--workdir={made / 'small'}", "--prune=keep=4,by=use"])
