"""Vision models against plain float64 NumPy and on eight devices; changed images."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import ImageBatch
from scmoe.base.errors import ConfigError
from scmoe.layers.attention import AttentionConfig
from scmoe.layers.grid_attention import GridAttention, ValueConvolution
from scmoe.layers.group_norm import GroupNormGelu
from scmoe.layers.window_attention import WindowAttention
from scmoe.models.config import ModelConfig
from scmoe.models.flops import forward_flops
from scmoe.models.gradient_sums import accumulate
from scmoe.models.vision.augment import AugmentConfig, augmented, partner_part, soft_labels
from scmoe.models.vision.model import VisionModel
from scmoe.models.vision.objective import ClassificationObjective, right_among
from scmoe.models.vision.options import VisionConfig
from scmoe.models.vision.stages import stages_of
from scmoe.models.vision.stem import Stem, convolutions
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs

SIZES = {"num_experts": 4, "width": 8, "num_heads": 2, "mlp_hidden": 12, "dtype": "float32"}


def drawn(make, seed=0):
  """Graph and parameters of a module, drawn by NumPy: nothing compiles, and no parameter is 0."""
  graph, state = nnx.split(nnx.eval_shape(make))
  numbers = np.random.default_rng(seed)
  draw = lambda s: jnp.asarray(numbers.normal(0, 0.3, s.shape), s.dtype)
  return graph, jax.tree.map(draw, state)


# -- oracles --------------------------------------------------------------------------------------


def neighbourhoods(v, taps, side):
  """The values [G·G, H, N] of each token's neighbours in the grid, weighted, one at a time."""
  found, reach = np.zeros_like(v), taps.shape[0] // 2
  for row, column in itertools.product(range(side), repeat=2):
    for r, c in itertools.product(range(-reach, reach + 1), repeat=2):
      if 0 <= row + r < side and 0 <= column + c < side:
        other = v[(row + r) * side + column + c]
        found[row * side + column] += taps[r + reach, c + reach] * other
  return found


def windowed(x, p, side, window, shift):
  """Attention of one image [G·G, D], token by token: those of a token's window are looked up.

  The windows of a shifted grid are cut at rows and columns `shift`, `shift + window`, ...; what is
  left at the edges are windows too.
  """
  split = lambda name: np.einsum("sd,dhn->shn", x, p[name])
  q, k, v = split("query"), split("key"), split("value")
  out = np.zeros_like(q)
  place = list(itertools.product(range(side), repeat=2))
  group = [((r - shift) // window, (c - shift) // window) for r, c in place]
  for i, h in itertools.product(range(len(place)), range(q.shape[1])):
    seen = [j for j in range(len(place)) if group[j] == group[i]]
    score = np.array([
      q[i, h] @ k[j, h] / np.sqrt(q.shape[-1])
      + p["bias"][(place[i][0] - place[j][0] + window - 1) * (2 * window - 1)
                  + place[i][1] - place[j][1] + window - 1, h]
      for j in seen
    ])  # fmt: skip
    weight = np.exp(score - score.max())
    out[i, h] = (weight / weight.sum()) @ v[seen, h]
  if "local" in p:
    out += neighbourhoods(v, p["local"], side)
  return np.einsum("shn,hnd->sd", out, p["out"])


# A window of 4 is the whole grid, which needs no windows.
@pytest.mark.parametrize(
  ("window", "shifted", "kernel"), [(2, False, 0), (2, True, 0), (2, True, 3), (4, False, 5)]
)
def test_attention_over_a_grid_and_its_gradient_are_the_oracles(window, shifted, kernel):
  side = 4
  config = AttentionConfig(width=6, num_heads=2, num_kv_heads=2, head_dim=3, causal=False)
  options, windows = {"side": side, "kernel_side": kernel}, {"window": window, "shifted": shifted}
  kind, more = (WindowAttention, windows) if window < side else (GridAttention, {})
  graph, params = drawn(lambda: kind(config, **options, **more, rngs=nnx.Rngs(params=0)))
  numbers = np.random.default_rng(1)
  x, weight = numbers.normal(size=(2, 2, side * side, 6))
  of_module = lambda tree: {
    {"relative_bias": "bias"}.get(k, k): v["taps"] if k == "local" else v
    for k, v in nnx.to_pure_dict(tree).items()
  }
  plain = {k: np.asarray(v, np.float64) for k, v in of_module(params).items()}
  without = {} if window < side else {"bias": np.zeros(((2 * window - 1) ** 2, 2))}
  oracle = lambda x, p: np.stack([
    windowed(one, without | p, side, window, int(shifted)) for one in x
  ])  # fmt: skip
  positions = jnp.broadcast_to(jnp.arange(side * side), (2, side * side))

  def run(params, x):
    return (nnx.merge(graph, params)(x, positions) * weight).sum(), None

  got = jax.jit(nnx.merge(graph, params))(jnp.asarray(x, jnp.float32), positions)
  np.testing.assert_allclose(got, oracle(x, plain), atol=2e-6)
  slope = jax.jit(jax.grad(run, (0, 1), has_aux=True))(params, jnp.asarray(x, jnp.float32))[0]
  slopes = of_module(slope[0])
  step = {k: numbers.normal(size=v.shape) for k, v in plain.items()}
  step_x, h = numbers.normal(size=x.shape), 1e-5
  at = lambda t: oracle(x + t * step_x, {k: v + t * step[k] for k, v in plain.items()}) * weight
  want = (at(h).sum() - at(-h).sum()) / (2 * h)
  own = sum((np.asarray(slopes[k]) * step[k]).sum() for k in plain)
  assert own + (np.asarray(slope[1]) * step_x).sum() == pytest.approx(want, rel=1e-4)


def test_heads_of_queries_that_share_values_share_their_convolution():
  """Four heads of queries, two of values: consecutive heads of queries get the same rows."""
  config = AttentionConfig(width=6, num_heads=4, num_kv_heads=2, head_dim=3, causal=False)
  graph, params = drawn(lambda: ValueConvolution(config, side=4, kernel_side=3))
  values = np.random.default_rng(5).normal(size=(2, 16, 2, 3))
  got = nnx.merge(graph, params)(jnp.asarray(values, jnp.float32))
  taps = np.asarray(nnx.to_pure_dict(params)["taps"], np.float64)
  for image, own in zip(got, values):
    want = neighbourhoods(own, taps, 4)
    for head in range(4):
      np.testing.assert_allclose(image[:, head], want[:, head // 2], atol=1e-6)


def test_the_convolution_of_values_counts_among_an_attentions_flops():
  """Nine products and sums for each of the 8 channels, in each of four blocks."""
  vision = VisionConfig(size=4, patch=2)
  plain = ModelConfig(architecture="vit", vision=vision, wiring="dense", num_layers=4, **SIZES)
  local = dataclasses.replace(plain, vision=dataclasses.replace(vision, value_convolution=3))
  with_it, without = (forward_flops(model.resolve(), 0) for model in (local, plain))
  assert with_it.attention - without.attention == 4 * 2 * 9 * 8
  assert dataclasses.replace(with_it, attention=0) == dataclasses.replace(without, attention=0)


def normalised(x, p):
  wide = x - x.mean(-1, keepdims=True)
  return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def vit(images, p, patch):
  """Logits of a dense ViT in the words of its paper: one image, one head at a time."""
  found = []
  for image in images:
    side = image.shape[0] // patch
    h = np.stack([
      image[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].reshape(-1)
      for r, c in itertools.product(range(side), repeat=2)
    ])  # fmt: skip
    stem = p["embedding"]
    h = h @ stem["weight"] + stem["bias"] + stem["positions"]
    blocks = p["trunks"][0]["stages"]["units"][0]["blocks"]
    pairs = blocks[0]["attention"]["query"].shape[0]
    for pair, number in itertools.product(range(pairs), sorted(blocks)):
      own = jax.tree.map(lambda a, pair=pair: a[pair], blocks[number])
      x, a = normalised(h, own["norm_attention"]), own["attention"]
      y = np.zeros_like(h)
      for head in range(a["query"].shape[1]):
        q = x @ a["query"][:, head] + a["query_bias"][head]
        k = x @ a["key"][:, head]
        v = x @ a["value"][:, head] + a["value_bias"][head]
        score = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
        y += score / score.sum(-1, keepdims=True) @ v @ a["out"][head]
      h = h + y + a["out_bias"]
      x, m = normalised(h, own["norm_mlp"]), own["mlp"]
      h = h + gelu(x @ m["up"] + m["up_bias"]) @ m["down"] + m["down_bias"]
    found.append(normalised(h, p["norm"]).mean(0) @ p["head"] + p["head_bias"])
  return np.stack(found)


def test_a_vit_and_its_gradient_are_the_oracles():
  vision = VisionConfig(size=4, patch=2, classes=3)
  config = ModelConfig(architecture="vit", vision=vision, wiring="dense", num_layers=4, **SIZES)
  graph, params = drawn(lambda: VisionModel(config, rngs=nnx.Rngs(params=0)))
  numbers = np.random.default_rng(2)
  images, weight = numbers.normal(size=(2, 4, 4, 3)), numbers.normal(size=(2, 3))

  def logits(params):
    model = nnx.merge(graph, params)
    return model.logits(model(jnp.asarray(images, jnp.float32)).h_BSD)

  plain = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(params))
  np.testing.assert_allclose(jax.jit(logits)(params), vit(images, plain, 2), atol=1e-5)
  slopes = nnx.to_pure_dict(jax.jit(jax.grad(lambda p: (logits(p) * weight).sum()))(params))
  step = jax.tree.map(lambda a: numbers.normal(size=a.shape), plain)
  moved = lambda t: jax.tree.map(lambda a, d: a + t * d, plain, step)
  at = lambda t: (vit(images, moved(t), 2) * weight).sum()
  want = (at(1e-5) - at(-1e-5)) / 2e-5
  got = sum(jax.tree.leaves(jax.tree.map(lambda a, d: (np.asarray(a) * d).sum(), slopes, step)))
  assert got == pytest.approx(want, rel=2e-4)


def group_normalised(x, p):
  """An image [S, S, C] in groups of 16 channels, or of 8 where C is no multiple of 16."""
  groups = np.split(x, x.shape[-1] // (8 if x.shape[-1] % 16 else 16), -1)
  unit = [(g - g.mean()) / np.sqrt(g.var() + 1e-5) for g in groups]
  return np.concatenate(unit, -1) * p["scale"] + p["bias"]


NORMS = {"layer": normalised, "group": group_normalised}


def convolved(x, p, stride, norm="layer"):
  """3 x 3 products at every place of an image [S, S, C] with a border of zeros, norm, GELU."""
  side = x.shape[0] // stride
  framed, y = np.pad(x, ((1, 1), (1, 1), (0, 0))), np.zeros((side, side, p["kernel"].shape[-1]))
  for r, c in itertools.product(range(side), repeat=2):
    square = framed[r * stride : r * stride + 3, c * stride : c * stride + 3]
    y[r, c] = np.einsum("ijc,ijcd->d", square, p["kernel"])
  return gelu(NORMS[norm](y, p["norm"]))


@pytest.mark.parametrize(
  ("each", "norm", "width"),
  [(1, "layer", 32), (2, "layer", 32), (2, "group", 32), (1, "group", 48)],
)
def test_a_stem_of_convolutions_and_its_gradient_are_the_oracles(each, norm, width):
  """Two halvings leave 2 x 2 tokens of an 8 x 8 image; the channels are 3, width / 2 and width."""
  vision = VisionConfig(size=8, patch=4, stem="conv", stem_convolutions=each, stem_norm=norm)
  config = ModelConfig(
    architecture="vit", vision=vision, wiring="dense", **(SIZES | {"width": width})
  )
  (stage,) = stages_of(config)
  half = width // 2
  assert [tuple(step) for step in convolutions(stage)] == (
    [(3, half, 2), (half, width, 2)]
    if each == 1
    else [(3, half, 1), (half, half, 2), (half, width, 1), (width, width, 2)]
  )
  graph, params = drawn(lambda: Stem(stage, positions=True, rngs=nnx.Rngs(params=0)))
  numbers = np.random.default_rng(3)
  images, weight = numbers.normal(size=(2, 8, 8, 3)), numbers.normal(size=(2, 4, width))
  plain = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(params))

  def oracle(p):
    found = []
    for x in images:
      for own, step in zip(p["convolutions"].values(), convolutions(stage)):
        x = convolved(x, own, step.stride, norm)
      found.append(x.reshape(4, -1) @ p["weight"] + p["bias"] + p["positions"])
    return np.stack(found)

  tokens = lambda p: nnx.merge(graph, p)(jnp.asarray(images, jnp.float32))
  np.testing.assert_allclose(jax.jit(tokens)(params), oracle(plain), atol=3e-5)
  slopes = nnx.to_pure_dict(jax.jit(jax.grad(lambda p: (tokens(p) * weight).sum()))(params))
  step = jax.tree.map(lambda a: numbers.normal(size=a.shape), plain)
  at = lambda t: (oracle(jax.tree.map(lambda a, d: a + t * d, plain, step)) * weight).sum()
  got = sum(jax.tree.leaves(jax.tree.map(lambda a, d: (np.asarray(a) * d).sum(), slopes, step)))
  assert got == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_a_group_norm_of_16_bit_pixels_keeps_them_in_16_bits(held):
  """Its gradient is that of the plain formula in float32, and no float32 copy is kept.

  Args:
    held: type of scale and bias, and so of their gradients.
  """
  numbers = np.random.default_rng(4)
  x, bar = (jnp.asarray(numbers.normal(1.0, 2.0, (2, 4, 4, 32)), jnp.bfloat16) for _ in "ab")
  graph, params = drawn(lambda: GroupNormGelu(32, 1e-5))
  params = jax.tree.map(lambda p: p.astype(held), params)

  def plain(p, x):
    grouped = x.astype(jnp.float32).reshape(2, 16, 2, 16)
    mean, var = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    unit = ((grouped - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
    wide = {name: value.astype(jnp.float32) for name, value in p.items()}
    return jax.nn.gelu(unit * wide["scale"] + wide["bias"]).astype(x.dtype)

  (got, back), (want, plain_back) = (
    jax.vjp(run, tree, x)
    for run, tree in [
      (lambda p, x: nnx.merge(graph, p)(x), params),
      (plain, nnx.to_pure_dict(params)),
    ]
  )
  np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=1e-2, atol=1e-2)
  found, wanted = (jax.tree.leaves(pull(bar)) for pull in (back, plain_back))
  for a, b in zip(found, wanted, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(
      a.astype(np.float32), b.astype(np.float32), rtol=2e-2, atol=2e-2 * float(jnp.abs(b).max())
    )
  kept = [leaf for leaf in jax.tree.leaves(back) if getattr(leaf, "size", 0) >= x.size]
  assert kept, "the backward pass keeps the input"
  assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.bfloat16)}


# -- on devices -----------------------------------------------------------------------------------

SWIN = ModelConfig(
  architecture="swin",
  vision=VisionConfig(size=8, patch=1, depths="2,2", window=2, classes=3, value_convolution=3),
  wiring="scmoe_pos2",
  **SIZES,
)
MIXED = AugmentConfig(
  flip=0.5, crop=1, trivial=0.5, mixup=0.8, cutmix=1.0, erase=0.5, label_smoothing=0.1
)


def images_of(rows, size=8, seed=3):
  numbers = np.random.default_rng(seed)
  pictures = numbers.integers(0, 256, (2, *rows, size, size, 3), dtype=np.uint8)
  labels = numbers.integers(0, 3, (2, *rows)).astype(np.int32)
  weights = (numbers.random(rows) < 0.8).astype(np.float32)
  draws = numbers.integers(0, 100, (*rows, 2)).astype(np.uint32)
  return ImageBatch(pictures[0], labels[0], weights, draws, pictures[1], labels[1])


@functools.cache
def step_on(depths="2", **mesh):
  """(loss, gradients, sums) of a step of eight images, of a model with stages of these depths."""
  vision = dataclasses.replace(SWIN.vision, depths=depths)
  config = dataclasses.replace(SWIN, vision=vision)
  options = {
    "router": RouterConfig(noise=1.0, balance="load_importance", z_loss=0.1),
    "dispatch": DispatchConfig(transport="dropless"),
  }
  graph, state = drawn(lambda: VisionModel(config, **options, rngs=nnx.Rngs(params=0)))
  objective = ClassificationObjective(graph, options["router"], augment=MIXED, seed=7)
  params = nnx.to_pure_dict(state)
  specs = nnx.to_pure_dict(parameter_specs(state))
  sizes = MeshConfig(**{"data": 1, "expert": 1, "tensor": 1} | mesh)
  on = make_mesh(sizes, jax.devices()[: sizes.size], num_experts=SWIN.num_experts)

  def local(params, batch):
    return accumulate(objective, params, {}, batch, jax.random.key(3), specs)

  whole = manual(local, on, (specs, P(None, BATCH_AXES)), (P(), specs, P()))
  return jax.device_get(jax.jit(whole)(params, images_of((1, 8))))


# A second stage doubles the programs; by day one device merges patches, below.
@pytest.mark.parametrize("depths", ["2", night("2,2")])
def test_eight_devices_give_the_step_of_one(depths):
  found = [step_on(depths, data=2, expert=2, tensor=2), step_on(depths)]
  # How many rounds an exchange takes is the mesh's own.
  got, want = ((*r[:2], dataclasses.replace(r[2], router=r[2].router.load_E)) for r in found)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


# -- changed images -------------------------------------------------------------------------------


def test_what_changes_an_image_is_its_own_seed_epoch_and_index():
  batch = images_of((6,))
  order = np.array([3, 0, 5, 1, 4, 2])
  turned = jax.tree.map(lambda x: x[order], batch)
  change = jax.jit(lambda batch, seed: augmented(batch, MIXED, seed))
  np.testing.assert_array_equal(np.asarray(change(batch, 1))[order], change(turned, 1))
  assert not np.array_equal(change(batch, 1), change(batch, 2))
  later = dataclasses.replace(batch, draws=batch.draws + np.array([1, 0], np.uint32))
  assert not np.array_equal(change(batch, 1), change(later, 1))


def test_no_option_changes_nothing():
  batch = images_of((4,))
  same = augmented(batch, AugmentConfig(), 0)
  np.testing.assert_allclose(same, batch.images.astype(np.float32) / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_a_label_is_mixed_as_its_pixels_are(name):
  size, rows = 8, 200
  black, white = (np.full((rows, size, size, 3), value, np.uint8) for value in (0, 255))
  labels, draws = np.zeros(rows, np.int32), np.stack([np.zeros(rows), np.arange(rows)], 1)
  batch = ImageBatch(black, labels, labels, draws.astype(np.uint32), white, labels + 1)
  config = dataclasses.replace(AugmentConfig(), **{name: 1.0})
  mixed = np.asarray(augmented(batch, config, 0))
  label = np.asarray(soft_labels(batch, partner_part(batch, config, 0), 3, 0.0))
  np.testing.assert_allclose((mixed.mean((1, 2, 3)) + 1) / 2, label[:, 1], atol=1e-5)
  np.testing.assert_allclose(label.sum(-1), 1, atol=1e-6)
  assert 0.3 < label[:, 1].mean() < 0.6
  if name == "cutmix":
    assert np.isin(mixed, (-1, 1)).all(), "a pixel is of one image or of the other"


def test_the_share_of_right_guesses_is_the_labels():
  logits = jnp.asarray([[3.0, 2, 1, 0], [0, 1, 2, 3]])
  labels = jnp.asarray([[0.7, 0.3, 0, 0], [1.0, 0, 0, 0]])
  np.testing.assert_allclose(right_among(logits, labels, 1), [0.7, 0])
  np.testing.assert_allclose(right_among(logits, labels, 2), [1.0, 0])
  np.testing.assert_allclose(right_among(logits, labels, 5), [1.0, 1])


# -- configurations that cannot be built ----------------------------------------------------------


@pytest.mark.parametrize(("fields", "words"), [
  ({"vision": VisionConfig(size=10, patch=4)}, "model.vision.patch=4"),
  ({"vision": VisionConfig(size=12, patch=3, stem="conv")}, "use a power of 2"),
  ({"vision": VisionConfig(stem_convolutions=2)}, "use model.vision.stem=conv"),
  ({"vision": VisionConfig(stem_norm="group")}, "use model.vision.stem=conv"),
  ({"vision": VisionConfig(value_convolution=2)}, "use an odd number"),
  ({"style": "llama"}, "is of language models"),
  ({"architecture": "swin", "vision": VisionConfig(size=8, patch=4)}, "do not halve evenly"),
  ({"architecture": "swin", "vision": VisionConfig(depths="2,a")}, "no list of numbers"),
  ({"architecture": "swin", "vision": VisionConfig(depths="2,3", window=2)}, "stage 2"),
  ({"architecture": "swin", "vision": VisionConfig(depths="2,2", window=3)}, "use a divisor"),
])  # fmt: skip
def test_what_cannot_be_built_is_one_line(fields, words):
  config = ModelConfig(**({"architecture": "vit", **SIZES} | fields))
  with pytest.raises(ConfigError, match=words) as found:
    nnx.eval_shape(lambda: VisionModel(config, rngs=nnx.Rngs(params=0)))
  assert "\n" not in str(found.value)
