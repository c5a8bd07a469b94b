"""The anatomy of a whole file: inheritance, construction graph, roles."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from patchgen.anatomy.classes import (
    Build,
    ClassInfo,
    FunctionNode,
    arguments,
    auto_builds,
    calls,
    constructed,
    describe,
    linearised,
    loaded,
    mentions,
    own_attribute,
    parameter_names,
    plain_assignments,
    stores_of,
    walk,
)
from patchgen.anatomy.names import Names
from patchgen.anatomy.roles import Role, assign_class_roles, assign_roles
from patchgen.config_classes import SubConfig
from patchgen.source import Module
from patchgen.upstream import AUTO_CLASS_MAPPINGS, Upstream

Attends = dict[tuple[str, tuple[frozenset[str], ...]], tuple[frozenset[str], bool]]


@dataclass
class Anatomy:
    """What is known of one upstream file."""

    upstream: Upstream
    classes: dict[str, ClassInfo] = field(default_factory=dict[str, ClassInfo])
    functions: dict[str, FunctionNode] = field(default_factory=dict[str, FunctionNode])
    # module-level assignments: name -> value
    tables: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])
    orders: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # cache of `lineage`
    names: Names = field(default_factory=lambda: Names([]))
    attends: Attends = field(default_factory=Attends)  # cache of `flow.Attention`
    others: dict[str, Anatomy | None] = field(default_factory=dict[str, "Anatomy | None"])  # cache of `imported`

    def still_in(self, module: Module) -> list[ClassInfo]:
        """The classes that no pass has dropped, in upstream order."""
        return [info for info in self.classes.values() if module.has(info.name)]

    def models_in(self, module: Module) -> list[str]:
        """The PreTrainedModels that no pass has dropped."""
        return [info.name for info in self.still_in(module) if self.is_model(info.name)]

    def with_role(self, role: str, among: Module | None = None) -> list[ClassInfo]:
        """The classes that have a role, in upstream order; only those that are still in `among`, if given."""
        infos = self.classes.values() if among is None else self.still_in(among)
        return [info for info in infos if role in info.roles]

    def own_heads(self) -> list[str]:
        """The causal heads, in upstream order; of a file that takes code of transformers its own ones, which may run the forward
        of a head that they inherit."""
        if not self.upstream.taken:
            return [info.name for info in self.with_role(Role.HEAD)]
        own = [(name, self.method(name, "forward")) for name in self.classes if self.upstream.is_own(name)]
        return [name for name, forward in own if forward and Role.HEAD in forward[0].roles]

    def lineage(self, name: str) -> Iterator[ClassInfo]:
        """The class and its ancestors in this file, in the order in which Python looks members up."""
        if name not in self.orders:
            self.orders[name] = linearised(name, {known: info.bases for known, info in self.classes.items()})
        return (self.classes[current] for current in self.orders[name])

    def is_a(self, value: ast.AST | None, *meanings: str) -> bool:
        """Whether a class, or the class that a call builds, is one of these (`torch.nn.Linear`) or inherits from one."""
        meaning = self.names.resolve(value.func if isinstance(value, ast.Call) else value) or ""
        return bool({meaning, *self._ancestors(meaning.removeprefix("."))} & set(meanings))

    def inherits(self, name: str, base: str) -> bool:
        """Whether transformers' class `base`, by whatever import, is among the ancestors."""
        bases = [node for info in self.lineage(name) for node in info.node.bases]
        return any(self.names.is_upstream(node, base) for node in bases)

    def _ancestors(self, name: str) -> set[str]:
        """The bases of the class and of its ancestors in this file, resolved."""
        return {self.names.resolve(base) or "" for info in self.lineage(name) for base in info.node.bases}

    def add(self, name: str, module: Module) -> None:
        """Adds a class that a pass put into the file, and updates the classes that now build it.

        Line numbers in the new class are 0: upstream has none for it. Upstream's own methods keep their nodes and lines.
        """
        node = copy.deepcopy(module.block(name).node)
        assert isinstance(node, ast.ClassDef)
        for child in walk(node):
            if hasattr(child, "lineno"):
                vars(child)["lineno"] = 0
        self.names = Names(module.statements, self.upstream.base_of)
        known = self.classes[name].roles if name in self.classes else {}  # a pass may have rewritten it
        self.classes[name] = describe(node, {*self.classes, name}, self.names.resolve)
        self.orders.clear()
        self.classes[name].roles |= known
        for info in self.classes.values():
            now = module.block(info.name).node if module.has(info.name) else None
            if isinstance(now, ast.ClassDef) and mentions(now, name):
                changed = describe(now, set(self.classes), self.names.resolve)
                info.attributes, info.builds = changed.attributes, changed.builds
        assign_class_roles(self, self.classes[name])

    def method(self, name: str, method: str) -> tuple[ClassInfo, FunctionNode] | None:
        """The class of this file that defines the method which an instance of the class `name` runs, and the method; else None."""
        for info in self.lineage(name):
            if method in info.methods:
                return info, info.methods[method]
        return None

    def called(self, owner: str, call: ast.Call) -> FunctionNode | None:
        """The method of `owner`, or function of this file, that a call in the code of `owner` runs; None for any other."""
        if method := self.method(owner, own_attribute(call.func) or ""):
            return method[1]
        return self.functions.get(self.names.here(call.func))

    def attribute(self, name: str, attribute: str) -> ast.expr | None:
        """What __init__ assigns to `self.<attribute>`, ancestors included."""
        return next((info.attributes[attribute] for info in self.lineage(name) if attribute in info.attributes), None)

    def held(self, owner: str, attribute: str) -> tuple[ast.expr | ast.stmt, ...]:
        """What `self.<attribute>` is in an instance of the class: its method, or the values that methods assign to it.

        Subclasses count: their instances run the class's code too. Empty where there is nothing of that name, or both.
        """
        family = self.family(owner)
        methods = [info.methods[attribute] for info in family if attribute in info.methods]
        values = [value for info in family for value in stores_of(info, attribute)]
        return () if methods and values else tuple(methods or values)

    def below(self, owner: str) -> list[str]:
        """The class and its subclasses in the file."""
        heirs = [name for name in self.classes if any(info.name == owner for info in self.lineage(name))]
        return [owner, *(name for name in heirs if name != owner)]

    def family(self, owner: str) -> list[ClassInfo]:
        """The classes whose code instances of the class or of its subclasses run."""
        infos = {info.name: info for name in self.below(owner) for info in self.lineage(name)}
        return list(infos.values())

    def builds(self, name: str) -> list[Build]:
        """What the `__init__` of the class constructs, its own or the one it inherits."""
        init = self.method(name, "__init__")
        return init[0].builds if init else []

    def auto_builds(self, name: str) -> list[Build]:
        """What the class or its ancestors in this file construct through Auto classes."""
        return [build for info in self.lineage(name) for build in info.auto_builds]

    def config_of(self, name: str) -> str | None:
        """The configuration class of a model class, from its annotations."""
        annotated = (config for info in self.lineage(name) for config in _annotated_configs(info))
        return next((config for config in annotated if config in self.upstream.configs), None)

    def model_type_of(self, name: str) -> str | None:
        config = self.config_of(name)
        return self.upstream.configs[config].model_type if config else None

    def target_of(self, build: Build) -> str | None:
        """The class that a construction builds: stated in the source, or what the Auto class would choose by default.

        The name need not be of this file. For a config of another file it is the config class's: "AutoConfig" where upstream
        leaves the choice to a checkpoint's config. None when the source does not tell.
        """
        if build.target is not None or build.auto_class is None:
            return build.target
        sub_config = self._sub_config_of(build.owner, build.config or "")
        if sub_config is None:
            return None
        known = self.upstream.configs.get(sub_config.config_class)
        chosen = self.upstream.auto_model(build.auto_class, self.default_type(build))
        if chosen in self.classes:
            return chosen
        # The auto map does not know this file (a file on disk, a renamed class): the one model written for that config,
        # which is not the builder itself.
        others = [name for name in self.classes if name != build.owner and self.is_model(name)]
        written_for = [n for n in others if sub_config.config_class in _annotated_configs(self.classes[n])]
        if len(written_for) == 1:
            return written_for[0]
        release = self.upstream.release
        if chosen is not None and release is not None and release.defines(chosen, besides=self.upstream.path):
            return chosen
        if sub_config.config_class == "AutoConfig":
            return None if chosen is not None else "AutoConfig"
        return None if known is not None else sub_config.config_class  # a config of another file: its model is there

    def default_type(self, build: Build) -> str | None:
        """The model type that a construction through an Auto class builds where the checkpoint says nothing else."""
        sub_config = self._sub_config_of(build.owner, build.config or "") or SubConfig("")
        known = self.upstream.configs.get(sub_config.config_class)
        return sub_config.model_type or (known.model_type if known else None)

    def is_part(self, build: Build) -> bool:
        """Whether a construction builds a language model of another file: its type has a causal head, or it is called with
        `inputs_embeds`. Such a part has its own generated file; towers of other files stay upstream's, and so do
        encoder-decoders, whose causal heads are on the decoder alone."""
        target, kind, release = self.target_of(build), self.default_type(build), self.upstream.release
        if build.auto_class not in AUTO_CLASS_MAPPINGS or target is None or target in self.classes:
            return False
        if release is not None and kind in release.auto_map("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
            return False
        if self.upstream.auto_model("AutoModelForCausalLM", kind):
            return True
        code = [call for method in self.classes[build.owner].methods.values() for call in calls(method)]
        runs = [call for call in code if build.attribute and own_attribute(call.func) == build.attribute]
        return any(keyword.arg == "inputs_embeds" for call in runs for keyword in call.keywords)

    def is_model(self, name: str) -> bool:
        """Whether the class inherits from a `...PreTrainedModel` of transformers or of a file beside this one: from the base
        class of all models, or from the abstract class of one."""
        packages = ("transformers.", f"{self.upstream.package}.")
        return any(base.startswith(packages) and base.endswith("PreTrainedModel") for base in self._ancestors(name))

    def reached_from(self, roots: Iterable[str], without: Container[str] = ()) -> set[str]:
        """The roots, and the classes of this file that they name, directly or through others; neither counts if in `without`."""

        def named(name: str) -> Iterator[str | None]:
            referenced = references(self.classes[name].node)
            yield from referenced.union(*(references(self.tables[table]) for table in referenced & self.tables.keys()))
            yield from (build.target for build in self.classes[name].builds)  # a pass may have added it
            yield from (self.target_of(build) for build in self.auto_builds(name))

        return self._closure(roots, named, without)

    def built_by(self, owners: Iterable[str], without: Container[str] = ()) -> set[str]:
        """The classes of this file that these construct, directly or through others, without those in `without`."""

        def built(name: str) -> Iterator[str | None]:
            return map(self.target_of, (*self.builds(name), *self.auto_builds(name)))

        return self._closure((target for name in owners for target in built(name)), built, without)

    def _closure(
        self, roots: Iterable[str | None], step: Callable[[str], Iterable[str | None]], without: Container[str]
    ) -> set[str]:
        """The classes of this file among the roots and all that steps from them lead to, without those in `without`."""
        reached: set[str] = set()
        pending = list(roots)
        while pending:
            name = pending.pop()
            if name in self.classes and name not in reached and name not in without:
                reached.add(name)
                pending += step(name)
        return reached

    def _handed_config(self, owner: str) -> str | None:
        """The configuration class of the models that build the class with their own config; None if there is not exactly one."""
        init = self.method(owner, "__init__")
        names = parameter_names(init[1]) if init else []
        built = [
            (i, c) for i in self.classes.values() for c in calls(i.node) if self.names.here(constructed(c)) == owner
        ]
        given = [(info, arguments(call, names).get("config")) for info, call in built]
        whole = [value is not None and ast.unparse(value) in ("config", "self.config") for _, value in given]
        config_classes = {self.config_of(i.name) if own else None for (i, _), own in zip(given, whole, strict=True)}
        return config_classes.pop() if len(config_classes) == 1 else None

    def _sub_config_of(self, owner: str, expression: str) -> SubConfig | None:
        """The config that an expression such as `config.text_config` is: the owner's config class, then its `sub_configs`."""
        expression = re.sub(r"\.get_text_config\([^()]*\)", ".get_text_config", expression)
        parts = [part for part in expression.split(".") if part != "self"]
        if not parts or parts[0] != "config":
            return None
        annotated = next(_annotated_configs(self.classes[owner]), None)
        config_class = self.config_of(owner) or annotated or self._handed_config(owner)
        current = SubConfig(config_class) if config_class else None
        for part in parts[1:]:
            known = self.upstream.configs.get(current.config_class) if current else None
            if part == "get_text_config":  # transformers': the text config if there is one, else the config itself
                current = known.sub_configs.get("text_config", current) if known else None
            else:
                current = known.sub_configs.get(part) if known else None
        return current


def _annotated_configs(info: ClassInfo) -> Iterator[str]:
    """The configuration classes that a class names: `config_class`, and the annotations of the attribute `config` and of that
    parameter of `__init__`."""
    yield from (
        ast.unparse(value) for name, value in plain_assignments(info.node.body).items() if name == "config_class"
    )
    if "config" in info.annotations:
        yield info.annotations["config"]
    init = info.methods.get("__init__")
    for arg in init.args.args if init else ():
        if arg.arg == "config" and arg.annotation is not None:
            yield ast.unparse(arg.annotation).strip("\"'")


def study(module: Module, upstream: Upstream) -> Anatomy:
    """Reads the classes of a module, their roles and which class builds which."""
    nodes = ast.parse(module.text).body  # of the whole file, so that nodes know their lines
    anatomy = Anatomy(upstream, names=Names(nodes, upstream.base_of), tables=plain_assignments(nodes))
    local = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            anatomy.classes[node.name] = describe(node, local, anatomy.names.resolve)
        elif isinstance(node, FunctionNode):
            anatomy.functions[node.name] = node
    for info in anatomy.classes.values():
        info.auto_builds = auto_builds(info, anatomy.names.resolve) if "from_config" in module.text else []
    assign_roles(anatomy)
    return anatomy


@functools.lru_cache(maxsize=4096)
def references(node: ast.AST) -> frozenset[str]:
    """The names that a piece of code refers to, quoted annotations included."""
    referenced: set[str] = set()
    for child in walk(node):
        if isinstance(child, ast.Name):
            referenced.add(child.id)
        annotation = getattr(child, "annotation", None) or getattr(child, "returns", None)
        if isinstance(annotation, ast.Constant):
            referenced |= _names_in_string(annotation.value)
        if isinstance(child, ast.Subscript):
            quoted = [node.value for node in walk(child.slice) if isinstance(node, ast.Constant)]
            referenced |= {value for value in quoted if isinstance(value, str) and value.isidentifier()}
    return frozenset(referenced)


def _names_in_string(value: object) -> set[str]:
    if not isinstance(value, str):
        return set()
    try:
        return set(loaded(ast.parse(value, mode="eval")))
    except SyntaxError:
        return set()
