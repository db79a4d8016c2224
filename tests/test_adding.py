"""The recipes of docs/adding.md, as they stand there, and the log of the run of one of them."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from jax.sharding import PartitionSpec as P

import scmoe
from scmoe import evaluate, train
from scmoe.blocks.wiring import WIRINGS
from scmoe.training.console import console_line
from scmoe.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "adding.md").read_text("utf-8")


def block(kind):
  """The code that the page has under a name."""
  (body,) = re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", PAGE, re.M | re.S)
  return body


@pytest.fixture(scope="module")
def package(tmp_path_factory):
  """A folder with the page's files, importable."""
  folder = tmp_path_factory.mktemp("adding")
  for name in ("my_parts.py", "my_model.py"):
    (folder / name).write_text(block(f"python {name}"))
  # A module of its own: another test has a `my_parts` too.
  text = (folder / "my_parts.py").read_text()
  (folder / "my_added_parts.py").write_text(text)
  model = (folder / "my_model.py").read_text()
  (folder / "my_model.py").write_text(model.replace("my_parts:", "my_added_parts:"))
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    yield folder


@pytest.fixture(scope="module")
def trained(package):
  """Folder of a run of the page's model, on a mesh."""
  workdir = package / "run"
  train.main(["--config", str(package / "my_model.py"), "--smoke", "--workdir", str(workdir),
              "--config.mesh.expert=4", "--config.train.tensorboard=false",
              "--config.train.sample_tokens=0"])  # fmt: skip
  return workdir


def test_the_model_trains_with_the_gate_and_the_transport_on_a_mesh(trained, capsys):
  lines = read_metrics(trained)
  assert [line["step"] for line in lines] == [1, 2, 3]
  assert all(np.isfinite(line["loss"]) for line in lines)
  capsys.readouterr()
  evaluate.main(["--workdir", str(trained), "--max_batches", "1"])
  assert "at step 3" in capsys.readouterr().out


def layer(transport, gate=None):
  config = scmoe.MoEConfig(width=16, hidden=32, num_experts=4, top_k=2)
  dispatch = scmoe.DispatchConfig(transport, capacity_factor=1.0)
  router = config.router if gate is None else dataclasses.replace(config.router, gate=gate)
  config = dataclasses.replace(config, dispatch=dispatch, router=router)
  return scmoe.MoE(config, rngs=nnx.Rngs(0))


def run(moe, x, mesh=None):
  """Output, and the gradient of its square in the parameters; of all of x."""

  def loss(moe, x):
    y = moe(x)[0]
    return jnp.square(y).sum(), y

  step = jax.value_and_grad(loss, has_aux=True)
  if mesh is not None:
    specs, batch = scmoe.parameter_specs(moe), P(scmoe.BATCH_AXES)

    def on_mesh(moe, x):
      (_, y), gradients = step(moe, x)
      return y, scmoe.reduce_gradients(gradients, specs)

    return jax.jit(scmoe.manual(on_mesh, mesh, (specs, batch), (batch, specs)))(moe, x)
  (_, y), gradients = jax.jit(step)(moe, x)
  return y, gradients


@pytest.mark.parametrize("devices", [night(1), 4])
def test_narrow_rows_are_those_of_capacity_within_bfloat16(package, devices):
  x = jax.random.normal(jax.random.key(0), (8, 16, 16))
  mesh = scmoe.make_mesh(scmoe.MeshConfig(data=1, expert=4), jax.devices()[:4])
  mesh = mesh if devices == 4 else None
  found = run(layer("my_added_parts:NarrowRows"), x, mesh)
  want = run(layer("capacity"), x, mesh)
  assert found[0].dtype == jnp.float32
  assert jnp.abs(want[0] - found[0]).max() > 0, "nothing was narrow"
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * float(jnp.abs(b).max()))


def test_the_gate_learns(package):
  x = jax.random.normal(jax.random.key(0), (2, 16, 16))
  _, gradients = run(layer("dropless", "my_added_parts:TwoLayerGate"), x)
  gate = gradients.router_gate[0]
  assert all(jnp.abs(part[...]).max() > 0 for part in (gate.hidden, gate.scores))


@pytest.fixture
def wired(monkeypatch):
  """The page's wiring, for one test."""
  monkeypatch.delitem(WIRINGS, "scmoe_pos1_k2", raising=False)
  known = dict(WIRINGS)
  exec(compile(block("python wiring"), "adding.md", "exec"), {})
  yield WIRINGS["scmoe_pos1_k2"]
  WIRINGS.clear()
  WIRINGS.update(known)


def test_the_wiring_has_the_schedule_that_the_page_prints(wired):
  printed = str(scmoe.make_schedule(wired, 2, scmoe.OverlapConfig()))
  assert printed.splitlines() == block("schedule of the new wiring").splitlines()


def test_the_wiring_is_two_experts_of_pos1(wired):
  config = scmoe.BlockConfig(wiring="scmoe_pos1_k2", num_experts=4, width=16, num_heads=2)
  same = dataclasses.replace(config, wiring="scmoe_pos1", top_k=2)
  h = jax.random.normal(jax.random.key(0), (2, 8, 16))
  make = lambda c: jax.jit(lambda h: scmoe.BlockPair(c, rngs=nnx.Rngs(0))(h).h_BSD)
  outputs = [make(c)(h) for c in (config, same)]
  np.testing.assert_array_equal(*outputs)


def test_a_run_is_opened_as_the_page_on_inference_does_it(trained, capsys):
  page = (ROOT / "docs" / "inference.md").read_text("utf-8")
  (body,) = re.findall(r"^```python run\n(.*?)^```", page, re.M | re.S)
  code = (
    body.replace("runs/a", str(trained))
    .replace("def main(", "def ")
    .replace('stored.run, ""', 'stored.run, "expert=4"')
  )
  exec(compile(code, "inference.md", "exec"), {"scmoe": scmoe})
  assert capsys.readouterr().out.strip("\n")


LOGS = (ROOT / "docs" / "reading_logs.md").read_text("utf-8")
EXPLAINED = set(re.findall(r"[\w/]+", " ".join(re.findall(r"`([^`\n]+)`", LOGS))))


@pytest.mark.parametrize("kind", ["train", "eval", "end"])
def test_every_figure_of_a_run_is_explained(trained, kind):
  lines = read_metrics(trained, kind)
  assert lines
  for line in lines:
    names = set(line) | set(line.get("layers", ())) - {"kind"}
    assert {name.split("/")[0] for name in names} <= EXPLAINED


def test_every_figure_that_a_run_may_have_is_explained():
  """Those of zero experts, float16, spikes, balancing biases, GPUs and several processes."""
  sometimes = {"zero_share", "real_experts", "loss_scale", "spike", "bias_range", "mfu", "hosts"}
  assert sometimes | {"device_memory_bytes"} <= EXPLAINED


def test_every_field_of_the_console_is_explained():
  values = dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "eta_seconds",
                          "drop", "imbalance", "skipped"), 1)  # fmt: skip
  for part in console_line(1, 2, values).split(" | ")[1:]:
    label = re.sub(r"[\d.]+%?s?|e[+-]\d+", "", part).strip()
    assert f"| `{label}` |" in LOGS, label


def test_a_line_of_a_run_without_steps_is_a_line():
  assert console_line(0, 0, {"loss": 2.5}) == "step 0/0 (100%) | loss 2.5000"


def test_the_lines_of_the_page_are_lines_of_the_program():
  """Each step's line is what the program prints of some figures."""
  for line in re.findall(r"^step .*$", LOGS, re.M):
    pattern = (
      r"step (\d+)/(\d+) \(\d+%\) \| loss ([\d.]+) \| lr ([\d.e-]+) \| grad ([\d.]+) \| "
      r"([\d.]+)k tok/s \| ETA (\d+)s \| drop ([\d.]+)% \| imbalance ([\d.]+)"
    )
    step, steps, loss, lr, grad, rate, eta, drop, imbalance = re.fullmatch(pattern, line).groups()
    values = {"loss": float(loss), "lr": float(lr), "grad_norm": float(grad)}
    values |= {"tokens_per_second": 1e3 * float(rate), "eta_seconds": float(eta)}
    values |= {"drop": float(drop) / 100, "imbalance": float(imbalance)}
    assert console_line(int(step), int(steps), values) == line
