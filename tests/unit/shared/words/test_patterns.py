"""Patterns of modules and readings: what they match, and what was meant by one that matches nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types.frame import Kind
from rankwatch.shared.words.patterns import MOST_SAID, describe_unmatched, ignorable, matches, meant, unmatched

NAMES = [
    "", "encoder.layers.0.attn", "encoder.layers.0.ffn", "decoder.layers.0.attn", "decoder.layers.0.attn:output[1]",
    "head", "head:output", "loss",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encodr.*", "encoder.*"),
        ("encoder.*.fnn", "encoder.*"),
        ("Head", "head"),
        ("*:outpt[1]", "*:output[1]"),
        ("head:outputs", "head:output"),
        ("module.encoder.*", "encoder.*"),  # DDP's name
        ("_orig_mod.module.head", "head"),
        ("layers.0.attn", "encoder.layers.0.attn"),
        ("attn", "*.attn"),
        ("atn", "*.attn"),
        ("decoder.layers.0.attn:out", "decoder.layers.0.attn:out*"),
        ("ncoder.layers.0.ffn", "encoder.layers.0.ffn"),
        (r"encoder\..*$", "encoder.*"),  # a regular expression
        ("^head$", "head"),
        ("*.rotary", ""),
        ("encoder.layers.7.atn", ""),  # there are not so many
        ("x", ""),
        ("", ""),
    ],
)
def test_what_was_meant(pattern: str, expected: str) -> None:
    assert unmatched([pattern], NAMES) == ([pattern] if pattern else [])
    assert meant(pattern, NAMES) == expected


def test_brackets_are_those_of_a_label_as_well_as_a_choice() -> None:
    assert matches("rope:output[1]", ["*:output[1]"])
    assert matches("blocks.1.ffn", ["blocks.[01].ffn"])
    assert not matches("blocks.2.ffn", ["blocks.[01].ffn"])
    assert not matches("rope:output[2]", ["*:output[1]"])


def test_the_names_of_a_reading_are_with_and_without_its_suffix_and_aliases() -> None:
    spec = makers.frame(makers.reading("weight (shard of 4)"), module="blocks.0").spec
    names = ignorable(spec, spec.readings[0])
    assert {"blocks.0", "blocks.0:weight", "blocks.0:weight (shard of 4)"} <= set(names)
    assert "weight" not in names
    loss = makers.frame(makers.reading("loss"), module="").spec.readings[0]
    assert "loss" in ignorable(spec, type(loss)(Kind.LOSS, "loss", loss.dtype))


def test_a_line_for_each_up_to_a_few() -> None:
    assert describe_unmatched("modules", ["head", "hed"], NAMES, "module of GPT") == [
        "modules: 'hed' matches no module of GPT; did you mean 'head'?"
    ]
    assert describe_unmatched("ignore", ["nothing"], [], "module") == []  # of which nothing is known
    lines = describe_unmatched("ignore", [f"no-{number}" for number in range(9)], NAMES, "module")
    assert len(lines) == MOST_SAID + 1
    assert lines[-1] == f"ignore: {9 - MOST_SAID} more match no module"


def test_the_blocks_of_a_large_model_are_looked_at_as_one() -> None:
    parts = ("attn", "attn.q_proj", "mlp.up_proj", "norm")
    names = {f"layers.{layer}.{part}:{label}" for layer in range(2000) for part in parts for label in ("output", "weight")}
    lines = describe_unmatched(
        "ignore", ["layers.*.attn.q_prj:output", "layers.1777.norn:weight", "layers.1777.norm:*"], names, "module"
    )
    assert [line.partition("did you mean ")[2] for line in lines] == [
        "'layers.*.attn.q_proj:output'?",
        "'layers.1777.norm:weight'?",
    ]
    many = [f"*.no-{number}" for number in range(256)]
    assert 3 < len(unmatched(many, names)) < 256
    hashed = {f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for number in range(100_000)}
    assert describe_unmatched("modules", many, hashed, "module")


@given(st.lists(st.text("ab.:[]*?012-\\", max_size=9), max_size=6), st.text("ab.:[]*?02!-\\^$", max_size=9))
def test_what_is_proposed_matches_something(names: list[str], pattern: str) -> None:
    found = meant(pattern, names)
    assert not found or any(matches(name, [found]) for name in names)
    missed = unmatched([pattern], names)
    assert missed == [pattern] * (not any(matches(name, [pattern]) for name in names))
