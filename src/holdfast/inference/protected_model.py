"""A model that stays as it is while a loader runs on it, which other threads may serve requests with meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.errors import IncompatibleError
from holdfast.inference.loaded_weights import MEMORY_ACCESS, LoadedWeight, refusal, stand_ins

_ACTION: Final = "Load the weights into a copy of the model on the meta device, and discover with that."
_aten = torch.ops.aten
#: Operations that write to running statistics, their arguments 3 and 4, and do not say so.
_STATISTICS: Final = frozenset(
    (
        _aten.native_batch_norm.default,
        _aten.cudnn_batch_norm.default,
        _aten.miopen_batch_norm.default,
        _aten.batch_norm.default,
        _aten.instance_norm.default,
    )
)
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class ProtectedModel:
    """Within it, this thread writes nothing to the tensors of `model`, and at its end the model has the same ones.

    Operations that write to them do nothing, whichever of their arguments they write to. What writes past torch's
    operations is refused, at its end too where the loader went on. Raises `IncompatibleError` where tensors were
    replaced; they are back by then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_ModuleTensors(module) for module in model.modules()]
        self._held = list({id(each): each for module in self._modules for each in module.tensors()}.values())
        self._is_live = [not each.is_meta for each in self._held]
        self._refused: list[IncompatibleError] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        storages = {_storage(each) for each in self._held}
        live = {_storage(each) for each, is_live in zip(self._held, self._is_live, strict=True) if is_live}
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(_WithoutWrites(storages, self._refused))
        self._stack.enter_context(_WithoutAccess(live, self._refused))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        replaced = [module.restore() for module in self._modules]
        if self._refused and kind is None:  # the loader caught it, and a real weight would have taken the other way
            raise self._refused[0]
        if any(replaced) and kind is None:
            raise IncompatibleError(
                "load_weights replaces parameters of the model instead of copying into them.",
                code="incompatible.loader",
                action=_ACTION,
            )


class _ModuleTensors:
    """The parameters, buffers, other tensors and children of one module, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tables = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")}
        self._others = {name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its tensors, without those of its children."""
        for each in (*self._tables["_parameters"].values(), *self._tables["_buffers"].values()):
            if each is not None:
                yield each
        yield from self._others.values()

    def restore(self) -> bool:
        """Put back what is missing or another one. Returns whether a tensor in memory, or a child, was."""
        replaced = False
        for name, before in (*self._tables.items(), (None, self._others)):
            table = vars(self._module) if name is None else vars(self._module)[name]
            changed = [key for key, each in before.items() if key not in table or table[key] is not each]
            added = [key for key in table if key not in before] if name is not None else []
            replaced |= any(
                not (isinstance(each, torch.Tensor) and each.is_meta)
                for each in (*(before[key] for key in changed), *(table.get(key) for key in (*changed, *added)))
                if each is not None
            )
            table.update({key: before[key] for key in changed})
            if name is not None and list(table) != list(before):  # others came in, or what is back is the last now
                table.clear()
                table.update(before)
        return replaced


class _WithoutWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, operations that would write to memory of `storages` do nothing."""

    def __init__(self, storages: set[int], refused: list[IncompatibleError]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._refused = refused

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it writes to protected memory. Notes refusals."""
        with _noted(self._refused):
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = func._schema  # type: ignore[attr-defined]  # noqa: SLF001 - what an operation writes to
        if func in _STATISTICS and any(_storage(each) in self._storages for each in _tensors(args[3:5])):
            raise _writes_besides(func)
        if not schema.is_mutable or any(True for _ in stand_ins((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        given = {each.name: arg for each, arg in zip(schema.arguments, args, strict=False)} | kwargs
        written = [
            (each.alias_info.before_set, given[each.name])
            for each in schema.arguments
            if each.alias_info is not None and each.alias_info.is_write and each.name in given
        ]
        if not any(_storage(each) in self._storages for _, value in written for each in _tensors(value)):
            return func(*args, **kwargs)
        returned = [
            next((value for names, value in written if each.alias_info and names == each.alias_info.before_set), None)
            for each in schema.returns
        ]
        if any(each is None for each in returned):
            raise _writes_besides(func)
        return tuple(returned) if len(returned) > 1 else next(iter(returned), None)


class _WithoutAccess(TorchFunctionMode):
    """Within it, only torch's operations reach memory of `storages`, and no stand-in becomes the data of a tensor."""

    def __init__(self, storages: set[int], refused: list[IncompatibleError]) -> None:
        super().__init__()
        self._storages = storages
        self._refused = refused

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it reaches protected memory. Notes refusals."""
        with _noted(self._refused):
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in MEMORY_ACCESS:
            assigned = list(stand_ins(args)) if func == _SET_DATA else []
            if assigned:
                raise refusal(MEMORY_ACCESS[func], assigned)
            if any(_storage(each) in self._storages for each in _tensors(args[0])):
                raise IncompatibleError(
                    f"load_weights calls {MEMORY_ACCESS[func]} on a tensor of the model, which could change it unseen, "
                    "while it may serve requests.",
                    code="incompatible.loader",
                    action=_ACTION,
                )
        return func(*args, **kwargs)


@contextmanager
def _noted(refused: list[IncompatibleError]) -> Iterator[None]:
    """A ``with`` block whose refusal is added to `refused`, too: the loader may catch it."""
    try:
        yield
    except IncompatibleError as error:
        refused.append(error)
        raise


def _writes_besides(func: object) -> IncompatibleError:
    return IncompatibleError(
        f"load_weights calls {func}, which writes to the model and computes besides.",
        code="incompatible.loader",
        action=_ACTION,
    )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, torch.Tensor) and not isinstance(each, LoadedWeight):
            yield each


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - the modes here must not see this
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
