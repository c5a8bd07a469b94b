"""torch's operations on the terms of `interpreter`, with torch's parameters: None for what is not understood."""

from __future__ import annotations

Term = tuple


class Operations:
    """Functions of torch and methods of tensors, by their names there; a method's tensor is the first parameter."""

    def mul(input: Term, other: Term) -> Term:
        if ("const", 0) in (input, other):
            return ("const", 0)
        return ("mul", *sorted((input, other), key=repr))

    def add(input: Term, other: Term) -> Term | None:
        match input, other:
            case ("linear", x, weight, None, transposed), ("weight", bias):
                return ("linear", x, weight, bias, transposed)
            case ("experts",), ("const", 1):
                return ("experts + 1",)
            case ("number",), ("const", 0):
                return input
            case ("start", one), ("count", two) if one == two:
                return ("end", one)
        return None

    def floor_divide(input: Term, other: Term) -> Term | None:
        """The token of each place in `[T * K]`."""
        is_width = input[0] == "order" and other == ("size", input[1], 1)
        return ("sorted tokens", input[1]) if is_width else None

    def repeat_interleave(input: Term, repeats: Term, dim: Term) -> Term | None:
        """Each token once per expert of it: another number would not go with the choice, which has a place for each."""
        return ("repeated", input) if input[0] == "value" and dim == ("const", 0) else None

    def argsort(input: Term) -> Term | None:
        return ("order", input[1]) if input[0] == "flat" else None

    def new_zeros(input: Term, size: Term) -> Term | None:
        is_table = size == ("tuple", (("size", input, 0), ("experts",)))
        return ("table", input) if input[0] == "value" and is_table else None

    def empty_like(input: Term) -> Term | None:
        return ("empty", input) if input[0] in ("repeated", "outputs") else None

    def cat(tensors: Term, dim: Term = ("const", 0)) -> Term | None:
        return tensors if tensors[0] == "outputs" and dim == ("const", 0) else None

    def promote_types(type1: Term, type2: Term) -> Term | None:
        return type1 if (type1[0], type2[0]) == ("dtype", "dtype") else None

    def numpy(input: Term) -> Term | None:
        return input if input[0] == "counts" else None

    def matmul(input: Term, other: Term) -> Term | None:
        return ("linear", input, other[1], None, True) if other[0] == "weight" else None

    def bmm(input: Term, mat2: Term) -> Term | None:
        return ("linear", input, mat2[1], None, True) if mat2[0] == "self" else None

    def linear(input: Term, weight: Term, bias: Term | None = None) -> Term | None:
        bias = None if bias == ("const", None) else bias
        if weight[0] != "weight" or (bias is not None and bias[0] != "weight"):
            return None
        return ("linear", input, weight[1], bias and bias[1], False)

    def chunk(input: Term, chunks: Term, dim: Term = ("const", 0)) -> Term | None:
        if input[0] != "linear" or (chunks, dim) != (("const", 2), ("const", -1)):
            return None
        return ("tuple", (("half", input, 0), ("half", input, 1)))

    def one_hot(tensor: Term, num_classes: Term = ("const", -1)) -> Term | None:
        is_known = num_classes in (("experts",), ("experts + 1",))  # one more: the expert of tokens that have none
        return ("mask", tensor, "tke") if is_known and tensor[0] == "value" else None

    def permute(input: Term, *dims: Term) -> Term | None:
        dims = dims[0][1] if len(dims) == 1 and dims[0][0] == "tuple" else dims
        order = _integers(dims)
        if input[0] != "mask" or sorted(d % 3 for d in order) != [0, 1, 2]:
            return None
        return ("mask", input[1], "".join(input[2][d] for d in order))

    def sum_over(input: Term, dim: Term) -> Term | None:
        """Over all dimensions but the experts'; of a table of choices, over tokens; of weighted outputs, over a token's."""
        match input, dim:
            case ("marked", selection), ("const", 0):
                return ("counts", selection)
            case ("mul", ("column", weights), ("slots of", x, selection)), ("const", 1):
                return ("combined", x, selection, weights)
        dims = {d % 3 for d in _integers(dim[1])} if dim[0] == "tuple" else set()
        is_count = input[0] == "mask" and {input[2][d] for d in dims} == {"t", "k"}
        return ("count_of", input[1]) if is_count else None

    def greater(input: Term, other: Term) -> Term | None:
        return ("hit", input[1]) if input[0] == "count_of" and other == ("const", 0) else None

    def nonzero(input: Term, as_tuple: Term = ("const", False)) -> Term | None:
        if as_tuple[0] != "const" or type(as_tuple[1]) is not bool:
            return None
        if as_tuple[1]:
            return Operations.where(input)
        return ("hits", input[1]) if input[0] in ("count_of", "hit") else None

    def where(condition: Term) -> Term | None:
        if condition[0] != "chosen":
            return None
        kinds = {"t": "tokens", "k": "slots"}
        return ("tuple", tuple((kinds[dimension], condition[1]) for dimension in condition[2]))

    def any(input: Term) -> Term | None:
        return ("occupied",) if input[0] == "chosen" else None

    def numel(input: Term) -> Term | None:
        return ("number of tokens",) if input[0] == "tokens" else None

    def size(input: Term, dim: Term) -> Term | None:
        return ("number of tokens",) if input[0] == "tokens" and dim == ("const", 0) else ("size", input, dim)

    def item(input: Term) -> Term | None:
        return input if input == ("number",) else None

    def range(stop: Term) -> Term | None:
        return ("range",) if stop == ("experts",) else None

    def squeeze(input: Term, dim: Term = ("const", None)) -> Term | None:
        """Of a dimension of one expert, or of the experts that were hit, `[n, 1]`."""
        is_single = (input[0] == "chosen" and dim == ("const", 0)) or (
            input[0] == "hits" and dim in (("const", -1), ("const", 1))
        )
        return input if is_single else None

    def unsqueeze(input: Term, dim: Term) -> Term | None:
        if input[0] == "value" and dim == ("const", -1):
            return ("column", input)
        is_column = input[0] == "weights" and dim in (("const", -1), ("const", 1))
        return ("routing", *input[1:]) if is_column else None

    def reshape(input: Term, *shape: Term) -> Term | None:
        """Of rows into rows: `reshape(-1, hidden_dim)`; any other width would not go into the next product. Of rows into as
        many for each expert, for a batched product, and back."""
        if input[0] == "value" and shape == (("const", -1),):
            return ("flat", input)
        if input[0] == "placed" and len(shape) == 2 and shape[0][0] == "all of" and shape[1] == ("const", -1):
            return ("slots of", *input[1:])  # [T, K, H], of the shape of the choice or of its weights
        if input[0] == "value" and len(shape) == 3 and shape[1] == ("const", -1):
            return ("shares", input, *shape[::2])
        if input[0] == "linear" and len(shape) == 2 and shape[0] == ("const", -1):
            return ("together", input, shape[1])
        if input[0] == "weights" and shape == (("const", -1), ("const", 1)):
            return ("routing", *input[1:])
        is_rows = len(shape) == 2 and shape[0] == ("const", -1) and shape[1][0] != "const"
        return input if is_rows and input[0] == "rows" else None

    def contiguous(input: Term) -> Term:
        return input

    def to(input: Term, dtype: Term) -> Term | None:
        """A cast of what is added up, which stands next to the sum; to a device, of what one expert made, none."""
        if (input[0], dtype[0]) == ("expert", "device"):
            return input
        if input[0] == "slots of" and dtype[:1] == ("dtype",) and dtype[1][0] == "value":
            return input  # the weights', in which they are added up
        if input[0] == "combined":
            return ("cast", input, dtype)
        if input[0] not in ("mul", "sum") or dtype[0] not in ("dtype", "library", "value", "zeros"):
            return None
        return ("cast", input)

    def zeros_like(input: Term, *, dtype: Term | None = None, device: Term | None = None) -> Term:
        return ("zeros", dtype or ("dtype", input))

    def zeros(*size: Term, dtype: Term | None = None, device: Term | None = None) -> Term:
        return ("zeros", dtype)


def _integers(terms: tuple[Term, ...]) -> list[int]:
    """The numbers that the terms are; none if one of them is no number of the source."""
    known = all(term[0] == "const" and type(term[1]) is int for term in terms)
    return [term[1] for term in terms] if known else []


METHODS = {name: getattr(Operations, name) for name in vars(Operations) if not name.startswith("_")}
METHODS |= {"sum": Operations.sum_over, "view": Operations.reshape, "type": Operations.to, "type_as": Operations.to}
METHODS |= {"mul_": Operations.mul, "cpu": Operations.numpy, "tolist": Operations.numpy}
METHODS |= {"gt": Operations.greater, "multiply": Operations.mul, "mm": Operations.matmul}
FUNCTIONS = {f"torch.{name}": operation for name, operation in METHODS.items()}
FUNCTIONS |= {f"torch.nn.functional.{name}": METHODS.pop(name) for name in ("linear", "one_hot")}
FUNCTIONS |= {"builtins.range": METHODS.pop("range"), "builtins.int": Operations.item}
for name in ("where", "zeros", "zeros_like", "empty_like", "cat", "promote_types"):  # functions alone
    del METHODS[name]
OF_TENSORS = ("to", "view", "type", "type_as", "reshape", "item", "size", "contiguous")  # methods alone
for name in (*OF_TENSORS, "mul_", "cpu", "tolist", "numpy", "new_zeros"):
    FUNCTIONS.pop(f"torch.{name}")
