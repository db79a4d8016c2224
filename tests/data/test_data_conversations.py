"""Conversations: what is learned, what stays apart in a row, and one line for what is broken."""

import json

import numpy as np
import pytest

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import DataConfig, exercises, open_data, tokenizers
from scmoe.data.conventions import FILE, Conventions
from scmoe.data.conversations import plain_prompt
from scmoe.run.config import RunConfig
from scmoe.run.fields import with_field

E = 256  # end of text of the byte tokenizer
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turns(*contents, system=""):
  first = [{"role": "system", "content": system}] if system else []
  roles = ("user", "assistant")
  return {
    "messages": first + [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
  }


def opened(tmp_path, rows, batch_size=1, **fields):
  path = tmp_path / "chat.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  given = {"source": "chat", "path": str(path), "packing": "pack", "seq_len": 64}
  given |= {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0, "max_bad_rows": 0}
  return open_data(DataConfig(**given | fields), batch_size=batch_size, seed=0)


def rows_of(data):
  table = data._train
  return [table.read(key, data.config.document_mask) for key in table.keys(None)]


def as_text(ids):
  return "".join(chr(i) if i < 256 else "E" for i in ids)


def learned(row):
  """The targets that the loss counts, with a '.' for each that it leaves out."""
  return "".join(as_text([t]) if w else "." for t, w in zip(row["targets"], row["weights"])).rstrip(
    "."
  )


def test_the_loss_counts_the_answers_and_their_ends(tmp_path):
  data = opened(tmp_path, [turns("hi", "yes", "so", "no", system="Be.")], packing="pad", seq_len=80)
  (row,) = rows_of(data)
  text = "ESystem:\nBe.\n\nUser:\nhi\n\nAssistant:\nyesE\n\nUser:\nso\n\nAssistant:\nnoE"
  assert as_text(row["inputs"]).startswith(text)
  want = "." * text.index("yes") + "yesE"
  want += "." * (text.index("noE") - len(want)) + "noE"
  assert learned(row) == want[1:]  # a target is one place before its token
  assert data.masked
  assert "the loss counts 7 of the training tokens" in data.summary()


def test_a_completion_is_learned_and_joined_as_it_stands(tmp_path):
  (row,) = rows_of(opened(tmp_path, [{"prompt": "1+2=", "completion": " 3"}], packing="pad"))
  assert as_text(row["inputs"][:8]) == "E1+2= 3E"
  assert learned(row) == ".... 3E"


def test_all_tokens_on_request(tmp_path):
  rows = [turns("a", "b"), {"prompt": "c", "completion": "d"}]
  found = rows_of(opened(tmp_path, rows, train_on="all", seq_len=40))
  assert len(found) == 1
  assert sorted(learned(found[0]).split(".")) == ["User:\na\n\nAssistant:\nbE", "cdE"]


def test_packed_conversations_have_their_own_segments_and_positions(tmp_path):
  chats = [turns(f"q{i}", f"a{i}") for i in range(7)]
  found = rows_of(opened(tmp_path, chats, seq_len=64))
  seen = []
  for row in found:
    for number in range(1, row["segment_ids"].max() + 1):
      here = np.flatnonzero(row["segment_ids"] == number)
      assert row["positions"][here].tolist() == list(range(len(here)))
      text = as_text(row["inputs"][here])
      assert (text[0], text.count("User:")) == ("E", 1)
      # What is counted here was predicted from this conversation alone.
      counted = here[row["weights"][here] > 0]
      assert (row["targets"][counted] == row["inputs"][counted + 1]).all()
      seen.append(as_text(row["targets"][counted]))
  assert sorted(seen) == sorted(f"a{i}E" for i in range(7))
  assert max(row["segment_ids"].max() for row in found) > 1


def chat_folder(tmp_path, template=CHATML, bos=None):
  """A folder with a byte-level tokenizer, two special tokens, and a chat template."""
  text = [b"a b c user assistant system\n" * 20]
  content = json.loads(tokenizers.train_bpe(text, 300))
  size = max(content["model"]["vocab"].values()) + 1
  for token in ("<|im_start|>", "<|im_end|>"):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": size, "content": token, "special": True} | flags)
    size += 1
  folder = tmp_path / "model"
  folder.mkdir()
  (folder / "tokenizer.json").write_text(json.dumps(content))
  said = Conventions((), bos, (size - 1,), template)
  (folder / FILE).write_text(said.to_json())
  return str(folder)


def test_the_models_template_writes_messages_and_its_end_of_turn_is_learned(tmp_path):
  folder = chat_folder(tmp_path, bos=3)
  chat = turns("a b", "c", "b", " a", system="be <|im_end|>")
  data = opened(tmp_path, [chat], tokenizer=folder, packing="pad")
  (row,) = rows_of(data)
  tokenizer = data.tokenizer
  length = int((row["segment_ids"] > 0).sum())
  # Exactly the tokens of `--chat`, without the beginning of a further answer.
  asked = tokenizer.chat_ids(chat["messages"])
  begun = tokenizer.encode_written("<|im_start|>assistant\n")[0]
  assert row["inputs"][:length].tolist() == asked[: -len(begun)]
  counted = row["targets"][row["weights"] > 0].tolist()
  assert counted == tokenizer.encode_written("c<|im_end|>\n a<|im_end|>\n")[0]
  assert rows_of(opened(tmp_path, [chat], tokenizer=folder, packing="pad", chat_template="plain"))


def test_generation_asks_as_training_did(tmp_path):
  chat = turns("hi", "yes", "so", "no")
  (row,) = rows_of(opened(tmp_path, [chat], packing="pad"))
  ids = plain_prompt(chat["messages"][:3], tokenizers.ByteTokenizer())
  assert row["inputs"][: len(ids)].tolist() == ids
  assert as_text(row["inputs"][len(ids) :]).startswith("noE")


def test_long_conversations_are_refused_or_cut_and_counted(tmp_path):
  rows = [turns("q", "a"), turns("q" * 80, "b"), turns("q", "c" * 80)]
  message = (
    r"2 of 3 conversations have more than data.seq_len=64 tokens, the first \S*chat.jsonl:2, with "
    r"102, the longest 102; raise data.seq_len, or set data.long_conversations=truncate"
  )
  with pytest.raises(DataError, match=message):
    opened(tmp_path, rows)
  data = opened(tmp_path, rows, long_conversations="truncate")
  assert "2 conversations cut to data.seq_len; 1 left out, without a token to learn" in (
    data.summary()
  )
  assert sorted(learned(row).strip(".") for row in rows_of(data)) == ["aE", "c" * 43]


def test_what_is_learned_is_part_of_the_fingerprint(tmp_path):
  rows = [turns("q", "a"), {"prompt": "x", "completion": "y"}]
  some = opened(tmp_path, rows).fingerprint()
  every = opened(tmp_path, rows, train_on="all").fingerprint()
  assert some["digest"] != every["digest"]
  moved = opened(tmp_path, [rows[0], {"prompt": "", "completion": "xy"}]).fingerprint()
  assert moved["digest"] != some["digest"]


def test_conversations_beside_plain_text(tmp_path):
  (tmp_path / "a.txt").write_text("plain text\n\n" * 30)
  (tmp_path / "c.jsonl").write_text(json.dumps(turns("q", "a")) + "\n")
  mixture = f"text:{tmp_path / 'a.txt'}:0.5,chat:{tmp_path / 'c.jsonl'}:0.5"
  data = opened(tmp_path, [], source="mixture", path="", mixture=mixture, packing="pad")
  assert data.domains == ("a", "c")
  rows = rows_of(data)
  assert all((row["weights"] > 0).sum() == (2 if row["domain"] else 64) for row in rows[-1:])
  assert (rows[0]["weights"] > 0).sum() == (rows[0]["segment_ids"] > 0).sum()


GOOD = {"role": "user", "content": "q"}
BROKEN = {
  "unknown role": ([GOOD, {"role": "asistant", "content": "a"}],
                   "message 2: unknown role 'asistant'; one of: system, user, assistant, tool"),
  "no role": ([GOOD, {"content": "a"}], "message 2: unknown role 'None'"),
  "empty answer": ([GOOD, {"role": "assistant", "content": " \n"}],
                   "message 2: the assistant's turn is empty: there is nothing to learn"),
  "no answer": ([GOOD], "no turn of the assistant: there is nothing to learn"),
  "no messages": ([], "'messages' is an empty list; give a turn of the user and one of the"),
  "answer first": ([{"role": "assistant", "content": "a"}, GOOD],
                   "message 1 is the assistant's; a conversation begins with system or user"),
  "messages are text": ("hi", "'messages' holds str, not a list of objects"),
  "messages are null": (None, "'messages' holds NoneType, not a list of objects"),
  "a message is text": (["hi"], "message 1 is str, not an object with role and content"),
  "content is a number": ([GOOD, {"role": "assistant", "content": 3}],
                          "message 2: 'content' holds int, not text"),
  "content is in parts": ([{"role": "user", "content": [{"type": "text", "text": "q"}]}],
                          "message 1: 'content' holds list, not text"),
  "half a surrogate pair": ([GOOD, {"role": "assistant", "content": "\ud800"}],
                            "message 2: 'content' is not valid UTF-8"),
  "a NUL byte": ([GOOD, {"role": "assistant", "content": "a\0"}],
                 "message 2: 'content' holds a NUL byte"),
  "a call of a tool": ([GOOD, {"role": "assistant", "content": "", "tool_calls": [{}]}],
                       "message 2 has 'tool_calls', which the plain chat template cannot write"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_conversation_is_one_line_with_its_place(name, tmp_path):
  messages, why = BROKEN[name]
  with pytest.raises(DataError) as refused:
    opened(tmp_path, [turns("q", "a"), {"messages": messages}])
  text = str(refused.value)
  assert f"chat.jsonl:2: {why}" in text
  assert "\n" not in text
  assert not (tmp_path / "cache").exists()
  # As of other rows, a few bad ones may be skipped.
  data = opened(tmp_path, [turns("q", "a"), {"messages": messages}], max_bad_rows=1)
  assert len(rows_of(data)) == 1
  assert "1 bad rows skipped" in data.summary()


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ({"text": "a"}, "no field 'messages', nor both 'prompt' and 'completion'; it has: text"),
    ({"prompt": "a"}, "no field 'messages', nor both 'prompt' and 'completion'; it has: prompt"),
    ({"prompt": "a", "completion": ""}, "'completion' is empty: there is nothing to learn"),
    ({"prompt": 1, "completion": "b"}, "'prompt' holds int, not text"),
    ({"messages": [], "completion": "b"}, "both 'messages' and 'completion'; give one of them"),
    ([], "expected a JSON object, got list"),
  ],
)
def test_a_broken_row_is_one_line_with_its_place(row, why, tmp_path):
  with pytest.raises(DataError) as refused:
    opened(tmp_path, [turns("q", "a"), row])
  assert f"chat.jsonl:2: {why}" in str(refused.value)
  assert "\n" not in str(refused.value)


REWRITES = (
  "{% for m in messages %}<|im_start|>{{ m.content if loop.last or m.role == 'user' else '...' }}"
  "{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('no system here') }}{% endif %}"


@pytest.mark.parametrize(
  ("template", "why"),
  [
    (REWRITES, "the chat template of this model writes earlier turns differently"),
    (STRICT, "the chat template of this model fails: TemplateError: no system here"),
    ("{% for", "the chat template of this model fails: TemplateSyntaxError"),
  ],
)
def test_a_template_that_cannot_write_a_row_is_one_line(template, why, tmp_path):
  folder = chat_folder(tmp_path, template)
  with pytest.raises(DataError) as refused:
    opened(tmp_path, [turns("a", "b", "c", "a", system="s")], tokenizer=folder)
  assert f"chat.jsonl:1: {why}" in str(refused.value)
  assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"chat_template": "model"}, "data.tokenizer='bytes' has no chat template"),
    ({"packing": "concat"}, "data.packing='concat' cuts conversations"),
    ({"document_mask": False}, "lets the conversations of a row attend to each other"),
  ],
)
def test_options_that_do_not_fit_conversations(fields, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    opened(tmp_path, [turns("q", "a")], **fields)


def test_a_model_that_attends_across_conversations_is_refused():
  run = RunConfig(data=DataConfig(source="chat", packing="pack", seq_len=64))
  with pytest.raises(ConfigError, match=r"model.document_mask=False lets the conversations"):
    run.resolve(num_devices=1, vocab_size=257)
  with_field(run, "model.document_mask", "true").resolve(num_devices=1, vocab_size=257)


def test_the_exercises_are_right():
  rows = list(exercises.conversations())
  assert len(rows) == exercises.COUNT
  for row in rows[:50]:
    asked = row.get("messages") or [{"content": row["prompt"]}, {"content": row["completion"]}]
    asked = [m["content"] for m in asked if m.get("role") != "system"]
    for question, answer in zip(asked[::2], asked[1::2]):
      numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in question).split()]
      assert sum(numbers) == int(answer)
