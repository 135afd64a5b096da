"""Budgets as users write them."""

from __future__ import annotations

import pytest

from oallama.data.budget import Budget, format_bytes, parse_budget
from oallama.errors import OallamaError

GIB = 2**30


def parse(value):
    return parse_budget(value, weights_bytes=1000, free_bytes=77)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (8 * GIB, 8 * GIB),
        (4096.0, 4096),
        ("8GiB", 8 * GIB),
        ("8 GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5G", int(1.5 * GIB)),
        ("0.5 m", 2**19),
        ("2T", 2 * 2**40),
        ("64k", 65536),
        ("1234", 1234),
        ("1234B", 1234),
        (" 3KiB ", 3072),
    ],
)
def test_bytes(value, nbytes):
    assert parse(value) == Budget(nbytes, None, str(value).strip())


def test_share_limits_the_weights_only():
    assert parse("75%") == Budget(None, 750, "75%")
    assert parse("12.5 %") == Budget(None, 125, "12.5 %")
    assert parse("100%").weights_bytes == 1000


def test_auto_is_free_memory():
    assert parse("Auto") == Budget(77, None, "auto")
    assert parse("auto").is_auto
    assert not parse("77").is_auto
    with pytest.raises(OallamaError, match="no free memory"):
        parse_budget("auto", weights_bytes=1, free_bytes=0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "at least one byte"),
        ("-8GiB", "at least one byte"),
        ("0%", "above 0%"),
        ("-3%", "above 0%"),
        ("101%", "at most 100%"),
        ("8 gigs", 'cannot read the memory budget .*expected bytes, "8GiB"'),
        ("1.2.3G", "cannot read the memory budget"),
    ],
)
def test_what_is_wrong_with_a_budget(value, words):
    with pytest.raises(OallamaError, match=words):
        parse(value)


@pytest.mark.parametrize(
    "value",
    [
        -1, 0.0, -5.0, 0.75, float("nan"), float("inf"), True, None, [], "", "0", "GiB", "8Gi", "8iB", "%", "eight",
        "1e9", "0.1",
    ],
)  # fmt: skip
def test_bad_budgets(value):
    with pytest.raises(OallamaError, match="budget") as error:
        parse(value)
    assert "\n" not in str(error.value)


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536 * 2**20, 3 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 GiB", "3.0 TiB",
    ]  # fmt: skip
