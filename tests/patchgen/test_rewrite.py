"""The Editor changes what it was told to, or refuses: no change is lost, and none lands beside its place."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from patchgen.errors import Missed
from patchgen.rewrite import Editor
from patchgen.source import Block


def editor(text: str) -> Editor:
    return Editor(Block(textwrap.dedent(text)), "test")


def found(editor: Editor, kind: type[ast.AST], place: int = 0) -> Any:
    return [node for node in ast.walk(editor.block.node) if isinstance(node, kind)][place]


ELIF = """
def f(a, b):
    if a:
        return 1
    elif b:
        return 2
"""


@pytest.mark.parametrize("verb", ["replace", "above", "below", "drop"])
def test_nothing_stands_beside_an_elif(verb):
    one = editor(ELIF)
    with pytest.raises(Missed, match="elif"):
        getattr(one, verb)(found(one, ast.If, 1), *["x = 1"] * (verb != "drop"))


def test_an_elif_is_marked():
    one = editor(ELIF)
    one.mark(found(one, ast.If, 1))
    assert "    # test\n    elif b:" in one.result.text


def test_the_code_of_a_definition_begins_with_its_decorators():
    one = editor("class A:\n    @wrap\n    @other(\n        1\n    )\n    def f(self):\n        pass\n")
    assert one.code(one.function("f")) == "@wrap\n@other(\n    1\n)\ndef f(self):\n    pass"


def _replace(one, assign):
    one.replace(assign, "y = 1")


def _drop(one, assign):
    one.drop(assign)


def _mark(one, assign):
    one.mark(assign)


def _instead(one, assign):
    one.instead(assign.value, "z")


def _inner(one, assign):
    one.instead(assign.value.args[0], "z")


def _around(one, assign):
    one.around(assign.value.args[0], "g(", ")")


@pytest.mark.parametrize(
    "changes",
    [
        (_replace, _replace),
        (_drop, _replace),
        (_drop, _drop),
        (_drop, _mark),
        (_replace, _inner),
        (_instead, _instead),
        (_instead, _inner),
        (_inner, _instead),
        (_around, _instead),
    ],
)
def test_two_changes_of_one_place_are_refused(changes):
    one = editor("def f(a):\n    x = h(a)\n    return x\n")
    with pytest.raises(ValueError, match="two changes of one place"):
        for change in changes:
            change(one, found(one, ast.Assign))
        _ = one.result


def test_a_branch_that_is_dropped_is_not_replaced():
    one = editor("def f(a):\n    if a:\n        return 1\n")
    one.drop_branch(found(one, ast.If))
    one.replace(found(one, ast.If), "x = 1")
    with pytest.raises(ValueError, match="two changes of one place"):
        _ = one.result


def test_members_that_go_are_not_changed():
    one = editor("class A:\n    x = h(1)\n")
    one.instead(found(one, ast.Constant), "2")
    one.fill("y = 1\n")
    with pytest.raises(ValueError, match="two changes of one place"):
        _ = one.result


def test_a_replaced_and_marked_statement_carries_the_comment_once():
    one = editor("def f(a):\n    x = 1\n    return x\n")
    one.replace(found(one, ast.Assign), "x = 2")
    one.mark(found(one, ast.Assign))
    assert one.result.text == "def f(a):\n    # test\n    x = 2\n    return x\n"


def test_lines_of_a_string_are_no_comments():
    one = editor('def f(a):\n    text = """\n    # no comment"""\n    # a comment\n    x = 1\n')
    assert one.code(found(one, ast.Assign, 1), whole=True) == "# a comment\nx = 1"
    one = editor('def f(a):\n    text = """\n    # no comment"""\n    x = 1\n')
    assert one.code(found(one, ast.Assign, 1), whole=True) == "x = 1"


@pytest.mark.parametrize(
    ("code", "before", "after", "expected"),
    [
        ("check(\n    a\n    == b,\n    1,\n)", "p or ", "", "check(\n    p or a\n    == b,\n    1,\n)"),
        ("check(a if b else c)", "p or ", "", "check(p or (a if b else c))"),
        ("check(a if b else c)", "f(", ", d)", "check(f(a if b else c, d))"),
        ("check(lambda: a)", "not p and (", ")", "check(not p and (lambda: a))"),
        ("check(x for x in a)", "f(", ", d)", "check(f((x for x in a), d))"),
        ("check((a, b))", "f(", ")", "check(f((a, b)))"),
        ("check((\n    a,  # one\n    b,\n))", "f(", ")", "check(f((\n    a,  # one\n    b,\n)))"),
    ],
)
def test_code_around_an_expression_keeps_what_it_means(code, before, after, expected):
    one = editor(f"{code}\n")
    one.around(found(one, ast.Call).args[0], before, after)
    assert one.result.text == f"{expected}\n"
    ast.parse(one.result.text)


def test_a_tuple_over_several_lines_is_found_at_any_depth():
    one = editor("def f():\n    return g((\n        a,\n        b,\n    ))\n")
    one.instead(found(one, ast.Tuple), "c")
    assert "g(c)" in one.result.text


def test_a_bare_generator_gets_parentheses_beside_other_arguments():
    one = editor("x = f(a for a in b)\n")
    one.add_arguments(found(one, ast.Call), "first", "last=1")
    assert one.result.text == "x = f(first, (a for a in b), last=1)\n"


def test_an_expression_without_a_node_of_its_own_is_missed():
    one = editor("x = a[1, 2]\n")
    with pytest.raises(Missed, match="an expression"):
        one.instead(found(one, ast.Tuple), "3")


def test_a_place_that_does_not_take_the_change_is_missed():
    one = editor("if(a):\n    pass\n")
    one.around(found(one, ast.If).test, "p and ")
    with pytest.raises(Missed, match="code that takes a change") as error:
        _ = one.result
    assert error.value.found.startswith("if(a):")


def test_siblings_stand_in_handlers_and_cases_as_well():
    one = editor("try:\n    a\nexcept E:\n    b\n    c\n")
    assert len(one.siblings(found(one, ast.ExceptHandler).body[1])) == 2
    one = editor("match a:\n    case 1:\n        b\n        c\n")
    assert len(one.siblings(found(one, ast.match_case).body[0])) == 2


ONE_LINE = "class A(B): x = 1\n"


def test_a_class_on_one_line_takes_members():
    appended, filled = editor(ONE_LINE), editor(ONE_LINE)
    appended.append("y = 2")
    filled.fill("y = 2\n")
    assert appended.result.text == "class A(B):\n    x = 1\n\n    # test\n    y = 2\n"
    assert filled.result.text == "class A(B):\n    y = 2\n"


def test_a_class_on_one_line_keeps_its_other_changes_beside_members():
    one = editor("class A(B): x = f(1)\n")
    one.set_bases(["C"])
    one.instead(found(one, ast.Call), "2")
    one.append("y = 2")
    assert one.result.text == "class A(C):\n    x = 2\n\n    # test\n    y = 2\n"


MEMBERS = """
# above
@wrap
class A(B):
    # first
    x = 1; y = 2

    # of f
    def f(self):
        return 1
        # still of f

    # of g
    @property
    def g(self):
        '''of
    # several lines'''
        return 2
    # the end
"""


def test_members_keep_their_bytes_beside_those_that_change():
    one = editor(MEMBERS)
    one.instead(found(one, ast.Return, 0).value, "10")
    one.set_bases(["C"])
    one.append("z = 3")
    expected = MEMBERS.replace("return 1", "return 10").replace("A(B)", "A(C)") + "\n    # test\n    z = 3\n"
    assert one.result.text == expected


@pytest.mark.parametrize("name", ["f", "g"])
def test_a_member_goes_with_the_comments_above_it_alone(name):
    one = editor(MEMBERS)
    one.drop(one.function(name))
    kept = [line for line in MEMBERS.splitlines() if "# still" not in line or name != "f"]
    start = kept.index(f"    # of {name}")
    end = kept.index("    # of g" if name == "f" else "    # the end")
    assert one.result.text.split() == " ".join([*kept[:start], *kept[end:]]).split()


def test_a_member_on_a_line_with_others_is_missed():
    one = editor(MEMBERS)
    with pytest.raises(Missed, match="lines of its own"):
        one.drop(one.block.node.body[0])


def test_code_beside_a_class_is_refused():
    one = editor(MEMBERS)
    with pytest.raises(Missed, match="a member of the class"):
        one.below(one.block.node, "after = 1")


def test_of_two_equal_members_one_changes():
    one = editor("class A:\n    x = f(1)\n    x = f(1)\n")
    one.instead(found(one, ast.Call, 1).args[0], "2")
    assert one.result.text == "class A:\n    x = f(1)\n    x = f(2)\n"


ODD_CLASSES = {
    "tabs": "class A(B):\n\t# c\n\tx = 1\n\n\tdef f(self, a=2):\n\t\tif a:\n\t\t\treturn 3\n\t\t# deep\n\n\ty = 4\n",
    "two spaces": "class A(B):\n  x = 1\n\n  def f(self):\n    return 2\n",
    "strings": "class A:\n    \"\"\"of\n  # no comment\n    \"\"\"\n\n    x = '''1\n    # 2\n'''\n    y = f(3)\n",
    "nested": (
        "class A:\n    class B:\n        x = 1\n\n        def g(self):\n            return 2\n\n"
        "    @a(3)\n    # between\n    @b\n    async def f(self):\n        pass\n    # end\n"
    ),
    "beyond ASCII": 'class A:\n    # äö🚨\n    x = "ä" + f(1)  # é\n\n    def f(self):\n        return "🚨", 2\n',
    "one line of several": "class A:\n    x = 1; y = 2\n    z = 3\n",
    "continued": "class A:\n    x = 1; \\\n    y = 2\n    z = f(3,\n  4)\n",
    "elif": "class A:\n    if a:\n        x = 1\n    elif b:\n        x = 2\n    else:\n        x = 3\n    def f(self): return 4\n",
    "form feed": "class A:\n    x = 1\n\x0c    def g(self):\n        return 2\n",
    "comments": (
        "# above\n@wrap\nclass A(\n    B,  # b\n):\n    # first\n\n    # second\n    x = 1  # one\n        # deeper\n"
        "    # x\n\n    def f(self):\n        return 2\n\n        # of f\n\n# at the margin\n    y = 3\n"
    ),
}


@pytest.mark.parametrize("name", ODD_CLASSES)
def test_an_odd_class_takes_each_change_or_refuses_it(name):
    """Each constant replaced, each member dropped, one appended: the syntax tree is the one that `ast` makes of the same."""
    text, taken = ODD_CLASSES[name], 0
    whole = ast.parse(text)
    for place, node in enumerate(
        [n for n in ast.walk(whole) if isinstance(n, ast.Constant) and isinstance(n.value, int)]
    ):
        one, value = Editor(Block(text), "test"), node.value
        inside = [n for n in ast.walk(one.block.node) if isinstance(n, ast.Constant) and isinstance(n.value, int)][
            place
        ]
        try:
            one.instead(inside, "99")
        except Missed:
            continue
        node.value = 99
        assert ast.dump(ast.parse(one.result.text)) == ast.dump(whole)
        node.value, taken = value, taken + 1
    members = whole.body[0].body
    for place, _ in enumerate(members):
        one = Editor(Block(text), "test")
        try:
            one.drop(one.block.node.body[place])
            dropped = one.result.text
        except Missed:
            continue
        kept = [member for i, member in enumerate(ast.parse(text).body[0].body) if i != place]
        assert [ast.dump(member) for member in ast.parse(dropped).body[0].body] == [
            ast.dump(member) for member in kept
        ]
        taken += 1
    one = Editor(Block(text), "test")
    one.append("def added(self):\n    return 1")
    assert [getattr(member, "name", "") for member in ast.parse(one.result.text).body[0].body][-1] == "added"
    assert taken
