"""Fresh memory full of poison, in every Python process that begins with this folder on its PYTHONPATH.

    PYTHONPATH=tests/poisoned python -m pytest ...        what `make test-poisoned` does

What nobody has written holds NaN, in integers the largest number, in booleans True: whoever reads it shows it. Python
imports a module of this name by itself, so rank processes and whatever else a test starts are poisoned as well.
A process that never imports torch does not import it for this.
"""

import importlib.abc
import importlib.util
import sys


def poison(torch) -> None:
    """Fills what torch allocates on any thread: `empty` and its relatives, from Python or C++, `resize_`, grown storages.

    torch does so only among deterministic algorithms, so nobody may switch these off again. Where there is none, torch
    warns in place of raising, unless the program itself asked for an error.
    """
    choose = torch.use_deterministic_algorithms

    def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
        choose(mode, warn_only=warn_only)
        torch._C._set_deterministic_algorithms(True, warn_only=warn_only or not mode)

    torch.use_deterministic_algorithms = use_deterministic_algorithms
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # the function above would load the compiler for it
    grow = torch.UntypedStorage.resize_

    def resize_(storage, size: int) -> None:
        """What torch leaves out: the memory that FSDP2 gathers parameters into."""
        held = storage.nbytes()
        grow(storage, size)
        if size > held and storage.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8).set_(storage)[held:].fill_(255)  # NaN in any floating-point dtype

    torch.UntypedStorage.resize_ = resize_


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, and poisons it as soon as it is there."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                poison(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch())
