"""Reads the fields of a released model's config.json and checks their types.

Every family of `scmoe.pretrained.families` reads its configuration through `Fields`, so a field of
the wrong type gives the same one-line error, with its name, in all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scmoe.base.errors import DataError
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.layers.rope import RopeConfig
from scmoe.pretrained.quantised import blocks_of

ACTIVATIONS = {
  "silu": "swiglu",
  "swish": "swiglu",
  "gelu_new": "geglu",
  "gelu_pytorch_tanh": "geglu",
  "relu": "reglu",
}
_LARGEST_NUMBER = 1e30  # of a field that is not a size; a larger one could overflow float32
_DEFAULT_CONTEXT = 4096  # tokens, if config.json has no max_position_embeddings
# Limits of the fields from which lists of layers or experts are made. They are made before any
# tensor is compared with the files, so an absurd number would exhaust the memory.
_LARGEST = {
  "num_hidden_layers": 2**14, "num_layers": 2**14, "first_k_dense_replace": 2**14,
  "zero_expert_num": 2**16,
}  # fmt: skip
_ROPE = (
  "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "truncate",
  "partial_rotary_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
  "mscale_all_dim", "low_freq_factor", "high_freq_factor",
)  # fmt: skip


def merged(fields: dict[str, Any], **others: Any) -> dict[str, Any]:
  """The fields with others added or in place of theirs."""
  return {**fields, **others}


class Fields:
  """The fields of a config.json, with errors that name file and field.

  Attributes:
    values: the parsed file.
    name: the file's name in messages.
  """

  def __init__(self, values: Mapping[str, Any], name: str = "config.json"):
    self.values, self.name = values, name

  def size(self, field: str, default: int | None = None) -> int:
    """A whole number ≥ 0; null gives the default.

    Raises:
      DataError: the field has another value, is too large, or is null and has no default.
    """
    value = self.values.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
      raise DataError(f"{self.name}: {field}={value!r} is not a size; give a whole number")
    if value > (most := _LARGEST.get(field, 2**31)):
      shown = value if value < 10**20 else "a number of more than 20 digits"
      raise DataError(f"{self.name}: {field}={shown} is more than the limit of {most}")
    return value

  @property
  def experts(self) -> int:
    """Number of experts of a layer, `num_experts` or `num_local_experts`.

    transformers 5 may write either of the two for a family for which version 4 wrote the other.
    """
    fields = "num_experts", "num_local_experts"
    return self.size(fields[self.values.get(fields[0]) is None and fields[1] in self.values])

  def number(self, field: str, default: float) -> float:
    """A finite number; null gives the default.

    Raises:
      DataError: the field has another value.
    """
    value = self.values.get(field)
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < _LARGEST_NUMBER:  # also refuses NaN
      raise DataError(f"{self.name}: {field}={str(value)[:40]!r} is not a number")
    return float(value)

  def flag(self, field: str, default: bool = False) -> bool:
    """True or false; null gives the default.

    Raises:
      DataError: the field has another value.
    """
    value = self.values.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
      raise DataError(f"{self.name}: {field}={value!r} is neither true nor false")
    return value

  def layers(self, field: str) -> tuple[int, ...]:
    """A list of layer indices, counted from 0; null gives an empty one.

    Raises:
      DataError: the field has another value.
    """
    value = self.values.get(field) or []
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
      raise DataError(f"{self.name}: {field}={value!r} is not a list of layers")
    return tuple(value)

  def layer_kinds(self, *known: str) -> list[str] | None:
    """The words of the field `layer_types`: what each layer's attention sees; null gives None.

    Raises:
      DataError: it is not a list, or has a word that is not `known`.
    """
    kinds = self.values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
      raise DataError(f"{self.name}: layer_types={str(kinds)[:40]!r} is not a list")
    if kinds is not None and (other := [kind for kind in kinds if kind not in known]):
      raise DataError(
        f"{self.name}: layer_types has {other[0]!r}, which is not supported; known: "
        f"{', '.join(known)}"
      )
    return kinds

  def refuse(self, field: str, *allowed: Any) -> None:
    """Refuses a field that asks for something scmoe's model does not have.

    Args:
      field: the field's name.
      allowed: the supported values, besides null.

    Raises:
      DataError: the field has another value.
    """
    value = self.values.get(field)
    if value is not None and value not in allowed:
      known = ", ".join(map(repr, allowed)) or "null"
      raise DataError(f"{self.name}: {field}={value!r} is not supported; known: {known}")

  @property
  def activation(self) -> str:
    """The option `model.ffn.activation` for the file's `hidden_act`.

    Raises:
      DataError: `hidden_act` is not supported.
    """
    name = self.values.get("hidden_act")
    name = "silu" if name is None else name
    if not isinstance(name, str) or name not in ACTIVATIONS:
      raise DataError(
        f"{self.name}: hidden_act={name!r} is not supported; known: {', '.join(ACTIVATIONS)}"
      )
    return ACTIVATIONS[name]

  def rope(
    self, default_theta: float, *, interleaved: bool = False, share: float | None = None
  ) -> dict[str, Any]:
    """The model's options `rope_theta` and `rope`.

    transformers 4 writes them as rope_theta and rope_scaling, version 5 as rope_parameters.

    Args:
      default_theta: the value if the file gives none.
      interleaved: whether dimensions 2i and 2i + 1 of a head are rotated together, instead of i and
        i + half the head.
      share: the part of a head that turns if the file gives none (`partial_rotary_factor`); None:
        the family turns whole heads.

    Raises:
      DataError: the file asks for another kind of rotary embedding.
    """
    given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
      raise DataError(f"{self.name}: rope_scaling={given!r} is not a group of fields")
    inner = Fields(given, f"{self.name}: rope_scaling")
    if unknown := next((name for name in given if name not in _ROPE), None):
      raise DataError(
        f"{inner.name} has {unknown!r}, which is not supported; known: {', '.join(_ROPE)}"
      )
    theta = inner.number("rope_theta", self.number("rope_theta", default_theta))
    kind = given.get("rope_type", given.get("type"))
    kind = "default" if kind is None else kind
    if kind not in ("default", "linear", "llama3", "yarn", "dynamic"):
      raise DataError(
        f"{self.name}: rope_scaling has rope_type={kind!r}, which is not supported; known: "
        "default, linear, llama3, yarn, dynamic"
      )
    if share is None:
      for fields in (self, inner):
        fields.refuse("partial_rotary_factor", 1.0)
    else:
      share = inner.number("partial_rotary_factor", self.number("partial_rotary_factor", share))
    turning = 1.0 if share is None else share
    if kind == "dynamic":
      # It stretches rows that are longer than max_position_embeddings, which no row is here
      # (`model.context`), and is the plain embedding up to there, if that is the original context.
      context = self.size("max_position_embeddings", _DEFAULT_CONTEXT)
      if inner.size("original_max_position_embeddings", context) != context:
        raise DataError(
          f"{inner.name} has rope_type='dynamic' with original_max_position_embeddings other than "
          f"max_position_embeddings={context}; give both the same value: rows up to it are the same"
        )
    if kind in ("default", "dynamic"):
      return {"rope_theta": theta, "rope": RopeConfig(interleaved=interleaved, share=turning)}
    numbers = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
               "low_freq_factor", "high_freq_factor")  # fmt: skip
    plain = RopeConfig()
    context = inner.size(
      "original_max_position_embeddings", self.size("max_position_embeddings", _DEFAULT_CONTEXT)
    )
    rope = RopeConfig(
      interleaved=interleaved,
      share=turning,
      scaling=kind,
      factor=inner.number("factor", 1.0),
      original_context=context if kind != "linear" else 0,
      truncate=inner.flag("truncate", True),
      **{name: inner.number(name, getattr(plain, name)) for name in numbers},
    )
    return {"rope_theta": theta, "rope": rope}

  def common(
    self,
    default_theta: float,
    *,
    eps: float,
    interleaved: bool = False,
    share: float | None = None,
    layer_kinds: tuple[str, ...] = ("full_attention",),
  ) -> dict[str, Any]:
    """Options of the model that all families store in the same fields.

    Args:
      default_theta, eps: rope_theta and rms_norm_eps if the file gives none.
      interleaved, share: see `rope`.
      layer_kinds: the words that `layer_types` may have.
    """
    blocks_of(self.values, self.name)  # refuses weights that are quantised in another way
    self.refuse("mlp_bias", False)
    self.layer_kinds(*layer_kinds)
    return {
      "style": "llama",
      "mix": "direct",
      "moe_every": 1,
      "width": self.size("hidden_size"),
      "num_heads": self.size("num_attention_heads"),
      "vocab_size": self.size("vocab_size"),
      "context": self.size("max_position_embeddings", _DEFAULT_CONTEXT),
      "ffn": FFNOptions(activation=self.activation),
      "norm_eps": self.number("rms_norm_eps", eps),
      "init_std": self.number("initializer_range", 0.02),
      "tie_embeddings": self.flag("tie_word_embeddings"),
      "attention_bias": self.flag("attention_bias"),
      **self.rope(default_theta, interleaved=interleaved, share=share),
    }

  def heads(self, kv_heads: int | None = None) -> dict[str, Any]:
    """Options for the heads of ordinary (not latent) attention.

    Args:
      kv_heads: number of key and value heads if the file gives none; None: as many as query heads.
    """
    heads = self.size("num_attention_heads")
    return {
      "num_kv_heads": self.size("num_key_value_heads", kv_heads or heads),
      "head_dim": self.size("head_dim", 0),
    }

  def latent(self) -> dict[str, Any]:
    """Options for the sizes of multi-head latent attention."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": self.size("q_lora_rank", 0)} | {n: self.size(n) for n in names}

  def balance(self, k: int, field: str = "router_aux_loss_coef") -> dict[str, Any]:
    """Options for MegaBlocks' balancing loss times K, the nearest one to that of transformers.

    For one layer the two are equal. Over several layers transformers pools the tokens of all layers
    before it multiplies: E·K·Σ_e f̄_e·p̄_e, where f̄ and p̄ are means over layers. Ours is the mean
    over layers of E·K·Σ_e f_e·p_e. Example with E = 2 and K = 1: layer 0 sends every token to
    expert 0, layer 1 every token to expert 1. Pooled, the imbalances cancel and the loss is 1;
    ours is 2.
    """
    return {"balance": "megablocks", "balance_loss": k * self.number(field, 0.001)}
