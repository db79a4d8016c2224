"""Decides which device holds which expert, from recorded choices. NumPy computes on the host.

Every device of the expert axis holds E / W experts of each layer. Three objectives:

  balance    The rows of the devices are to be equal, in every batch and from every source
             device.
  together   Experts that one token chooses in the same gating lie on one device, so that fewer
             devices receive the token.
  affinity   Experts that one token chooses in consecutive layers lie on one device (ExFlow, arXiv
             2401.08383).

`docs/inference.md` says which of them saves rows in this project's exchange. All three maximise a
sum over pairs of experts that share a device. Swaps of two experts (or of two groups that stay
whole) climb towards a local maximum, from the present placement and from random ones; the best
result is taken.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from scmoe.base.errors import ConfigError
from scmoe.inference.placement.choices import Choices

OBJECTIVES = ("balance", "together", "affinity")
STARTS = 16  # placements from which swaps begin: the present one and random ones
_SWEEPS = 32  # most passes over all layers from each start, for `affinity`


def place(
  choices: Choices, devices: int, objective: str, *, groups: int = 1, seed: int = 0
) -> Int[np.ndarray, "L E"]:
  """The device of every expert of every layer: int [L, E]; a layer has each device E / W times.

  The sum that the objective maximises is at least that of the present placement, in which expert e
  lies on device e // (E / W).

  Args:
    choices: the choices of the text for which the placement is made.
    devices: W.
    objective: one of `OBJECTIVES`.
    groups: groups of consecutive experts that the router opens as wholes (`router.n_group`). Each
      stays together: on one device, or on W / groups devices.
    seed: of the random placements from which swaps begin.

  Raises:
    ConfigError: the objective is unknown, W is below 2 or does not divide E, neither of W and
      `groups` divides the other, or the choices have one expert per token and gating (`together`)
      or one layer (`affinity`).
  """
  num_experts, layers = choices.num_experts, choices.layers
  if objective not in OBJECTIVES:
    raise ConfigError(f"by={objective!r} is unknown; one of: {', '.join(OBJECTIVES)}")
  check_devices(num_experts, devices, groups)
  if objective == "together" and choices.expert_NGTK.shape[-1] < 2:
    raise ConfigError("by=together needs two experts per token in a gating, got 1; use by=balance")
  if objective == "affinity" and layers < 2:
    raise ConfigError("by=affinity needs two layers with experts, got 1; use by=balance")
  rng = np.random.default_rng(seed)
  present_E = np.arange(num_experts) // (num_experts // devices)
  if objective == "affinity":
    return _along_layers(affinities(choices), devices, groups, rng)
  counts = _loads if objective == "balance" else _shared
  alone_EW = np.zeros((num_experts, devices))
  return np.stack([
    _in_groups(pairs_EE, alone_EW, present_E, groups, rng) for pairs_EE in counts(choices, devices)
  ])  # fmt: skip


def check_devices(num_experts: int, devices: int, groups: int = 1) -> None:
  """Checks that devices can hold equally many experts each: whole groups, or a part of one group.

  Args:
    num_experts: E.
    devices: W.
    groups: see `place`.

  Raises:
    ConfigError: they cannot, or W is below 2.
  """
  if devices < 2 or num_experts % devices:
    raise ConfigError(
      f"devices={devices} does not divide {num_experts} experts among two devices at least; use a "
      "divisor"
    )
  if groups % devices and devices % groups:
    raise ConfigError(
      f"devices={devices} and router.n_group={groups} do not divide each other, so a group would "
      "be torn; use such a number of devices"
    )


def order_of(device_LE: Int[np.ndarray, "L E"]) -> Int[np.ndarray, "L E"]:
  """The experts' indices in each layer, sorted by device: first those of device 0, and so on.

  Example: if the experts 0 to 3 lie on the devices [1, 0, 1, 0], the order is [1, 3, 0, 2].
  """
  return np.argsort(device_LE, axis=-1, kind="stable")


def affinities(choices: Choices) -> Float[np.ndarray, "L1 E E"]:
  """How often a token chose expert e in a layer and f in the next: [L - 1, E, E] counts.

  Expert e is a choice of the layer's last gating, f one of the next layer's first gating.
  """
  pairs = [g for g in range(len(choices.layer_G) - 1)
           if choices.layer_G[g] != choices.layer_G[g + 1]]  # fmt: skip
  flat = lambda g: choices.chosen(g).reshape(-1, choices.num_experts).astype(np.float64)
  return np.stack([flat(g).T @ flat(g + 1) for g in pairs])


def _shared(choices: Choices, devices: int) -> list[np.ndarray]:
  """For each layer, how often a token chose both e and f in one gating: [E, E], diagonal 0."""
  del devices
  found = [np.zeros((choices.num_experts,) * 2) for _ in range(choices.layers)]
  for gating, layer in enumerate(choices.layer_G):
    chosen_TE = choices.chosen(gating).reshape(-1, choices.num_experts).astype(np.float64)
    found[layer] += chosen_TE.T @ chosen_TE
  return [np.where(np.eye(len(pairs)), 0, pairs) for pairs in found]


def _loads(choices: Choices, devices: int) -> list[np.ndarray]:
  """For each layer, -Σ load_e · load_f over batches, gatings and source devices: [E, E].

  A device's rows are the sum of its experts' loads. So the sum of the squares of all devices' rows
  is a constant minus twice the sum of these numbers over pairs of experts that share a device. The
  diagonal is 0. If W does not divide a batch's T tokens, the last T mod W are left out.
  """
  found = [np.zeros((choices.num_experts,) * 2) for _ in range(choices.layers)]
  for gating, layer in enumerate(choices.layer_G):
    chosen = choices.chosen(gating)
    tokens = chosen.shape[1] - chosen.shape[1] % devices
    parts = len(chosen) * devices, tokens // devices, choices.num_experts
    load = chosen[:, :tokens].reshape(parts).sum(1, dtype=np.float64)
    found[layer] -= load.T @ load
  return [np.where(np.eye(len(pairs)), 0, pairs) for pairs in found]


def _along_layers(
  counts: np.ndarray, devices: int, groups: int, rng: np.random.Generator
) -> np.ndarray:
  """Places the layers one after the other, given their neighbours, until no layer changes.

  It does so from the present placement and from random ones, with at most `_SWEEPS` passes over the
  layers each time, and returns the best result.
  """
  layers, num_experts = len(counts) + 1, counts.shape[-1]
  nothing_EE = np.zeros((num_experts, num_experts))
  share = num_experts // devices
  best, most = None, -np.inf
  for start in range(STARTS):
    device_LE = np.tile(np.arange(num_experts) // share, (layers, 1))
    if start:
      shuffled = [_shuffled(device_LE[0], groups, rng) for _ in range(layers)]
      device_LE = np.stack(shuffled)
    for _ in range(_SWEEPS):
      before = device_LE.copy()
      for layer in range(layers):
        alone_EW = np.zeros((num_experts, devices))
        if layer:
          alone_EW += counts[layer - 1].T @ np.eye(devices)[device_LE[layer - 1]]
        if layer + 1 < layers:
          alone_EW += counts[layer] @ np.eye(devices)[device_LE[layer + 1]]
        start_E = device_LE[layer]
        device_LE[layer] = _in_groups(nothing_EE, alone_EW, start_E, groups, None)
      if (device_LE == before).all():
        break
    total = sum(
      (count * (a[:, None] == b)).sum() for count, a, b in zip(counts, device_LE, device_LE[1:])
    )
    if total > most:
      best, most = device_LE, total
  assert best is not None
  return best


def _in_groups(
  pairs_EE: np.ndarray,
  alone_EW: np.ndarray,
  start_E: np.ndarray,
  groups: int,
  rng: np.random.Generator | None,
) -> np.ndarray:
  """Places experts by `assigned`, so that groups of consecutive experts stay together.

  If a device holds whole groups, groups are placed instead of experts. If a group lies on several
  devices, the experts of each group are placed on the group's devices. Arguments are those of
  `assigned`, and the number of groups.
  """
  num_experts, devices = alone_EW.shape
  if groups >= devices:
    size = num_experts // groups
    pairs = pairs_EE.reshape(groups, size, groups, size).sum((1, 3))
    alone = alone_EW.reshape(groups, size, devices).sum(1)
    return assigned(pairs, alone, start_E[::size], rng).repeat(size)
  size, own = num_experts // groups, devices // groups
  found = np.empty_like(start_E)
  for group in range(groups):
    here = slice(group * size, (group + 1) * size)
    first = start_E[here].min()
    alone = alone_EW[here, first : first + own]
    found[here] = first + assigned(pairs_EE[here, here], alone, start_E[here] - first, rng)
  return found


def assigned(
  pairs_EE: Float[np.ndarray, "E E"],
  alone_EW: Float[np.ndarray, "E W"],
  start_E: Int[np.ndarray, " E"],
  rng: np.random.Generator | None = None,
) -> Int[np.ndarray, " E"]:
  """The devices of E things that maximise a sum of gains, as far as swaps of two things find them.

  The sum is that of pairs[e, f] over all pairs e < f on one device, and of alone[e, device of e].

  Args:
    pairs_EE: symmetric; its diagonal is not read.
    alone_EW: what a thing gains on each device.
    start_E: the devices at first; each keeps its number of things.
    rng: also begins from `STARTS` - 1 random placements, and takes the best; None: it does not.
  """
  pairs_EE = np.where(np.eye(len(pairs_EE)), 0, pairs_EE)
  starts = [start_E]
  if rng is not None:
    starts += [rng.permutation(start_E) for _ in range(STARTS - 1)]
  ends = [_climbed(pairs_EE, alone_EW, start) for start in starts]
  return max(ends, key=lambda end_E: gain(pairs_EE, alone_EW, end_E))  # the first of equal ones


def gain(pairs_EE: np.ndarray, alone_EW: np.ndarray, device_E: np.ndarray) -> float:
  """The sum that `assigned` maximises, of one placement; the diagonal of pairs must be 0."""
  same_EE = device_E[:, None] == device_E
  return float((pairs_EE * same_EE).sum() / 2 + alone_EW[np.arange(len(device_E)), device_E].sum())


def _climbed(pairs_EE: np.ndarray, alone_EW: np.ndarray, start_E: np.ndarray) -> np.ndarray:
  """Swaps the two things that gain most, until no swap gains more than a rounding error."""
  device_E, every = start_E.copy(), np.arange(len(start_E))
  devices = alone_EW.shape[1]
  least = 1e-9 * (np.abs(pairs_EE).max(initial=0) + np.abs(alone_EW).max(initial=0))
  while True:
    # What each thing gains on each device, given all others: itself adds nothing to a device.
    there_EW = alone_EW + pairs_EE @ np.eye(devices)[device_E]
    moved_EE = there_EW[:, device_E] - there_EW[every, device_E][:, None]
    # If e and f change places, neither meets the other on its new device.
    gain_EE = moved_EE + moved_EE.T - 2 * pairs_EE
    gain_EE = np.where(device_E[:, None] == device_E, -np.inf, gain_EE)
    e, f = np.unravel_index(gain_EE.argmax(), gain_EE.shape)
    if not gain_EE[e, f] > least:
      return device_E
    device_E[[e, f]] = device_E[[f, e]]


def _shuffled(device_E: np.ndarray, groups: int, rng: np.random.Generator) -> np.ndarray:
  """A random placement in which each group lies on one device, or on the devices that it had."""
  size = len(device_E) // groups
  if groups > device_E.max():  # every device holds whole groups
    return rng.permutation(device_E[::size]).repeat(size)
  return np.concatenate([rng.permutation(part) for part in device_E.reshape(groups, size)])
