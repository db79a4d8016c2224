"""Released models' own conventions: how texts begin, where they end, how conversations are written.

The model is a recorded one of transformers; the tokenizer has a word for each of its 128 tokens, so
that a text can be written that becomes the recorded ids.
"""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from scmoe import generate
from scmoe.base.errors import ConfigError, DataError, ScmoeError
from scmoe.data import DataConfig, open_data
from scmoe.data.chat import render
from scmoe.data.conventions import FILE, Conventions
from scmoe.data.tokenizers import JsonTokenizer, load_json, prompt_ids
from scmoe.inference.sampling import Sampling
from scmoe.inference.scoring import Continuation, score
from scmoe.pretrained.conventions import read_conventions
from scmoe.pretrained.imported import SOURCE, import_model
from scmoe.run.exported import export_inference, export_model
from scmoe.run.opened import open_model, open_run
from scmoe.run.placement import on_mesh
from scmoe.run.session import Session
from scmoe.run.tasks import ScmoeLM

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released" / "olmoe_a"
with np.load(GOLDEN / "io.npz") as recorded:
  IDS, LOGITS = recorded["input_ids"][0].tolist(), recorded["logits"][0]
BOS, TEXT = IDS[0], IDS[1:7]  # the first recorded token begins a text of the six that follow
EOS = 2
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def words(ids):
  return " ".join(f"t{i:03}" for i in ids)


def tokenizer_json(special=(BOS, EOS), post_processor=None):
  """A word for each token; those of `special` are special."""
  flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
  added = [{"id": i, "content": f"t{i:03}", "special": True} | flags for i in sorted(special)]
  return json.dumps({
    "version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": post_processor,
    "model": {"type": "WordLevel", "vocab": {f"t{i:03}": i for i in range(128)},
              "unk_token": "t000"},
  })  # fmt: skip


def template_of(*ids):
  """A post-processor that puts these tokens before a text and the end of text behind it."""
  part = lambda i: {"SpecialToken": {"id": f"t{i:03}", "type_id": 0}}
  sequence = {"Sequence": {"id": "A", "type_id": 0}}
  named = {f"t{i:03}": {"id": f"t{i:03}", "ids": [i], "tokens": [f"t{i:03}"]} for i in (*ids, EOS)}
  single = [*map(part, ids), sequence, part(EOS)]
  return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": named}


def model_folder(path, *, config=None, tokenizer=None, **files):
  """The recorded model with these fields of config.json and these further files."""
  folder = Path(shutil.copytree(GOLDEN, path, copy_function=shutil.copyfile))
  values = json.loads((folder / "config.json").read_text())
  values |= {"bos_token_id": BOS, "eos_token_id": EOS} | (config or {})
  (folder / "config.json").write_text(json.dumps(values))
  (folder / "tokenizer.json").write_text(tokenizer or tokenizer_json())
  for name, content in files.items():
    is_template = name == "chat_template"
    text = content if is_template else json.dumps(content)
    (folder / f"{name}{'.jinja' if is_template else '.json'}").write_text(text)
  return folder


def read(folder):
  content = (folder / "tokenizer.json").read_text()
  config = json.loads((folder / "config.json").read_text())
  return read_conventions(folder, config, JsonTokenizer(content, eos_id=EOS))


def right_score():
  """log p(t1 ... t6 | t0) of the logits that transformers computed."""
  rows = LOGITS[:6].astype(np.float64)
  logs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
  return float((logs - rows.max(1, keepdims=True))[np.arange(6), TEXT].sum())


# -- what a folder says ---------------------------------------------------------------------------

B, T = (BOS,), f"t{BOS:03}"
SAYINGS = {
  "config.json alone": ({}, B, BOS, (EOS,)),
  "the flag": ({"tokenizer_config": {"bos_token": T, "add_bos_token": True}}, B, BOS, (EOS,)),
  "no by the flag": (
    {"tokenizer_config": {"bos_token": T, "add_bos_token": False}}, (), BOS, (EOS,)),
  "the flag before the post-processor": (
    {"tokenizer_config": {"bos_token": T, "add_bos_token": False},
     "tokenizer": tokenizer_json(post_processor=template_of(BOS))}, (), BOS, (EOS,)),
  "the post-processor": ({"tokenizer": tokenizer_json(post_processor=template_of(BOS, 9)),
                          "tokenizer_config": {}}, (BOS, 9), BOS, (EOS,)),
  "one that adds nothing before": (
    {"tokenizer": tokenizer_json(post_processor=template_of()), "tokenizer_config": {}},
    (), BOS, (EOS,)),
  "one in a sequence": (
    {"tokenizer": tokenizer_json(post_processor={
      "type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        template_of(BOS)]}), "tokenizer_config": {}}, B, BOS, (EOS,)),
  "as BERT": ({"tokenizer": tokenizer_json(post_processor={
    "type": "BertProcessing", "cls": [T, BOS], "sep": ["t002", EOS]})}, B, BOS, (EOS,)),
  "the class": ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast",
                                      "bos_token": {"content": T}}}, B, BOS, (EOS,)),
  "a class that adds nothing": (
    {"tokenizer_config": {"tokenizer_class": "GPTNeoXTokenizerFast", "bos_token": T}},
    (), BOS, (EOS,)),
  "no such token": ({"tokenizer_config": {"bos_token": None, "add_bos_token": False}},
                    (), None, (EOS,)),
  "no word of it": ({"config": {"bos_token_id": None}}, (), None, (EOS,)),
  "several ends": ({"config": {"eos_token_id": [EOS, 3]}}, B, BOS, (EOS, 3)),
  "ends of generation": ({"generation_config": {"eos_token_id": [7, EOS]}}, B, BOS, (EOS, 7)),
  "one end of generation": ({"generation_config": {"eos_token_id": 7}}, B, BOS, (EOS, 7)),
  "the end of the tokenizer": (
    {"tokenizer_config": {"eos_token": "t009", "add_bos_token": True}}, B, BOS, (EOS, 9)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAYINGS)
def test_what_a_folder_says(name, tmp_path):
  files, begin, bos, stop = SAYINGS[name]
  found = read(model_folder(tmp_path / "m", **files))
  assert (found.begin_ids, found.bos_id, found.stop_ids) == (begin, bos, stop)


WRONG = {
  "end": ({"config": {"eos_token_id": "2"}}, r"config.json: eos_token_id=2 is neither a token id"),
  "negative": ({"config": {"bos_token_id": -1}}, r"bos_token_id=-1 is neither"),
  "a flag": ({"config": {"bos_token_id": True}}, r"bos_token_id=True is neither"),
  "many": ({"config": {"eos_token_id": [2] * 300}}, r"eos_token_id=\[2, 2, .* is neither"),
  "outside": ({"generation_config": {"eos_token_id": [2, 128]}}, r"names token 128; the"),
  "unknown": ({"tokenizer_config": {"bos_token": "<x>"}}, r"bos_token='<x>' is not a token of"),
  "no flag": ({"tokenizer_config": {"add_bos_token": "yes"}}, r"add_bos_token='yes' is neither"),
  "no token": ({"tokenizer_config": {"bos_token": None, "add_bos_token": True}}, r"needs a bos"),
  "no object": ({"generation_config": [1]}, r"generation_config.json .* is .*, not an object"),
  "a template": ({"tokenizer_config": {"chat_template": 3}}, r"chat_template is not a text"),
  "a long one": ({"chat_template": "x" * (2**20 + 1)}, r"chat_template.jinja is larger than"),
  "special map": ({"special_tokens_map": []}, r"special_tokens_map.json .* not an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_says_nonsense_is_one_line_and_writes_nothing(name, tmp_path):
  files, message = WRONG[name]
  with pytest.raises(ScmoeError, match=message) as caught:
    import_model(str(model_folder(tmp_path / "m", **files)), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert len(str(caught.value)) < 400
  assert not (tmp_path / "run").exists()


# -- from the folder to a run, to an inference folder, and out again ------------------------------

KEPT = {
  "generation_config": {"eos_token_id": [EOS, 3], "temperature": 0.6},
  "tokenizer_config": {"bos_token": T, "eos_token": "t002", "add_bos_token": True},
  "special_tokens_map": {"bos_token": T},
  "chat_template": "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}",
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
  """(folder of the model, run, inference folder)."""
  root = tmp_path_factory.mktemp("conventions")
  folder = model_folder(root / "model", **KEPT)
  import_model(str(folder), root / "run")
  export_inference(root / "run", root / "inference")
  return folder, root / "run", root / "inference"


@pytest.fixture(params=["run", "inference"])
def session(imported, request):
  _, run, inference = imported
  place = {"workdir": str(run)} if request.param == "run" else {"model": str(inference)}
  return Session(mesh="data=1", **place)


def test_a_text_begins_as_published_and_has_the_published_score(session):
  """Six tokens behind the end-of-text token had another score."""
  tokens = session.encode(words(TEXT))
  assert tokens == [BOS, *TEXT]
  (found,) = score(session.model, [Continuation(tokens, 6)], length=16, batch_size=1)
  assert found.log_likelihood == pytest.approx(right_score(), abs=1e-4)
  (ours,) = score(session.model, [Continuation([EOS, *TEXT], 6)], length=16, batch_size=1)
  assert abs(ours.log_likelihood - right_score()) > 0.1


def harness_model(workdir):
  """The model as lm_eval asks it, without that package."""
  stored = open_run(str(workdir), None)
  opened = open_model(on_mesh(stored.run, "data=1"), str(workdir), stored.step)
  model = object.__new__(ScmoeLM)
  model.opened, model.encoder, model.max_length = opened, opened.tokenizer, 32
  model.batch_size, model.cache_hook = 1, SimpleNamespace(add_partial=lambda *_: None)
  return model


def test_tasks_ask_as_published(imported):
  model = harness_model(imported[1])
  assert model.prefix_token_id == BOS
  assert model.eot_token_id == EOS
  right = pytest.approx(right_score(), abs=1e-4)
  asked = [(("", ""), [model.prefix_token_id], TEXT), (("", ""), [], TEXT)]
  assert [found for found, _ in model._loglikelihood_tokens(asked)] == [right, right]
  text = SimpleNamespace(args=(words(TEXT),))
  assert model.loglikelihood_rolling([text]) == [right]
  assert model._prompts([words(TEXT), ""], 4) == [[BOS, *TEXT], [BOS]]


def test_generation_ends_at_every_end_that_the_folder_names(imported, tmp_path):
  (free,) = Session(str(imported[1]), mesh="data=1").tokens(
    [[BOS, *TEXT]], GREEDY, max_new_tokens=1
  )
  ids = free[0]
  long = Session(str(imported[1]), mesh="data=1")
  (row,) = zip(*long.tokens([[BOS, *TEXT]], GREEDY, max_new_tokens=12))
  made = [token for piece in row for token in piece]
  assert made[:1] == ids
  stop = next(t for t in made if t != made[0])
  at = made.index(stop)
  ends = {"eos_token_id": [EOS, stop]}
  # From a run, and from what it exports: a session for each of the files' two places.
  import_model(str(model_folder(tmp_path / "m-list", config=ends)), tmp_path / "list")
  folder = model_folder(tmp_path / "m-generation", generation_config=ends)
  import_model(str(folder), tmp_path / "generation")
  export_inference(tmp_path / "generation", tmp_path / "exported")
  for session in (Session(str(tmp_path / "list")), Session(model=str(tmp_path / "exported"))):
    (row,) = zip(*session.tokens([[BOS, *TEXT]], GREEDY, max_new_tokens=12))
    assert [token for piece in row for token in piece] == made[:at]


def test_every_file_comes_out_as_it_came_in(imported, tmp_path):
  folder, run, _ = imported
  export_model(run, tmp_path / "out")
  for name in (*(f"{n}.json" for n in list(KEPT)[:3]), "chat_template.jinja", "tokenizer.json"):
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
  assert read(tmp_path / "out") == read(folder)
  config = json.loads((tmp_path / "out" / "config.json").read_text())
  assert (config["bos_token_id"], config["eos_token_id"]) == (BOS, EOS)


def test_a_run_of_version_02_goes_out_as_before(imported, tmp_path):
  run = Path(shutil.copytree(imported[1], tmp_path / "run"))
  source = json.loads((run / SOURCE).read_text())
  del source["files"]
  (run / SOURCE).write_text(json.dumps(source))
  (run / FILE).unlink()
  export_model(run, tmp_path / "out")
  assert not (tmp_path / "out" / "generation_config.json").exists()
  assert Session(str(run)).encode(words(TEXT)) == [EOS, *TEXT]


def test_documents_of_training_text_begin_as_the_model_knows_them(imported, tmp_path):
  (tmp_path / "a.txt").write_text("\n\n".join(words(range(20, 40 + i)) for i in range(60)))
  config = DataConfig(
    path=str(tmp_path / "a.txt"),
    tokenizer=str(imported[1] / "tokenizer.json"),
    eos_token="t002",
    document_bytes=70,
    seq_len=32,
    cache_dir=str(tmp_path / "cache"),
  )
  plain = Path(tmp_path / "plain.json")
  plain.write_text((imported[1] / "tokenizer.json").read_text())
  for packing in ("concat", "pad", "pack"):
    ours, theirs = (
      open_data(DataConfig(**{**vars(config), "tokenizer": t, "packing": packing}),
                batch_size=2, seed=0)
      for t in (config.tokenizer, str(plain))
    )  # fmt: skip
    for _, batch, before in zip(range(4), ours.train(), theirs.train()):
      np.testing.assert_array_equal(batch.targets, before.targets)
      begins = (before.inputs == EOS) & (before.weights > 0)
      assert begins.any()
      assert (batch.inputs[begins] == BOS).all()
      np.testing.assert_array_equal(batch.inputs[~begins], before.inputs[~begins])
  assert ours.tokenizer.digest != theirs.tokenizer.digest


def test_texts_that_begin_with_nothing(tmp_path):
  content = tokenizer_json()
  bare = JsonTokenizer(content, eos_id=EOS, conventions=Conventions((), None, (EOS,)))
  assert prompt_ids(bare, words(TEXT)) == TEXT
  assert prompt_ids(bare, "") == [EOS]
  own = JsonTokenizer(content, eos_id=EOS)
  assert prompt_ids(own, words(TEXT)) == [EOS, *TEXT]


def test_a_damaged_file_of_conventions_is_one_line(imported, tmp_path):
  run = Path(shutil.copytree(imported[1], tmp_path / "run"))
  good = json.loads((run / FILE).read_text())
  for text, message in (
    ("[" * 10**5, "cannot be used"),
    ("{}", "does not have the fields"),
    (json.dumps(good)[:-1] + ', "bos_id": 3}', "'bos_id' is given twice"),
    (json.dumps(good | {"bos_id": 1.5}), "bos_id=1.5 is not a token id"),
    (json.dumps(good | {"stop_ids": "2"}), "stop_ids is not a list of"),
    (json.dumps(good | {"stop_ids": [10**30]}), "stop_ids is not a list of"),
    (json.dumps(good | {"begin_ids": [500]}), "names token 500; the vocabulary has 128"),
    ("x" * (2**21 + 1), "is larger than"),
  ):
    (run / FILE).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
      Session(str(run))
    assert "\n" not in str(caught.value)
  assert load_json(str(imported[1]), "t002").bos_id == BOS


# -- conversations --------------------------------------------------------------------------------


def with_template(template):
  conventions = Conventions(B, BOS, (EOS,), template)
  return JsonTokenizer(tokenizer_json(), eos_id=EOS, conventions=conventions)


def test_a_conversation_becomes_the_templates_tokens():
  template = (
    "{{ bos_token }}{%- for m in messages %}\n"
    "  {%- if loop.index0 == 5 %}{% break %}{% endif %}\n"
    " t0{{ 10 if m['role'] == 'user' else 11 }} {{ m['content'] | trim }} {{ eos_token }}\n"
    "{%- endfor %}{% if add_generation_prompt %} t011{% endif %}"
  )
  messages = [
    {"role": "user", "content": " t020 t021 "},
    {"role": "assistant", "content": "t022"},
    {"role": "user", "content": "t023"},
  ]
  want = [BOS, 10, 20, 21, EOS, 11, 22, EOS, 10, 23, EOS, 11]
  tokenizer = with_template(template)
  assert tokenizer.chat_ids(messages) == want
  assert tokenizer._tokenizer.encode_special_tokens  # of other texts they stay text


def test_what_published_templates_use():
  template = (
    "{%- set ns = namespace(n=0) -%}\n{% for m in messages %}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}\n"
    "{% set ns.n = ns.n + 1 %}\n{% endfor %}{{ ns.n }} {{ strftime_now('%Y') | length }} "
    "{{ messages[0] | tojson }}{{ tools is none }}"
  )
  messages = [{"role": "user", "content": "é<"}, {"role": "assistant", "content": "yes"}]
  found = render(template, messages, bos_token="", eos_token="")
  assert found == 'yes2 4 {"role": "user", "content": "é<"}True'


HOSTILE = {
  "code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
  "globals": "{{ messages.append.__globals__ }}",
  "import": "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
  "self": "{{ self.__init__.__globals__ }}",
  "strftime": "{{ strftime_now.__globals__['datetime'] }}",
  "a file": "{% include '/etc/passwd' %}",
  "a macro file": "{% import '/etc/passwd' as x %}",
  "without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
  "large": "{{ 'x' * 10**10 }}",
  "many": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
  "deep": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
  "mutation": "{{ messages.clear() }}",
  "refused": "{{ raise_exception('only one turn') }}",
  "syntax": "{% for %}",
  "undefined": "{{ nobody.knows.this }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(DataError, match="the chat template of this model fails: ") as caught:
    with_template(HOSTILE[name]).chat_ids([{"role": "user", "content": "t020"}])
  assert "\n" not in str(caught.value)
  assert "root:" not in str(caught.value)
  assert list(tmp_path.iterdir()) == []


def test_without_jinja_one_line_says_so(monkeypatch):
  monkeypatch.setitem(sys.modules, "jinja2", None)
  with pytest.raises(ConfigError, match=r"chat template .* needs the package 'jinja2'"):
    with_template("{{ bos_token }}").chat_ids([])


def test_chat_answers_as_one_conversation(imported, tmp_path, monkeypatch, capsys):
  template = "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %}"
  folder = model_folder(tmp_path / "m", chat_template=template)
  import_model(str(folder), tmp_path / "run")
  asked = []
  tokens = Session.tokens

  def noted(self, prompts, *args, **options):
    asked.append(prompts[0])
    return tokens(self, prompts, *args, **options)

  monkeypatch.setattr(Session, "tokens", noted)
  monkeypatch.setattr("sys.stdin", io.StringIO("t020 t021\nt022\n"))
  argv = ["--workdir", str(tmp_path / "run"), "--chat", "--temperature=0", "--max_new_tokens=3"]
  generate.main(argv)
  first, second = asked
  assert first == [BOS, 20, 21]
  answers = capsys.readouterr().out.splitlines()
  said = [int(word[1:]) for word in answers[0].split()]
  assert len(said) == 3
  assert second == [BOS, 20, 21, *said, 22]


def test_the_end_of_text_may_be_named_in_the_tokenizers_file_only(tmp_path):
  said = {"eos_token": {"content": "t009"}, "add_bos_token": True, "bos_token": T}
  folder = model_folder(tmp_path / "m", config={"eos_token_id": None}, tokenizer_config=said)
  import_model(str(folder), tmp_path / "run")
  tokenizer = Session(str(tmp_path / "run"), mesh="data=1").tokenizer
  assert (tokenizer.eos_id, tokenizer.stop_ids) == (9, {9})


def test_an_empty_input_and_one_that_is_no_utf8(imported, monkeypatch, capsys):
  argv = ["--workdir", str(imported[1]), "--chat", "--mesh=data=1"]
  monkeypatch.setattr("sys.stdin", io.StringIO(""))
  generate.main(argv)
  monkeypatch.setattr("sys.stdin", io.StringIO("t020 \udcff\n"))
  with pytest.raises(ConfigError, match="is not valid UTF-8"):
    generate.main(argv)
  assert capsys.readouterr().out == ""


def test_old_turns_make_room(imported, tmp_path):
  template = "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %}"
  import_model(str(model_folder(tmp_path / "m", chat_template=template)), tmp_path / "run")
  session = Session(str(tmp_path / "run"))
  turns = [{"role": "user", "content": words(range(10, 30))},
           {"role": "assistant", "content": words(range(10, 30))},
           {"role": "user", "content": words(range(10, 40))}]  # fmt: skip
  assert list(session.answer(turns, GREEDY, max_new_tokens=4))
  with pytest.raises(ConfigError, match=r"model.context=64; shorten"):
    list(session.answer([turns[2] | {"content": words(range(10, 80))}], GREEDY, max_new_tokens=4))
