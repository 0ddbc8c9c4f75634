"""Browser scripts of rollouts: pieces of text that add up, numbers that survive, hostile text that stays data."""

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from fake_runs import byte_level, row, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.report.behaviour import load_phrases
from dapo.report.rollouts import chunks
from dapo.report.rollouts.chunks import make_chunks, parse_script, write_chunks
from dapo.report.rollouts.index import Index
from dapo.report.rollouts.pieces import TokenPieces, utf16_units
from dapo.report.rollouts.recorded import drop_after, groups_of, read_table, records_of

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "<img src=x onerror=alert(1)>",
    "line\u2028separator\u2029",
    "\u202eevil\u202c \u200f",
    "nul\x00 and \x1b[31m escape",
    '"]);alert(1);//',
    "\\u003cscript\\u003e",
    "__proto__",
    "日本語のテキスト 🎲🧮",
    "",
]
PIECES = TokenPieces(byte_level())


def decode(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=kind)


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_pieces_add_up_to_the_text_whatever_it_is(text: str):
    text = text.encode("utf-8", "replace").decode()
    tokens = PIECES.tokenizer.encode(text).ids
    shown, units = PIECES.split(tokens, text)
    assert shown == text
    assert len(units) == len(tokens)
    assert int(units.sum()) == utf16_units(text) == len(text.encode("utf-16-le")) // 2


def test_a_character_belongs_to_the_token_that_completes_it():
    # Byte-level without merges: the 4 bytes of the die are 4 tokens; a browser counts the character as 2 units.
    tokens = PIECES.tokenizer.encode("a🎲b").ids
    shown, units = PIECES.split(tokens, "a🎲b")
    assert shown == "a🎲b"
    assert units.tolist() == [1, 0, 0, 0, 2, 1]


def test_a_torn_character_at_the_end_is_shown_as_such():
    tokens = PIECES.tokenizer.encode("a🎲").ids[:-1]
    shown, units = PIECES.split(tokens, "a�")
    assert shown == "a�"
    assert int(units.sum()) == 2


def test_end_tokens_are_shown():
    eos = PIECES.tokenizer.token_to_id("<eos>")
    shown, units = PIECES.split([*PIECES.tokenizer.encode("wait").ids, eos], "wait")
    assert shown == "wait<eos>"
    assert units[-1] == 5


def test_sentencepiece_and_unknown_kinds():
    words = {"<unk>": 0, "▁the": 1, "▁answer": 2, "<0x0A>": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    sentence = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    sentence.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    assert TokenPieces(sentence).split([1, 2, 3, 4, 5, 6], "")[0] == " the answer\n€"
    spaced = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))
    shown, units = TokenPieces(spaced).split([0, 1, 2], "one two three")
    assert shown == "one two three"
    assert units.tolist() == [3, 4, 6]


def test_a_token_that_the_vocabulary_lacks_leaves_the_text_whole():
    shown, units = PIECES.split([10**6], "text")
    assert shown == "text"
    assert len(units) == 0


def test_numbers_survive_the_way_to_the_browser():
    one = row(PIECES, "the answer is 42")
    one["clip"][1], one["clip"][3] = -1, 1
    one["ratio"][0] = float("nan")
    made = dict(make_chunks(table_of([one]), "step-000010", PIECES, load_phrases()))
    (group,) = parse_script(made["000"])
    (response,) = group["responses"]
    n = len(one["tokens"])
    np.testing.assert_allclose(decode(response["logp"], "<f2"), one["logp_old"], atol=1e-3)
    np.testing.assert_allclose(decode(response["entropy"], "<f2"), one["entropy"], atol=1e-3)
    ratio = np.exp(decode(response["log_ratio"], "<f2").astype(np.float64))
    assert np.isnan(ratio[0])  # a token no update has seen
    np.testing.assert_allclose(ratio[1:], one["ratio"][1:], rtol=1e-3)
    assert response["advantage"] == 0.5  # one number where all tokens share it
    assert response["clip"] == [[1, -1], [3, 1]]
    assert decode(response["units"], "<u2").sum() == len(response["text"])
    assert response["n"] == n
    index = parse_script(made["index"])
    assert (index["groups"]["low"], index["groups"]["high"]) == ([1], [1])
    low = PIECES.bytes[int(one["tokens"][1])].decode()
    assert index["summary"]["clipped_low"] == [[low, 1]]


def test_a_critics_advantages_are_kept_per_token():
    one = row(PIECES, "the answer")
    one["advantage"] = np.linspace(-1, 1, len(one["tokens"]), dtype=np.float32)
    (group,) = parse_script(dict(make_chunks(table_of([one]), "step-000010", PIECES, load_phrases()))["000"])
    np.testing.assert_allclose(decode(group["responses"][0]["advantage"], "<f2"), one["advantage"], atol=1e-3)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_plain_ascii_data_and_comes_back_as_it_was(text: str):
    rows = [row(PIECES, text, problem=f"p {text}", question=text, answer=text, extracted=text, source=text)]
    for name, script in make_chunks(table_of(rows), "step-000010", PIECES, load_phrases()):
        assert script.isascii()
        assert "\x00" not in script
        assert script.startswith('dapo.put("step-000010/')
        assert script.endswith(");\n")
        assert script.count("\n") == 1
        value = parse_script(script)
        if name != "index":
            assert value[0]["question"] == text
            assert value[0]["responses"][0]["text"].removesuffix("<eos>") == text
    assert "NaN" not in script


def test_a_script_is_one_call_with_json_and_no_more():
    rows = [row(PIECES, '");alert(1);dapo.put("x', problem='");alert(1);//')]
    for _, script in make_chunks(table_of(rows), "step-000010", PIECES, load_phrases()):
        name, end = json.JSONDecoder().raw_decode(script[len(chunks.PREFIX) :])
        assert name.startswith("step-000010/")
        body = script[len(chunks.PREFIX) + end + 1 :]
        _, end = json.JSONDecoder().raw_decode(body)
        assert body[end:] == chunks.SUFFIX


def test_many_groups_are_split_into_pieces_and_the_index_finds_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "PIECE_CHARACTERS", 3000)
    rows = [row(PIECES, f"the answer is {p}", problem=f"p{p}", index=i) for p in range(9) for i in range(2)]
    made = dict(make_chunks(table_of(rows), "step-000010", PIECES, load_phrases()))
    index = parse_script(made["index"])
    assert index["summary"]["pieces"] == len(made) - 1 > 1
    for name, piece, at in zip(*(index["groups"][k] for k in ("id", "piece", "at")), strict=True):
        assert parse_script(made[f"{piece:03d}"])[at]["id"] == name


def test_two_visits_to_a_problem_are_two_groups():
    rows = [row(PIECES, "x", visit=v, index=i) for v in (0, 1) for i in range(2)]
    index = parse_script(dict(make_chunks(table_of(rows), "step-000010", PIECES, load_phrases()))["index"])
    assert index["groups"]["visit"] == [0, 1]
    assert index["groups"]["size"] == [2, 2]


def test_an_error_leaves_neither_half_a_folder_nor_what_it_was_written_in(tmp_path):
    table = table_of([row(PIECES, "text", problem="p", index=0)])
    folder = tmp_path / "step-000001"
    write_chunks(table, folder, PIECES)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(AttributeError):
        write_chunks(table, folder, PIECES, object())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert sorted(path.name for path in folder.iterdir()) == before


def test_the_folder_appears_whole_and_goes_with_its_step(tmp_path):
    table = table_of([row(PIECES, "x")])
    for step in (5, 10, 1_000_000):
        write_chunks(table, tmp_path / f"step-{step:06d}", PIECES)
    assert sorted(p.name for p in (tmp_path / "step-000005").iterdir()) == ["000.js", "index.js"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert [p.stem for p in records_of(tmp_path)] == ["step-000005", "step-000010", "step-1000000"]
    (tmp_path / "step-000005.parquet").touch()
    drop_after(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000005", "step-000005.parquet"]


def test_answers_are_counted_by_their_value_not_by_their_spelling():
    index = Index("step-000001", load_phrases())
    for problem, (reference, said) in enumerate([("4", ["$4$", "4"]), ("4.0", ["$4$", "9"]), ("9", ["$4$", None])]):
        rows = [row(PIECES, "text", problem=str(problem), index=i, answer=reference) for i in range(len(said))]
        about = {"verdict": "WRONG", "n": 4, "reward": -1.0, "stop": "EOS", "behaviour": [], "is_answer_only": False}
        index.add(rows, [about | {"extracted": text} for text in said], piece=0, at=0, pieces=None)
    # 4 is said four times of six, most often as $4$, and is the reference of the first two problems.
    assert index.to_json()["summary"]["top_answer"] == ["$4$", 4, 2]
    assert index.groups["answers"] == [1, 2, 2]  # nothing read is an answer of its own


# ------------------------------------------------------------------ borders


@pytest.mark.parametrize("n_groups", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n_more", [-1, 0, 1])
def test_border_every_group_lies_in_one_piece_where_the_index_says(
    n_groups: int, n_more: int, monkeypatch: pytest.MonkeyPatch
):
    """A piece holds just three groups, or a character less or more than that."""
    rows = [row(PIECES, f"the answer is {p}", problem=f"p{p}", index=i) for p in range(n_groups) for i in range(2)]
    one = parse_script(dict(make_chunks(table_of(rows[:2]), "step-000010", PIECES, load_phrases()))["000"])
    monkeypatch.setattr(chunks, "PIECE_CHARACTERS", 3 * len(json.dumps(one[0])) + n_more)
    made = dict(make_chunks(table_of(rows), "step-000010", PIECES, load_phrases()))
    index = parse_script(made.pop("index"))
    pieces = [parse_script(made[name]) for name in sorted(made)]
    assert [group["id"] for piece in pieces for group in piece] == [f"p{p}" for p in range(n_groups)]
    per_piece = 2 if n_more < 0 else 3
    assert [len(piece) for piece in pieces] == [
        len(range(n_groups)[i : i + per_piece]) for i in range(0, n_groups, per_piece)
    ]
    places = list(zip(*(index["groups"][name] for name in ("piece", "at")), strict=True))
    assert places == [(at, i) for at, piece in enumerate(pieces) for i in range(len(piece))]
    assert index["groups"]["size"] == [2] * n_groups


@pytest.mark.parametrize("n_rows", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("per_group", [1, 2, 3])
def test_border_rows_keep_their_numbers_where_parts_of_a_table_end(n_rows: int, per_group: int, tmp_path):
    """Parts of four rows, as parquet has them; rows of no token, one, and more."""
    rows = [
        row(
            PIECES,
            "x" * (i % 3),
            problem=f"p{i // per_group}",
            index=i % per_group,
            tokens=np.arange(i % 3, dtype=np.int32) + i,
        )
        for i in range(n_rows)
    ]
    table = pa.concat_tables([table_of(rows[at : at + 4]) for at in range(0, n_rows, 4)])
    pq.write_table(table, tmp_path / "step-000001.parquet", row_group_size=4)
    for read in (table, read_table(tmp_path / "step-000001.parquet")):
        groups = list(groups_of(read))
        assert [len(group) for group in groups] == [
            len(rows[at : at + per_group]) for at in range(0, n_rows, per_group)
        ]
        assert [one["tokens"].tolist() for group in groups for one in group] == [one["tokens"].tolist() for one in rows]
        assert [one["response_text"] for group in groups for one in group] == [one["response_text"] for one in rows]


def test_border_a_step_without_responses_is_an_index_of_nothing():
    empty = table_of([row(PIECES, "x")]).slice(0, 0)
    ((name, text),) = make_chunks(empty, "step-000010", PIECES, load_phrases())
    assert (name, parse_script(text)["summary"]["pieces"]) == ("index", 0)


@pytest.mark.parametrize("last_step", [0, 4, 5, 6, 11])
def test_border_records_after_the_last_step_go_and_no_other(last_step: int, tmp_path):
    for step in (4, 5, 6, 11):
        (tmp_path / f"step-{step:06d}.parquet").touch()
        (tmp_path / f"step-{step:06d}").mkdir()
    drop_after(tmp_path, last_step)
    kept = [step for step in (4, 5, 6, 11) if step <= last_step]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"step-{s:06d}{end}" for s in kept for end in ("", ".parquet")
    )


def test_what_the_environment_said_is_marked():
    one = row(PIECES, "abcdef")
    mask = [True, False, False, True, True, False]
    scripts = dict(make_chunks(table_of([one | {"own": mask}]), "step-000001", PIECES, load_phrases()))
    (group,) = json.loads(scripts["000"].partition(",")[2][:-3])
    assert group["responses"][0]["others"] == [[1, 3], [5, 6]]
    plain = dict(make_chunks(table_of([one]), "step-000001", PIECES, load_phrases()))
    assert "others" not in json.loads(plain["000"].partition(",")[2][:-3])[0]["responses"][0]
