"""Regular expressions from strangers: they mean what Python's `re` says, and they cannot hang."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qconvert.formats import patterns
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.patterns import (
    Budget,
    PatternError,
    compile_all,
    compile_pattern,
    is_broken,
    option_pattern,
    option_rule,
    wildcard,
)

ATOMS = st.sampled_from(
    ["a", "b", "0", ".", r"\.", r"\d", r"\w", r"\s", "[ab]", "[^a]", "[a-c0-9]", "^", "$", r"\b", "é", "-"]
)
WHOLE = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        inner.map(lambda part: f"(?:{part})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)
NAMES = st.text("ab0c._-é\n", max_size=12)
REPLACEMENTS = st.sampled_from(["", "x", r"<\g<0>>", r"\\", "é.", r"\g<0>\g<0>"])


@settings(max_examples=400, deadline=None)
@given(WHOLE, NAMES, REPLACEMENTS)
def test_a_pattern_means_what_re_says_or_is_refused(text: str, name: str, replacement: str) -> None:
    pattern = compile_pattern(text)
    theirs = re.compile(text)
    try:
        found = pattern.fullmatch(name), pattern.match(name), pattern.search(name)
        replaced = pattern.sub(replacement, name)
    except PatternError as error:
        assert "plain ASCII" in str(error) and not (name.isascii() and name.isprintable())
        return
    assert found == (
        theirs.fullmatch(name) is not None,
        theirs.match(name) is not None,
        theirs.search(name) is not None,
    )
    # Where a lazy pattern matches nothing, re looks for something at the same place once more.
    if all(found.group() for found in theirs.finditer(name)):
        assert replaced == theirs.sub(replacement, name)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@settings(max_examples=300, deadline=None)
@given(st.text(r"ab0{},.[]:^-\QEpCzxZAdw()?<>PUi=!|*+$#&~", max_size=14), st.text("abQ{},[]:0-", max_size=8))
def test_what_is_not_understood_alike_is_refused(text: str, name: str) -> None:
    """Any text whatever: where ours takes it and Python takes it, both find the same."""
    try:
        pattern = compile_pattern(text)
        theirs = re.compile(text)
    except (PatternError, re.error):
        return
    assert pattern.fullmatch(name) == (theirs.fullmatch(name) is not None)
    assert pattern.search(name) == (theirs.search(name) is not None)


@pytest.mark.parametrize(
    ("text", "replacement", "name", "expected"),
    [
        (r"^blocks\.(\d+)\.", r"layers.\1.x.", "blocks.12.w", "layers.12.x.w"),
        (r"(?P<a>a+)(b)?", r"\g<a>-\2|", "aab a", "aa-b| a-|"),
        ("literal", r"\g<0>!", "a.literal.b", "a.literal!.b"),
        ("^", "model.", "w", "model.w"),
        ("é+", "ü", "caféé", "cafü"),
    ],
)
def test_replacements(text: str, replacement: str, name: str, expected: str) -> None:
    assert compile_pattern(text).sub(replacement, name) == expected == re.sub(text, replacement, name)


@pytest.mark.parametrize("replacement", [r"\1", r"\g<x>", r"\g<1>", r"\n", "\\"])
@pytest.mark.parametrize("text", ["a", "a+"])
def test_a_replacement_that_makes_no_sense_is_refused(text: str, replacement: str) -> None:
    with pytest.raises(QConvertError):
        compile_pattern(text).sub(replacement, "aa")
    with pytest.raises(UsageError, match="--rename"):
        option_rule(text, replacement, "--rename")


def test_a_rule_is_checked_before_it_is_needed() -> None:
    pattern, replacement = option_rule(r"(a)(?P<n>b)?", r"\1\2\g<n>\g<0>", "--rename")
    assert pattern.sub(replacement, "xa") == "xaa"


@pytest.mark.parametrize(
    "text",
    [
        "(?=a)",
        "(?!a)b",
        "(?<=a)b",
        r"(a)\1",
        "(?P=x)",
        "a{,3}",
        "[[:alpha:]]",
        r"\Qa.b\E",
        r"\pL",
        r"\x{61}",
        "(?<n>a)",
        "(?U)a",
        "(",
        "a**",
        "*",
        "\\",
        "a{1001}",
        "((a{100}){100}){100}",
        "a" * 1001,
        "(" * 500 + ")" * 500 + "x" * 2,
        "\ud800.",
    ],
)
def test_what_the_engine_cannot_promise_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PatternError) as caught:
        compile_pattern(text)
    assert "\n" not in caught.value.line() and not caught.value.line().startswith("b'")
    with pytest.raises(UsageError, match="--keep"):
        option_pattern(text, "--keep")


def test_patterns_that_hang_other_engines_take_linear_time() -> None:
    names = ["a" * 999 + "!", "ab" * 500, "a." * 500]
    begun = time.process_time()
    for text in ("(a+)+$", "(a|aa)+$", "(.*)*x", "(?:a?){400}a{400}", ".*.*.*.*.*.*x", r"(\w+\.?)+$"):
        pattern = compile_pattern(text)
        for name in names:
            pattern.search(name)
            pattern.fullmatch(name)
    # Minutes to ages by backtracking; a bound far above what any machine needs.
    assert time.process_time() - begun < 20


def test_a_budget_ends_what_is_slow_and_lets_pass_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    cost = [2e-6]

    def now() -> float:
        clock[0] += cost[0] / 2
        return clock[0]

    monkeypatch.setattr(patterns.time, "thread_time", now)
    first, second = (compile_pattern(text, shared) for shared in [Budget(1.0)] for text in ("a+", "b+"))
    for _ in range(100_000):
        first.search("aaa")
    cost[0] = 0.2
    with pytest.raises(PatternError, match="take too long"):
        for _ in range(20):
            first.search("aaa")
            second.search("aaa")


def test_names_and_documents_have_limits() -> None:
    with pytest.raises(PatternError, match="too long"):
        compile_pattern("a+").search("a" * 1001)
    assert compile_pattern("a").search("a" * 100_000)
    assert len(compile_all(tuple(f"a{i}+" for i in range(200)))) == 200
    with pytest.raises(PatternError, match="201"):
        compile_all(tuple(f"a{i}+" for i in range(201)))


@settings(max_examples=300, deadline=None)
@given(st.text("ab*.", max_size=8), st.text("ab.", max_size=10))
def test_wildcards(text: str, name: str) -> None:
    expected = re.fullmatch(".*".join(map(re.escape, text.split("*"))), name, re.DOTALL) is not None
    assert wildcard(text, name) == expected


def test_many_wildcards_take_linear_time() -> None:
    assert not wildcard("*a" * 5000 + "b", "a" * 100_000)
    assert wildcard("*a" * 5000, "a" * 100_000)


@pytest.mark.parametrize(("text", "broken"), [("(", True), ("a**", True), ("a+", False), ("(?=a)", False)])
def test_what_python_takes_for_no_pattern(text: str, broken: bool) -> None:
    assert is_broken(text) is broken
