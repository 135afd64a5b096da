"""A recipe: which type every tensor of a model gets; by name, from a file, from single rules.

A recipe is a base and rules in front of it: the first rule whose pattern is found in a tensor's name decides, the base
decides about the rest. The base is a type for everything ("q4_0"), one of llama.cpp's own mixes ("Q4_K_M", which goes
by layer and matrix) or "keep", the types of the input.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..base.jsonfile import read_json_object, write_text_atomic
from ..errors import OallamaError
from .types import TYPES, bits_per_weight, type_named

SCHEMA = "oallama.recipe/1"
KEEP = "keep"
_REMEDY = "write one with `oallama quantize search`, or see docs/types.md"

# llama-quantize's file types that are mixes.
MIXES = {
    "Q8_0": "q8_0 everywhere",
    "Q6_K": "q6_K everywhere",
    "Q5_K_M": "q5_K; attention values, ffn_down of some layers and the output q6_K",
    "Q5_K_S": "q5_K; the output q6_K",
    "Q5_1": "q5_1; the output q6_K",
    "Q5_0": "q5_0; the output q6_K",
    "Q4_K_M": "q4_K; attention values, ffn_down of some layers and the output q6_K",
    "Q4_K_S": "q4_K; first layers q5_K, the output q6_K",
    "Q4_1": "q4_1; the output q6_K",
    "Q4_0": "q4_0; the output q6_K",
    "IQ4_NL": "iq4_nl; some q5_K, the output q6_K",
    "IQ4_XS": "iq4_xs; some q5_K, the output q6_K",
    "Q3_K_L": "q3_K; attention values, output and ffn_down q5_K, the output q6_K",
    "Q3_K_M": "q3_K; attention values, output and ffn_down q4_K to q5_K, the output q6_K",
    "Q3_K_S": "q3_K; the output q6_K",
    "IQ3_M": "iq3_s; some q4_K, the output q6_K",
    "IQ3_S": "iq3_s; some q4_K, the output q6_K",
    "IQ3_XS": "iq3_s and iq3_xxs (importance matrix)",
    "IQ3_XXS": "iq3_xxs (importance matrix)",
    "Q2_K": "q2_K; attention and ffn_down q3_K to q4_K, the output q6_K",
    "Q2_K_S": "q2_K (importance matrix)",
    "IQ2_M": "iq2_s (importance matrix)",
    "IQ2_S": "iq2_xs (importance matrix)",
    "IQ2_XS": "iq2_xs (importance matrix)",
    "IQ2_XXS": "iq2_xxs (importance matrix)",
    "IQ1_M": "iq1_m (importance matrix)",
    "IQ1_S": "iq1_s (importance matrix)",
}


@dataclass(frozen=True)
class Rule:
    """The type of every tensor whose name `pattern` (a regular expression of Python) is found in."""

    pattern: str
    type: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise OallamaError(f"{self.pattern!r} is no regular expression: {error}") from None
        object.__setattr__(self, "type", type_named(self.type))

    @classmethod
    def parse(cls, text: str) -> Rule:
        """A rule as on the command line: "ffn_down=q6_K"."""
        pattern, equals, type = text.rpartition("=")
        if not (pattern and equals and type):
            raise OallamaError(f"expected PATTERN=TYPE, got {text!r}; for example 'ffn_down=q6_K'")
        return cls(pattern, type)


@dataclass(frozen=True)
class Recipe:
    """See the top of this file. name: for people."""

    name: str
    base: str
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.base not in (KEEP, *TYPES, *MIXES):
            raise OallamaError(f"unknown base {self.base!r} of a recipe; expected {_bases()}")

    def before(self, rules: Iterable[Rule]) -> Recipe:
        """The recipe with `rules` in front of its own."""
        rules = tuple(rules)
        changed = ", ".join(f"{rule.pattern}={rule.type}" for rule in rules)
        return replace(self, name=f"{self.name} + {changed}", rules=(*rules, *self.rules)) if rules else self

    def rule_for(self, tensor: str) -> Rule | None:
        """The rule that decides about a tensor, None when the base does."""
        return next((rule for rule in self.rules if re.search(rule.pattern, tensor)), None)

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, object] | None = None) -> None:
        """Write it as a file that `load` takes; notes: how it was found. Raises OallamaError."""
        content = {"schema": SCHEMA, "name": self.name, "base": self.base}
        rules = [[rule.pattern, rule.type] for rule in self.rules]
        text = json.dumps({**content, "rules": rules, "notes": dict(notes or {})}, indent=1)
        write_text_atomic(path, text + "\n", "recipe")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read `save`'s file; raises OallamaError for what is no recipe, an unknown base, type or pattern."""
        content = read_json_object(path, "recipe", _REMEDY)
        if content.get("schema") != SCHEMA:
            raise OallamaError(f"recipe {path} has schema {content.get('schema')!r}, expected {SCHEMA!r}; {_REMEDY}")
        rules, base = content.get("rules", []), content.get("base")
        pairs = isinstance(rules, list) and all(
            isinstance(r, list) and len(r) == 2 and all(isinstance(part, str) for part in r) for r in rules
        )
        if not (pairs and isinstance(base, str)):
            raise OallamaError(f'recipe {path} needs "base" and "rules": [["pattern", "type"], ...]; {_REMEDY}')
        return cls(str(content.get("name", Path(path).stem)), base, tuple(Rule(*rule) for rule in rules))


_ATTENTION = r"\.attn_"
# Bits of attention / embedding and output / feed-forward. The first is ML Drift's (SPEC section 3).
OURS = {
    recipe.name: recipe
    for recipe in (
        Recipe("8/4/4", "q4_0", (Rule(_ATTENTION, "q8_0"),)),
        Recipe("8/4/4-K", "q4_K", (Rule(_ATTENTION, "q8_0"),)),
        Recipe("6/4/4-K", "q4_K", (Rule(_ATTENTION, "q6_K"),)),
        Recipe("8/8/4", "q4_0", (Rule(_ATTENTION, "q8_0"), Rule(r"^(token_embd|output)\.", "q8_0"))),
    )
}
_PARTS = {_ATTENTION: "attention", r"^(token_embd|output)\.": "embedding and output"}


def named(text: str) -> Recipe:
    """The recipe of a name (ours, a type, a mix of llama.cpp's) or in a file; raises OallamaError.

    Types and mixes differ by case where both exist: "q4_0" is every tensor, "Q4_0" is llama.cpp's mix.
    """
    if text in OURS:
        return OURS[text]
    if text in TYPES or text in MIXES:
        return Recipe(text, text)
    if os.path.sep in text or text.endswith(".json") or Path(text).is_file():
        return Recipe.load(text)
    alike = {name.lower(): name for name in (*OURS, *TYPES, *MIXES)}
    if (found := alike.get(text.lower())) is not None:
        return named(found)
    raise OallamaError(f"unknown recipe {text!r}; expected {', '.join(OURS)}, {_bases()}, or a recipe file")


def described() -> list[tuple[str, str, str]]:
    """(name, kind, what it does) of every recipe with a name."""
    rows = [(recipe.name, "oallama", _sentence(recipe)) for recipe in OURS.values()]
    rows += [(name, "llama.cpp", text) for name, text in MIXES.items()]
    return rows + [(name, "type", f"every matrix, {bits_per_weight(name):g} bits a weight") for name in TYPES]


def rules_of(types: Mapping[str, str]) -> tuple[str, tuple[Rule, ...]]:
    """(base, rules) that give each tensor of `types` its type, the layers of one kind and type in one rule."""
    base = max(sorted(set(types.values())), key=lambda type: sum(t == type for t in types.values()))
    groups: dict[tuple[str, str, str], list[int]] = {}
    rules = []
    for name, type in types.items():
        if type == base:
            continue
        if match := re.fullmatch(r"blk\.(\d+)(\..+)", name):
            groups.setdefault(("blk", match[2], type), []).append(int(match[1]))
        else:
            rules.append(Rule(f"^{re.escape(name)}$", type))
    for (prefix, rest, type), layers in groups.items():
        one_of = "|".join(map(str, sorted(layers)))
        rules.append(Rule(rf"^{prefix}\.({one_of}){re.escape(rest)}$", type))
    return base, tuple(rules)


def _sentence(recipe: Recipe) -> str:
    return ", ".join([*(f"{_PARTS[rule.pattern]} {rule.type}" for rule in recipe.rules), f"all else {recipe.base}"])


def _bases() -> str:
    return f"a type ({', '.join(TYPES)}) or a mix of llama.cpp's ({', '.join(MIXES)})"
