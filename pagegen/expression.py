"""The language of `score_mod`: one expression over a score and where it stands, checked, and rendered for each backend.

Names: `score` (float), `q_idx` and `k_idx` (positions in the sequence), `head` (query head). Numbers, `inf`, `+ - * /`,
unary minus, comparisons, `and or not`, and the functions of FUNCTIONS; `where(condition, a, b)` chooses. Every value is
an fp32 number, a position included; a condition is a comparison or made of them. A score of -inf drops the key.

    where(q_idx - k_idx < 128, score, score - 0.1 * (q_idx - k_idx))

Vendored into every kernel package: the standard library only.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import SpecError

NAMES = ("score", "q_idx", "k_idx", "head")
FUNCTIONS = {"where": 3, "min": 2, "max": 2, "abs": 1, "exp": 1, "log": 1, "sqrt": 1, "tanh": 1, "floor": 1}
MAX_LENGTH = 1000

_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


def check_expression(text: str) -> None:
    """Raises SpecError, naming the part, unless `text` is an expression of the language whose value is a number."""
    render_expression(text, str, {name: name for name in FUNCTIONS}, ("and", "or", "not"))


def render_expression(
    text: str, number: Callable[[float], str], functions: Mapping[str, str], logic: tuple[str, str, str]
) -> str:
    """The expression in a backend's words; every operation is in parentheses.

    `number` writes a literal, `functions` names the backend's functions, `logic` its and, or, not. Raises SpecError.
    """
    if len(text) > MAX_LENGTH:
        raise SpecError(f"score_mod has {len(text)} characters; allowed: {MAX_LENGTH}")
    try:
        tree = ast.parse(text, mode="eval").body
        return _Renderer(text, number, functions, logic).number_of(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpecError(f"score_mod {text!r} is not an expression; write e.g. score - 0.1 * (q_idx - k_idx)") from None


class _Renderer:
    def __init__(
        self, text: str, number: Callable[[float], str], functions: Mapping[str, str], logic: tuple[str, str, str]
    ) -> None:
        self.text, self.number, self.functions = text, number, functions
        self.and_, self.or_, self.not_ = logic

    def refuse(self, node: ast.AST, why: str) -> SpecError:
        return SpecError(f"score_mod: {ast.get_source_segment(self.text, node) or self.text!r} {why}")

    def number_of(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool) and math.isfinite(_float(node.value)):
                return self.number(_float(node.value))
            case ast.Name(id="inf"):
                return self.number(math.inf)
            case ast.Name(id=name) if name in NAMES:
                return name
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self.number_of(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return f"({self.number_of(left)} {_ARITHMETIC[type(op)]} {self.number_of(right)})"
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
                return self.call(node, name, arguments)
            case ast.Name(id=name):
                raise self.refuse(node, f"is not known; names: {', '.join(NAMES)}, inf; functions: {', '.join(FUNCTIONS)}")
            case _:
                raise self.refuse(
                    node, f"is not allowed where a number stands; allowed: numbers, + - * /, {', '.join(FUNCTIONS)}"
                )

    def call(self, node: ast.expr, name: str, arguments: list[ast.expr]) -> str:
        if len(arguments) != FUNCTIONS[name]:
            raise self.refuse(node, f"takes {FUNCTIONS[name]} arguments, not {len(arguments)}")
        first = self.condition_of(arguments[0]) if name == "where" else self.number_of(arguments[0])
        words = [first, *(self.number_of(argument) for argument in arguments[1:])]
        return f"{self.functions[name]}({', '.join(words)})"

    def condition_of(self, node: ast.expr) -> str:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return f"({self.number_of(left)} {_COMPARISONS[type(op)]} {self.number_of(right)})"
            case ast.BoolOp(op=op, values=values):
                word = self.and_ if isinstance(op, ast.And) else self.or_
                return "(" + f" {word} ".join(self.condition_of(value) for value in values) + ")"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"({self.not_} {self.condition_of(operand)})"
            case _:
                raise self.refuse(node, "is not a condition; write a comparison such as k_idx < 4")


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
