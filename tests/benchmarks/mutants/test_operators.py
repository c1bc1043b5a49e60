"""Every operator changes what it says, in source that still parses, and leaves alone what changes no result."""

from __future__ import annotations

import ast
import textwrap

import pytest

from benchmarks.mutants.operators import mutations_of


def changed(text: str) -> list[str]:
    """The module under each of its mutations, less what all have in common: the lines around."""
    source = textwrap.dedent(text)
    found = []
    for mutation in mutations_of("a.py", source):
        mutant = mutation.applied(source.encode()).decode()
        ast.parse(mutant)
        before, after = source.splitlines(), mutant.splitlines()
        found.append(next(new for old, new in zip(before, after, strict=False) if old != new).strip())
        assert (mutation.before, mutation.now) == (before[mutation.line - 1].strip(), found[-1])
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a <= b < c", ["x = a < b < c", "x = a <= b <= c"]),
        ("x = a not in b", ["x = a in b"]),
        ("x = a is  not b", ["x = a is b"]),
        ("x = inner in b", ["x = inner not in b"]),
        ("x = a + b", ["x = a - b"]),
        ("x = a // b", ["x = a * b"]),
        ("x = a and b", ["x = a or b"]),
        ("x = not a", ["x = (a)"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = 3", ["x = 4"]),
        ("x = 1_000", ["x = 2000"]),
        ("x = 0.0", ["x = 1.0"]),
        ("x = 1e-9", ["x = 2e-09"]),
        ("x = True", ["x = False"]),
        ("x = 'm k -> m ; flops: 2*m*k'", ["x = 'm k -> m ; flops: 3*m*k'"]),
        ("x += a", ["pass", "x -= a"]),
        ("x.y = a", ["pass"]),
        ("x[a] = b", ["pass"]),
        ("x.append(a)", ["pass"]),
        ("raise ValueError(f'no {a + 1}', 3)", ["pass"]),
        ("x = 'é' if a else b", ["x = 'é' if (not (a)) else b"]),
    ],
)
def test_an_operator_changes_one_place(line: str, expected: list[str]) -> None:
    assert changed(line) == expected


def test_what_changes_no_result_is_left_alone() -> None:
    assert (
        changed('''
            """1 + 2"""
            from __future__ import annotations

            @dataclass(frozen=True)
            class A(Base, metaclass=B):
                x: Literal[3]

            def f(a: Literal[1], *, b: Literal[2]) -> Literal[3]:
                """a < b"""
                assert a < b
                log.debug("%d", 3)
                return f"{a + 1:.3f}" + "x"
        ''')
        == []
    )


def test_lines_and_bytes_are_those_of_the_file() -> None:
    text = "y = 'ü'\nif (a and\n        b):\n    x = 1\n"
    negated, either, one = mutations_of("a.py", text)
    assert negated.applied(text.encode()).decode() == text.replace("a and\n        b", "(not (a and\n        b))")
    assert (either.line, either.applied(text.encode()).decode()) == (2, text.replace("and", "or"))
    assert (one.line, one.name) == (4, "a.py:4:39 x = 1  -->  x = 2")
