"""Stop strings over a stream: the same text whatever the pieces, and never a part of a stop
string that is completed later."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.text.stop import StopStrings


def by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cut at the stop string that is complete first, the longest of those complete at the same
    place."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


def feed(stops: StopStrings, pieces: list[str]) -> list[str]:
    """What is shown after each piece, and by the flush at the end."""
    shown = [stops.push(piece) for piece in pieces]
    return [*shown, stops.flush()]


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


letters = st.text("ab", max_size=30)
few_stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@settings(max_examples=800, deadline=None)
@given(
    text=letters,
    stops=few_stops,
    cuts=st.lists(st.integers(0, 40), max_size=12),
    include=st.booleans(),
)
def test_any_split_shows_what_the_definition_says(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    wanted, found = by_definition(text, stops, include)
    stream = StopStrings(stops, include)
    assert "".join(feed(stream, split(text, cuts))) == wanted
    assert stream.found == found


@settings(max_examples=500, deadline=None)
@given(text=letters, later=letters, stops=few_stops, cuts=st.lists(st.integers(0, 40), max_size=12))
def test_what_is_shown_is_never_taken_back(
    text: str, later: str, stops: list[str], cuts: list[int]
) -> None:
    """Whatever follows, the text shown so far begins the final one."""
    stream = StopStrings(stops)
    shown = "".join(stream.push(piece) for piece in split(text, cuts))
    assert by_definition(text + later, stops, include=False)[0].startswith(shown)


@settings(max_examples=400, deadline=None)
@given(text=letters, stops=few_stops)
def test_no_more_is_held_back_than_needed(text: str, stops: list[str]) -> None:
    """The held tail begins some stop string: the next pieces could complete it."""
    stream = StopStrings(stops)
    shown = "".join(stream.push(letter) for letter in text)
    if stream.found is None:
        tail = text[len(shown) :]
        assert not tail or any(stop.startswith(tail) and stop != tail for stop in stops)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=40),
    stop=st.text(min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_any_unicode(text: str, stop: str, cuts: list[int]) -> None:
    text = text[:20] + stop + text[20:]
    assert (
        "".join(feed(StopStrings([stop]), split(text, cuts)))
        == by_definition(text, [stop], False)[0]
    )


def test_a_stop_across_pieces() -> None:
    stream = StopStrings(["\n\nUser:"])
    assert feed(stream, ["Hello\n", "\nUs", "er", ": more", "and more"]) == [
        "Hello",
        "",
        "",
        "",
        "",
        "",
    ]
    assert stream.found == "\n\nUser:"


def test_a_tail_that_turned_out_to_be_text_is_shown() -> None:
    assert feed(StopStrings(["END"]), ["a E", "N", "x", "EN"]) == ["a ", "", "ENx", "", "EN"]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        (["b", "ab"], "xab", "x", "ab"),  # both end at the same place: the longest
        (["abcd", "bc"], "abcd", "a", "bc"),  # the one complete first
        (["aab"], "aaab", "a", "aab"),  # a false start inside
        (["a", "aa"], "aa", "", "a"),
        (["xyz"], "xyxyz!", "xy", "xyz"),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, shown: str, found: str) -> None:
    for pieces in ([text], list(text)):
        stream = StopStrings(stops)
        assert "".join(feed(stream, pieces)) == shown
        assert stream.found == found


def test_include_shows_the_stop_and_nothing_after_it() -> None:
    stream = StopStrings(["END"], include=True)
    assert feed(stream, ["one E", "ND two", "three"]) == ["one ", "END", "", ""]


def test_without_stops_text_passes_through() -> None:
    assert feed(StopStrings([]), ["a", "", "b"]) == ["a", "", "b", ""]


def test_flush_empties_the_tail() -> None:
    stream = StopStrings(["ab"])
    assert stream.push("a") == ""
    assert stream.flush() == "a"
    assert stream.flush() == ""


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=60),
    stops=st.lists(st.text("ab", min_size=3, max_size=12), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=20),
    include=st.booleans(),
)
def test_stops_that_begin_and_end_alike(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    stream = StopStrings(stops, include)
    wanted, found = by_definition(text, stops, include)
    assert "".join(feed(stream, split(text, cuts))) == wanted
    assert stream.found == found


def test_long_stops_cost_a_character_no_more_than_short_ones() -> None:
    """The text keeps to one stop of 1,024 characters; comparing the tail with each beginning of 63
    others took 10 seconds."""
    stops = ["ab" * 511 + "ac", *("aa" * 511 + f"{i:02}" for i in range(63))]
    start = time.process_time()
    stream = StopStrings(stops)
    shown = [stream.push("abab") for _ in range(1500)]
    shown.append(stream.flush())
    assert "".join(shown) == "abab" * 1500
    assert time.process_time() - start < 2.0


def test_choices_of_a_request_share_their_automaton() -> None:
    one, other = (StopStrings(["one", "two"]) for _ in range(2))
    assert one.automaton is other.automaton
    assert one.push("on") == other.push("tw") == ""
    assert one.push("e") == other.push("o") == ""
    assert (one.found, other.found) == ("one", "two")
