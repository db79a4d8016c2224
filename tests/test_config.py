"""Fields, files, JSON, and every check that joins sections."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import json

import pytest

from scmoe.base.errors import ConfigError
from scmoe.moe.dispatch.options import TRANSPORTS, Kind
from scmoe.run import build, placement
from scmoe.run.bounds import MOST
from scmoe.run.config import (
  RunConfig,
  as_config_dict,
  from_dict,
  from_json,
  smoke_run,
  to_dict,
  to_json,
)
from scmoe.run.config_files import config_names, find_config, load_config
from scmoe.run.effects import check_typed
from scmoe.run.fields import fields, parse_value, with_field
from scmoe.run.names import check_run_name, check_workdir


def changed(**values):
  run = RunConfig()
  for name, value in values.items():
    run = with_field(run, name.replace("__", "."), str(value))
  return run


def resolve(run, num_devices=1, vocab_size=257):
  return run.resolve(num_devices=num_devices, vocab_size=vocab_size)


def error_of(call, *args, **kwargs):
  with pytest.raises(ConfigError) as caught:
    call(*args, **kwargs)
  text = str(caught.value)
  assert "\n" not in text
  return text


def test_default_resolves():
  run = resolve(RunConfig())
  assert run.mesh.data == 1
  assert run.model.vocab_size == 320
  assert resolve(run) == run  # nothing is left to fill in


def test_every_field_has_help_and_a_default_that_its_options_allow():
  names = [f.path for f in fields(RunConfig())]
  assert len(names) == len(set(names)) > 60
  for field in fields(RunConfig()):
    assert field.help, field.path
    assert field.type in (int, float, str, bool), field.path
    assert type(field.default) is field.type, field.path


# --- one field ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("text", "kind", "value"),
  [
    ("3", int, 3),
    ("-1", int, -1),
    ("1_000", int, 1000),
    ("3e-4", float, 3e-4),
    ("2", float, 2.0),
    ("True", bool, True),
    ("0", bool, False),
    ("a=b", str, "a=b"),
    ("", str, ""),
  ],
)
def test_parse_value(text, kind, value):
  got = parse_value(text, kind, "x")
  assert got == value
  assert type(got) is kind


@pytest.mark.parametrize(
  ("text", "kind"),
  [
    ("3.5", int),
    ("1e3", int),
    ("", int),
    ("9" * 30, int),
    ("__import__('os')", int),
    ("nan", float),
    ("inf", float),
    ("x", float),
    ("maybe", bool),
    ("2", bool),
  ],
)
def test_parse_value_refuses(text, kind):
  message = error_of(parse_value, text, kind, "model.x")
  assert "model.x=" in message
  assert kind.__name__ in message


def test_with_field_changes_one_field_only():
  before, after = to_dict(RunConfig()), to_dict(changed(model__wiring="top2"))
  after["model"]["wiring"] = before["model"]["wiring"]
  assert before == after


@pytest.mark.parametrize(
  ("path", "near"),
  [
    ("model.num_expertz", "model.num_experts"),
    ("num_experts", "model.num_experts"),
    ("train.width", "model.width"),
    ("trian.steps", "train.steps"),
    ("model", "model.style"),
    ("qqqq", "--help"),
    ("model.__class__", ""),
    ("", ""),
  ],
)
def test_unknown_field_is_named_with_a_near_one(path, near):
  message = error_of(with_field, RunConfig(), path, "1")
  assert repr(path) in message
  assert near in message


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("values", "words"),
  [
    ({"model__num_experts": -3}, ("model.num_experts=-3", "least is 1")),
    ({"model__wiring": "scmoe_pos4"}, ("model.wiring='scmoe_pos4'", "did you mean 'scmoe_pos")),
    ({"model__wiring": "topk", "model__top_k": 9}, ("model.top_k=9", "num_experts=8")),
    ({"model__wiring": "top2", "model__num_experts": 1}, ("'top2'", "num_experts=1")),
    ({"model__num_layers": 3}, ("model.num_layers=3", "multiple of 2")),
    ({"model__num_kv_heads": 3}, ("num_kv_heads=3", "divisor of 4")),
    ({"model__dtype": "float64"}, ("float64", "JAX_ENABLE_X64")),
    ({"model__vocab_size": 100}, ("model.vocab_size=100", "at least 257")),
    ({"model__document_mask": True}, ("model.document_mask", "data.document_mask=True")),
    ({"data__seq_len": 2048}, ("data.seq_len=2048", "model.context=1024")),
    ({"data__source": "jsonl"}, ("data.path=''",)),
    ({"data__packing": "pac"}, ("data.packing='pac'", "did you mean 'pack'")),
    ({"dispatch__capacity_factor": "1e-9"}, ("dispatch.capacity_factor",)),
    ({"dispatch__groups": 3}, ("dispatch.groups=3",)),
    ({"dispatch__nodes": 2}, ("dispatch.nodes=2",)),
    (
      {"dispatch__transport": "packed", "train__tune": "transport=per_rank"},
      (
        "transport=per_rank beside dispatch.transport=packed: packed drops",
        "and per_rank drops none",
      ),
    ),
    (
      {"dispatch__transport": "dropless", "train__tune": "transport=packed"},
      ("train.tune tries transport=packed", "dispatch.capacity_factor=0"),
    ),
    (
      {
        "dispatch__transport": "scmoe.moe.dispatch.local:Local",
        "train__tune": "transport=packed",
        "dispatch__capacity_factor": 0.0,
      },
      ("train.tune tries transport=packed", "own dispatch.transport=scmoe.moe.dispatch.local"),
    ),
    ({"train__tokens_per_step": 1000}, ("train.tokens_per_step=1000", "multiple of")),
    ({"train__steps": 0}, ("train.steps=0",)),
    ({"optimizer__beta1": 1.5}, ("optimizer.beta1=1.5", "most is 0.99999")),
    ({"checkpoint__keep": 0}, ("checkpoint.keep=0",)),
    ({"mesh__data": 0}, ("mesh.data=0",)),
    ({"name": "../evil"}, ("name='../evil'",)),
  ],
)
def test_resolve_refuses(values, words):
  message = error_of(lambda: resolve(changed(**values)))
  for word in words:
    assert word in message


@pytest.mark.parametrize(
  ("values", "devices", "words"),
  [
    ({"mesh__expert": 4}, 2, ("mesh.expert=4", "2 devices")),
    ({"mesh__data": 4, "mesh__expert": 4}, 8, ("needs 16 devices", "8 found")),
    ({"mesh__expert": 8, "model__num_experts": 12}, 8, ("num_experts=12", "mesh.expert=8")),
    ({"train__batch_size": 6}, 4, ("train.batch_size=6", "4", "use 8")),
    ({"mesh__tensor": 8}, 8, ("num_heads=4", "mesh.tensor=8")),
    ({"dispatch__groups": 2}, 4, ("dispatch.groups=2", "= 4")),
    (
      {"mesh__expert": 2, "model__experts": "my.module:Own", "dispatch__adaptive_r": 0},
      2,
      ("dispatch.adaptive_r=0 gathers", "'my.module:Own'; use dispatch.adaptive_r=1"),
    ),
    (
      {"mesh__expert": 2, "model__experts": "my.module:Own", "train__tune": "adaptive_r=0,1"},
      2,
      ("dispatch.adaptive_r=0 gathers", "also in train.tune"),
    ),
  ],
)
def test_resolve_refuses_on_a_mesh(values, devices, words):
  message = error_of(resolve, changed(**values), num_devices=devices)
  for word in words:
    assert word in message


WHOLE = [field.path for field in fields(RunConfig()) if field.type is int]


@pytest.mark.parametrize("path", [path for path in WHOLE if path != "train.seed"])
def test_an_absurd_size_is_one_line_at_once(path):
  """10^18 of anything: refused by name, before a layer is traced or an array is shaped."""
  message = error_of(lambda: resolve(with_field(RunConfig(), path, str(10**18))))
  assert path in message or path in ("model.top_k", "router.topk_group")


def test_a_billion_layers_are_refused():
  message = error_of(resolve, changed(model__num_layers=10**9))
  assert message == "model.num_layers=1000000000 is too large; the most is 10000"


def test_bounds_are_of_fields_that_there_are():
  assert set(MOST) <= set(WHOLE)


def test_batch_is_divided_over_processes():
  run = changed(train__batch_size=4, mesh__tensor=2)
  message = error_of(run.resolve, num_devices=2, vocab_size=257, num_processes=3)
  assert "processes" in message


def test_dense_wiring_needs_no_experts_on_the_mesh():
  run = changed(model__wiring="dense", mesh__expert=3, train__batch_size=6)
  assert resolve(run, num_devices=3).mesh.size == 3


# --- plain data -----------------------------------------------------------------------------------


def test_json_round_trip():
  run = changed(model__wiring="dgmoe", optimizer__learning_rate="1e-5", data__path="a b/ü")
  assert from_json(to_json(run)) == run
  assert from_json(to_json(resolve(run))) == resolve(run)


def test_missing_fields_keep_their_defaults():
  assert from_dict({"train": {"steps": 7}}) == changed(train__steps=7)


@pytest.mark.parametrize(
  ("text", "word"),
  [
    ("{", "cannot be used: Expecting"),
    ("[]", "it is [], not an object"),
    ("[" * 100_000, "nested too deep"),
    ('{"model": 3}', "model is int"),
    ('{"model": {"wdth": 3}}', "did you mean model.width"),
    ('{"model": {"width": "3"}}', "model.width='3' is of type str, not int"),
    ('{"model": {"width": true}}', "bool, not int"),
    ('{"model": {"width": 3.0}}', "float, not int"),
    ('{"model": {"tie_embeddings": 1}}', "int, not bool"),
    ('{"optimizer": {"learning_rate": NaN}}', "learning_rate"),
    ('{"optimizer": {"learning_rate": 1e400}}', "learning_rate=inf is not a finite number"),
    ('{"optimizer": {"learning_rate": 1e300}}', "learning_rate=1e+300 is beyond float32"),
    ('{"train": {"steps": 1, "steps": 2}}', "'steps' is given twice"),
  ],
)
def test_json_refuses(text, word):
  assert word in error_of(from_json, text)


def test_config_dict_is_locked_and_typed():
  config = as_config_dict(RunConfig())
  config.model.width = 256
  assert from_dict(config.to_dict()).model.width == 256
  with pytest.raises(AttributeError, match="num_expert"):
    config.model.num_expert = 4
  with pytest.raises(TypeError):
    config.model.width = "wide"


# --- files ----------------------------------------------------------------------------------------


def test_config_is_found_by_name_and_by_path(tmp_path):
  assert "quickstart" in config_names()
  by_name = find_config("quickstart")
  assert find_config(str(by_name)) == by_name
  assert "did you mean quickstart" in error_of(find_config, "quikstart")
  error_of(find_config, "../configs/quickstart")
  error_of(find_config, "\0")
  error_of(find_config, "~no-such-user/a.py")


GOOD = """
from scmoe.run.config import RunConfig, as_config_dict
def get_config():
  config = as_config_dict(RunConfig())
  {line}
  return {result}
"""


@pytest.mark.parametrize(
  ("text", "word"),
  [
    ("x = 1", "has no get_config()"),
    ("def get_config(:", ".py:1: SyntaxError"),
    ("import no_such_module", ".py:1: ModuleNotFoundError"),
    ("\n\nraise ValueError", ".py:3: ValueError"),
    ("import sys\nsys.exit(3)", ".py:2: SystemExit: 3"),
    ("def get_config():\n  raise SystemExit", ".py:2: SystemExit"),
    (GOOD.format(line="config.model.widht = 3", result="config"), ".py:5: AttributeError"),
    (GOOD.format(line="", result="3"), "returned int"),
    (GOOD.format(line="", result="{'modle': 3}"), "did you mean"),
  ],
)
def test_bad_config_file(tmp_path, text, word):
  path = tmp_path / "mine.py"
  path.write_text(text)
  message = error_of(load_config, path)
  assert "mine.py" in message
  assert word in message


def test_good_config_file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(GOOD.format(line="config.model.width = 96", result="config"))
  assert load_config(path).model.width == 96
  path.write_text("from scmoe.run.config import RunConfig\ndef get_config(): return RunConfig()")
  assert load_config(path) == RunConfig()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py"]  # no __pycache__


# --- names and folders ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "run-1", "A.b_c", "0" * 64])
def test_run_names(name):
  check_run_name(name, "name")


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a b", "a\0", "ü", "a" * 65])
def test_bad_run_names(name):
  error_of(check_run_name, name, "name")


def test_workdir(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").write_text("")
  (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
  for good in ("a", "runs/a", "runs/with space/b", str(tmp_path / "c"), "./d/e"):
    check_workdir(good)
  for bad in (
    *("", " ", "..", "../a", "runs/../../a", "/", ".hidden", "-x", "a b", "a\0b", "x" * 300),
    *("r/" + "x" * 300, "d/" * 600, "file", "file/a", "link", str(tmp_path / "link")),
    "~no-such-user/a",
  ):
    if bad == "/":
      continue  # a folder like any other; writing to it is refused later
    assert "--workdir" in error_of(check_workdir, bad), bad
  assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


# --- build ----------------------------------------------------------------------------------------


def test_build_places_parameters_and_allocates_nothing():
  run = changed(mesh__data=2, mesh__expert=2, mesh__tensor=2)
  built = build.build(resolve(run, num_devices=8))
  up = built.shapes["stages"]["moe"]["experts"]["up"]
  assert up.shape == (2, 8, 128, 512)
  assert up.sharding.shard_shape(up.shape) == (2, 4, 128, 256)
  state = built.abstract_state()
  moments = [s for s in _leaves(state.opt_state) if s.shape == up.shape]
  assert [m.sharding for m in moments] == [up.sharding] * 2


def _leaves(tree):
  import jax

  return jax.tree.leaves(tree)


def test_single_device_keeps_everything_but_the_mesh():
  run = resolve(changed(mesh__expert=4), num_devices=8)
  alone = placement.single_device(run)
  assert alone.mesh.size == 1
  assert dataclasses.replace(alone, mesh=run.mesh) == run


def test_vocab_size_of_tokenizers(tmp_path):
  data = RunConfig().data
  assert build.vocab_size(data) == 257
  assert build.vocab_size(dataclasses.replace(data, tokenizer="bpe", vocab_size=300)) == 300


def test_plain_values_only():
  json.dumps(to_dict(RunConfig()), allow_nan=False)


def test_a_smoke_run_keeps_the_layers_that_it_has():
  lists = {"dense_layers": "0", "full_attention_layers": "1,3,5,7", "nope_layers": "3,7"}
  run = changed(model__wiring="topk", model__num_layers=8, model__moe_every=1,
                model__style="llama", model__sliding_window=4,
                **{f"model__{name}": value for name, value in lists.items()})  # fmt: skip
  model = resolve(smoke_run(run)).model
  assert [getattr(model, name) for name in lists] == ["0", "1,3", "3"]


@pytest.mark.parametrize(("name", "value", "why", "others"), [
  ("model.expert_bias", "True", "model.wiring='dense' has no routed experts",
   {"model__wiring": "dense"}),
  ("model.attention_temperature_floor", "64", "model.attention_temperature=0 multiplies no queries",
   {"model__nope_layers": "1"}),
  ("model.ffn.num_sms", "124", "XLA's or MegaBlocks' products compute the experts",
   {"model__ffn__backend": "xla"}),
  ("model.ffn.num_sms", "124", "XLA's or MegaBlocks' products compute the experts",
   {"model__ffn__impl": "block_sparse"}),
])  # fmt: skip
def test_an_option_of_a_part_that_is_not_there_is_refused(name, value, why, others):
  run = with_field(changed(model__style="llama", **others), name, value)
  assert f"{name}={value} has no effect: {why}; set " in error_of(check_typed, run, [name])


ROUNDS = {"dispatch__transport": "dropless", "mesh__expert": 2, "dispatch__overflow": "repeat"}


@pytest.mark.parametrize(("others", "why"), [
  ({"dispatch__adaptive_r": 0}, "dispatch.adaptive_r=0 gathers the experts' weights and exchanges"),
  ({"mesh__expert": 1}, "mesh.expert=1 leaves the rows on their device, which has all experts"),
  ({"dispatch__transport": "capacity"}, "dispatch.transport='capacity' has no overflow rounds"),
  ({"dispatch__transport": "my.module:Own"}, "dispatch.transport='my.module:Own' sends"),
  ({"dispatch__ablation__first_round": True}, "dispatch.ablation.first_round=True loses the rows"),
  ({"dispatch__adaptive_r": 0, "train__tune": "adaptive_r=0,1"}, None),
  ({"dispatch__transport": "capacity", "train__tune": "transport=capacity,packed"}, None),
  ({"dispatch__transport": "capacity", "dispatch__capacity_factor": 0.0}, None),
  ({}, None),
])  # fmt: skip
def test_steps_are_repeated_where_rows_can_be_left_over(others, why):
  run = RunConfig()
  for name, value in (ROUNDS | others).items():
    run = with_field(run, name.replace("__", "."), str(value))
  if why is None:
    return check_typed(run, ["dispatch.overflow"])
  line = error_of(check_typed, run, ["dispatch.overflow"])
  assert f"dispatch.overflow='repeat' has no effect: {why}" in line


@pytest.mark.parametrize(("others", "why"), [
  ({"mesh__data": 1, "mesh__expert": 1}, "mesh.data=1, mesh.expert=1 and mesh.sequence=1 leave"),
  ({"mesh__data": 2, "mesh__embedding": "partitioned"}, "mesh.embedding='partitioned' sends rows"),
  ({"mesh__shard_state": "parameters"}, "mesh.shard_state='parameters' scatters the gradients"),
  ({"lora__rank": 4}, "lora.rank=4 trains adapters"),
  ({"model__tie_embeddings": True}, "model.tie_embeddings=True: the head's gradient"),
  ({"train__tokens_per_step": 32768}, "train.tokens_per_step=32768 adds up several microbatches"),
  ({"model__vocab_size": 512, "data__seq_len": 256, "train__batch_size": 8},
   "the tokens of a step, train.batch_size=8 x data.seq_len=256 or train.tokens_per_step"),
  ({"model__architecture": "vit"}, "model.architecture='vit' reads images"),
])  # fmt: skip
def test_embeddings_travel_as_rows_where_their_gradients_are_summed(others, why):
  given = {"mesh__expert": 2, "overlap__embedding_rows": True, "model__tie_embeddings": False}
  line = error_of(check_typed, changed(**(given | others)), ["overlap.embedding_rows"])
  assert f"overlap.embedding_rows=True has no effect: {why}" in line
  check_typed(changed(**given), ["overlap.embedding_rows"])
  wide = {"model__vocab_size": 65536, "mesh__data": -1}  # as many devices as there are
  check_typed(changed(**(given | wide)), ["overlap.embedding_rows"])


@pytest.mark.parametrize(("name", "value"), [
  ("overlap.gradient_dtype", "bfloat16"), ("overlap.copy_engines", "True"),
])  # fmt: skip
def test_one_device_sends_no_gradients_and_no_rows(name, value):
  run = with_field(RunConfig(), name, value)
  line = error_of(check_typed, with_field(run, "mesh.data", "1"), [name])
  assert "has no effect" in line
  check_typed(with_field(run, "mesh.expert", "2"), [name])


@pytest.mark.parametrize("others", [{"dispatch__adaptive_r": 0}, {"mesh__expert": 1}])
def test_rows_in_fp8_are_asked_for_where_rows_travel(others):
  run = changed(**({"mesh__expert": 2, "dispatch__fp8": True} | others))
  assert "dispatch.fp8=True has no effect" in error_of(check_typed, run, ["dispatch.fp8"])
  check_typed(changed(mesh__expert=2, dispatch__fp8=True), ["dispatch.fp8"])


@pytest.mark.parametrize("others", [{"dispatch__transport": "dropless"}, {"mesh__expert": 1}])
def test_the_put_kernels_blocks_are_asked_for_where_it_runs(others):
  given = {"mesh__expert": 2, "dispatch__transport": "put", "dispatch__put_blocks": 16}
  line = error_of(check_typed, changed(**(given | others)), ["dispatch.put_blocks"])
  assert "dispatch.put_blocks=16 has no effect" in line
  check_typed(changed(**given), ["dispatch.put_blocks"])


def test_rows_that_a_kernel_puts_are_not_rounded():
  run = changed(dispatch__transport="put", dispatch__fp8=True, mesh__expert=2)
  line = error_of(resolve, run, 2)
  assert line.startswith("dispatch.fp8=True rounds rows for an all-to-all")
  assert line.endswith("use dispatch.transport=dropless")


def test_a_capacity_that_drops_nothing_has_peers_buffers():
  run = changed(mesh__expert=2, dispatch__capacity_factor=0, dispatch__slack=1.5)
  check_typed(run, ["dispatch.slack"])


@pytest.mark.parametrize(("name", "most", "what"), [
  ("mesh.moments_ahead", 4, "layers of the model"),
  ("mesh.moments_kept", 4, "layers of the model"),
  ("overlap.flight", 2, "microbatches of a step"),
  ("train.profile_step", 50, "steps of train.steps"),
  ("train.stop_after", 50, "steps of train.steps"),
  ("train.collapse_steps", 50, "steps of train.steps"),
])  # fmt: skip
def test_a_number_larger_than_what_it_limits_is_refused(name, most, what):
  run = changed(train__steps=50, train__batch_size=2, data__seq_len=8, train__tokens_per_step=32,
                mesh__moments_in="host")  # fmt: skip
  check_typed(with_field(run, name, str(most)), [name])
  line = error_of(check_typed, with_field(run, name, str(most + 1)), [name])
  assert line == f"{name}={most + 1} is more than the {most} {what}; use at most {most}"


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_new_line_of_the_transports_is_all_that_the_checks_need(monkeypatch, drops, in_rounds):
  monkeypatch.setitem(TRANSPORTS, "mine", Kind(drops=drops, in_rounds=in_rounds))
  run = changed(dispatch__transport="mine", dispatch__groups=3, dispatch__overflow="repeat",
                mesh__expert=2)  # fmt: skip
  assert (run.dispatch.repeats, run.dispatch.fixed_buffers) == (in_rounds, not in_rounds)
  # Only a capacity needs groups that divide the tokens.
  said = error_of(resolve, run, 2) if drops else resolve(run, 2).dispatch.transport
  assert ("dispatch.groups=3 must be a multiple" in said) == drops
  wrong = {"dispatch.slack": not in_rounds, "dispatch.overflow": not in_rounds,
           "dispatch.capacity_factor": not drops}  # fmt: skip
  for name, refused in wrong.items():
    if refused:
      assert "dispatch.transport='mine' has" in error_of(check_typed, run, [name])
    else:
      check_typed(run, [name])


def test_an_option_of_a_part_that_is_there_is_taken():
  run = changed(model__style="llama", model__wiring="topk", model__expert_bias=True,
                model__nope_layers="1", model__attention_temperature=0.1,
                model__attention_temperature_floor=64)  # fmt: skip
  check_typed(run, ["model.expert_bias", "model.attention_temperature_floor"])
