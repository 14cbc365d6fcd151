"""House rules that a reader could check by eye, checked for all files at once."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "draftlab").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def public_functions(body, inside=""):
    """Yield (name, function) of a module's public functions and its public classes' methods."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (
            not node.name.startswith("_") or node.name in ("__init__", "__call__")
        ):
            yield inside + node.name, node


def annotations_of(function):
    """Yield (what, annotation) of every argument and of what comes back."""
    arguments = function.args
    for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if arg.arg not in ("self", "cls"):
            yield arg.arg, arg.annotation
    for arg in filter(None, [arguments.vararg, arguments.kwarg]):
        yield arg.arg, arg.annotation
    yield "return", function.returns


def has_bare_tensor(node) -> bool:
    """Whether a tensor without its axes stands in an annotation.

    A mapping from names to tensors has no common shape and may stay bare.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return has_bare_tensor(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rpartition(".")[2]
        if outer in ("Float", "Int", "Bool", "dict", "Mapping", "MutableMapping"):
            return False
        return has_bare_tensor(node.slice)
    if isinstance(node, ast.BinOp):
        return has_bare_tensor(node.left) or has_bare_tensor(node.right)
    if isinstance(node, ast.Tuple | ast.List):
        return any(map(has_bare_tensor, node.elts))
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in (
        "Tensor",
        "torch.Tensor",
    )


def faults_of(source: str) -> list[str]:
    faults = []
    for name, function in public_functions(ast.parse(source).body):
        for what, annotation in annotations_of(function):
            if annotation is None and not (what == "return" and function.name == "__init__"):
                faults.append(f"{name}: {what} has no annotation")
            elif annotation is not None and has_bare_tensor(annotation):
                faults.append(f"{name}: {what} is a tensor without axes")
    return faults


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_functions_are_annotated_and_their_tensors_have_axes(path):
    assert faults_of(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("def f(x: Tensor) -> None: ...", ["f: x is a tensor without axes"]),
        ("def f(x: 'torch.Tensor | None') -> None: ...", ["f: x is a tensor without axes"]),
        ("def f() -> tuple[int, Tensor]: ...", ["f: return is a tensor without axes"]),
        (
            "class A:\n def f(self, *, x): ...",
            ["A.f: x has no annotation", "A.f: return has no annotation"],
        ),
        ("def f(x: Float[Tensor, 'B T']) -> dict[str, Tensor]: ...", []),
        ("def _f(x): ...\nclass _A:\n def f(self, x): ...", []),
    ],
)
def test_the_rule_finds_what_it_looks_for(source, faults):
    assert faults_of(source) == faults


def test_one_word_for_a_thing():
    # what others call a target or a drafter; file formats of engines keep their own names
    foreign = re.compile(r"\b(verifiers?|speculators?)\b", re.IGNORECASE)
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[1] != "export"]
    files += [path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "export"]
    files += (ROOT / "recipes").rglob("*.yaml")
    found = [
        f"{name_of(path)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if foreign.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_runtime_checks_can_read_the_annotations(path):
    assert "from __future__ import annotations" not in path.read_text(encoding="utf-8")


def test_no_pickle_is_read_or_written():
    unsafe = re.compile(r"\bimport pickle\b|\btorch\.(load|save)\(|weights_only=False")
    found = [name_of(path) for path in SOURCES if unsafe.search(path.read_text(encoding="utf-8"))]
    assert found == []
