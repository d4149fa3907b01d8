"""A model's execution, described: tensors, modules' classes and settings, adapters, code that was put in.

Knows modules, tensors of all sorts, peft's adapters and accelerate's hooks, and nothing of the store. A
module that cannot be looked into is refused with its name, never left out. Adapters that take no part in a
pass do not count. Worst case: reading all weights once. It cannot see values that library code reads from
elsewhere: a probe sees that.
"""

import enum
import functools
import hashlib
import json
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gpu_worker.errors import WeightsNotVisible

TENSORS_SCHEME = "tensors:"
# Two digests make a model's identity:
#
#     weights_digest   tensors:  parameters and persistent buffers, by name: type, shape, bytes
#     settings         executed: configuration, every module's class and settings, other buffers,
#                                adapters that take part, packed weights, code that no library brought
_BLOCK_BYTES = 16 << 20
"""Bytes that each thread copies to the host at a time."""
_HASHING_THREADS = 8
_VALUES = 500_000
"""Values that one module may hold besides tensors; more are refused."""

_LIBRARIES = (
    "torch",
    "transformers",
    "huggingface_hub",
    "peft",
    "accelerate",
    "torchao",
    "bitsandbytes",
    "triton",
    "kernels",
    "flash_attn",
    "gpu_worker",
)
"""Code of these libraries counts by its name, all other code by what it does."""
_STANDARD = (f"{sysconfig.get_path('stdlib')}/",)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_USED = (
    "torch",
    "torch.nn.functional",
    "transformers.activations",
    "transformers.cache_utils",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.pytorch_utils",
    "transformers.integrations.sdpa_attention",
)
"""Modules whose functions passes call by name, besides those of the model's own classes."""
_WATCHING = ("transformers.utils.output_capturing", "gpu_worker.")
"""Hooks of these modules look at a pass and change nothing."""

_TRANSIENT_SETTINGS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "_attn_implementation",
)
"""Settings of loading, calling and naming; they change no row."""
_OF_TORCH = frozenset({*nn.Module().__dict__, "_compiled_call_impl", "_is_full_backward_hook"})
_BOOKKEEPING = frozenset(
    {
        "generation_config",
        "name_or_path",
        "gradient_checkpointing",
        "loss_type",
        "loss_function",
        "warnings_issued",
        "hf_device_map",
        "hf_quantizer",
        "quantization_method",
        "is_quantized",
        "is_loaded_in_4bit",
        "is_loaded_in_8bit",
        "peft_config",
        "all_tied_weights_keys",
        "kernel_config",
        "layerdrop",
        "tp_size",
        "max_seq_len_cached",
        "_attn_implementation",
        "_ep_plan",
        "_fsdp_plan",
        "_pp_plan",
        "_tp_plan",
        "_is_hf_initialized",
        "_is_quantized",
        "_is_expert_parallel",
        "_hf_peft_config_loaded",
        "_output_capturing_hooks_installed",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_load_missing",
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_save",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_weight_conversions",
        "_use_kernels",
        "_gradient_checkpointing_func",
        "_require_grads_hook",
        "_require_grads_hooks",
        "_tied_weights_keys",
    }
)
"""Attributes in which transformers notes how a module was loaded, placed and is trained."""
_OF_ADAPTERS = frozenset(
    {"_active_adapter", "_disable_adapters", "merged_adapters", "_caches", "ephemeral_gpu_offload"}
)
_ACCELERATE = ("forward", "_old_forward", "_hf_hook")

Read = Callable[[Sequence[str], Tensor], Tensor]
"""(the names of one tensor, the tensor or its shape) -> its contents."""


def digest_weights(model: PreTrainedModel, read: Read | None = None) -> str:
    """`tensors:` and the SHA-256 over all parameters and stored buffers that a pass uses, each by its name.

    The names of adapters and of what wraps a layer do not count. `read`: reads a tensor's contents, by
    default those in memory. Raises WeightsNotVisible.
    """
    # Tied weights are one tensor with several names: read once, and told under each name.
    names: dict[int, tuple[list[str], Tensor]] = {}
    for part in Executed(model).parts:
        for name, tensor in part.stored():
            names.setdefault(id(tensor), ([], tensor))[0].append(name)

    def digest(item: tuple[list[str], Tensor]) -> str:
        known, tensor = item
        return _text(_Looker(None).tensor(tensor if read is None else read(known, tensor), known[0]))

    with ThreadPoolExecutor(_HASHING_THREADS, "ctxcache-digest") as pool:
        digests = pool.map(digest, names.values())
        lines = [
            f"{name} {found}\n"
            for (known, _), found in zip(names.values(), digests, strict=True)
            for name in known
        ]
    # Sorted, so that the order in which modules were added does not count.
    return f"{TENSORS_SCHEME}{hashlib.sha256(''.join(sorted(lines)).encode()).hexdigest()}"


def digest_execution(model: PreTrainedModel) -> str:
    """`executed:` and the SHA-256 of all that a pass depends on besides stored weights.

    Reads no base weights.

    That is: configuration, classes and settings of modules, buffers, tensors that are attributes, executed
    adapters with their weights, packed weights that are no parameters, hooks and methods put in. Raises
    WeightsNotVisible.
    """
    return look_into(model)[0]


def look_into(model: PreTrainedModel) -> tuple[str, list[object]]:
    """`digest_execution`, and what it was read from.

    That is: modules, configurations, containers, other objects, classes, Python modules whose functions are
    called, functions that were put in, tensors. Raises WeightsNotVisible.
    """
    executed = Executed(model)
    looker = _Looker(executed)
    _check_hooks("torch", *(hook for hooks in _global_hooks() for hook in hooks.values()))
    # The implementation's name does not count: sdpa and eager compute the
    # same rows but for rounding. Code that was put in does.
    implementation = str(getattr(model.config, "_attn_implementation", ""))
    attention = ALL_ATTENTION_FUNCTIONS.get(implementation)
    facts = [
        looker.value(model.config, "config"),
        [] if attention is None else looker.foreign(attention, implementation),
        # Each part says its own name: where it stands in the list says nothing.
        sorted([looker.part(part) for part in executed.parts], key=_text),
        looker.patches({type(part.module).__module__ for part in executed.parts}),
    ]
    looker.seen += [*_global_hooks(), ALL_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS._global_mapping]  # noqa: SLF001
    return f"executed:{hashlib.sha256(_text(facts).encode()).hexdigest()}", looker.seen


def has_merged_adapters(model: PreTrainedModel) -> bool:
    """Whether weights are no checkpoint's any more, because adapters were merged into them."""
    return any(bool(layer.merged) for layer in model.modules() if _is_tuner(layer))


@dataclass(frozen=True, slots=True)
class ExecutedPart:
    """A module as a pass uses it.

    `adapters`: adapters that the module adds, in their order. `is_added`: the module is part of an adapter.
    """

    name: str
    module: nn.Module
    adapters: tuple[str, ...] = ()
    known_adapters: frozenset[str] = frozenset()
    is_added: bool = False

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own parameters and persistent buffers, as a checkpoint names them."""
        module = self.module
        transient = module._non_persistent_buffers_set  # noqa: SLF001  torch has no other way to ask
        for leaf, tensor in _own(module, has_parameters=True):
            if leaf not in transient:
                yield _join(self.name, leaf), tensor


class Executed:
    """The modules of a model that a pass uses, by names that wrapping a layer does not change."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, str] = {}
        self.parts: list[ExecutedPart] = []
        self._add("", model, is_added=False)

    def _add(self, name: str, module: nn.Module, *, is_added: bool) -> None:
        # Others refer to a module with several names by the first one.
        self.names.setdefault(id(module), name)
        if isinstance(module, torch.jit.ScriptModule):
            raise WeightsNotVisible(
                module=name or "the model", problem="is compiled by torch.jit: its code is hidden"
            )
        if _is_tuner(module):
            self._add_tuner(name, module, is_added=is_added)
            return
        self.parts.append(ExecutedPart(name, module, is_added=is_added))
        for leaf, child in module._modules.items():  # noqa: SLF001  each once for each of its names
            if child is not None:
                self._add(_join(name, leaf), child, is_added=is_added)

    def _add_tuner(self, name: str, tuner: Any, *, is_added: bool) -> None:
        # Any: peft may not be there to name the type.
        if tuner.merged and tuner.disable_adapters:
            problem = "its adapters are merged and disabled: the next pass changes its weights; unmerge them"
            raise WeightsNotVisible(module=name, problem=problem)
        kept = tuner.adapter_layer_names + tuner.other_param_names
        known = frozenset(key for attribute in kept for key in _keys(getattr(tuner, attribute, None)))
        # Merged adapters are part of the base weights by now, and are digested with these.
        names = () if tuner.merged or tuner.disable_adapters else tuple(tuner.active_adapters)
        active = tuple(adapter for adapter in names if adapter in known)
        if active:
            self.parts.append(ExecutedPart(name, tuner, active, known, is_added=is_added))
        for leaf, child in tuner._modules.items():  # noqa: SLF001  as above
            # The wrapped layer gets the wrapper's own name: it is called as it was before.
            if leaf == "base_layer":
                self._add(name, child, is_added=is_added)
            elif active and child is not None:
                self._add_adapters(_join(name, leaf), child, active, known)

    def _add_adapters(
        self, name: str, holder: nn.Module, active: Sequence[str], known: frozenset[str]
    ) -> None:
        """The adapter weights of one kind that are used, by their number: adapters' names say nothing."""
        kept = holder
        # Keyed by adapters' names, which users choose: two engines may call one adapter differently.
        if isinstance(holder, (nn.ModuleDict, nn.ParameterDict)) and known >= {*holder.keys()}:
            kept = type(holder)(
                {str(index): holder[key] for index, key in enumerate(active) if key in holder}
            )
        self._add(name, kept, is_added=True)


class _Looker:
    """Describes whatever a module holds as lists, texts and numbers, tensors by their digests."""

    def __init__(self, executed: Executed | None) -> None:
        self.seen: list[object] = []
        """What was read and may change in place."""
        self._names = {} if executed is None else executed.names
        self._configs: dict[int, str] = {}
        self._classes: dict[type, list[object]] = {}
        self._under_way: list[int] = []
        self._called: list[object] = []
        self._left = _VALUES
        self._directories = _library_directories()

    def part(self, part: ExecutedPart) -> list[object]:
        """A module: its class, its settings, its buffers; its parameters where it belongs to an adapter."""
        module, where = part.module, part.name or "the model"
        self.seen.append(module)
        attributes = []
        for name, value in self._attributes(part, where):
            attributes.append([name, self.value(value, f"{where}.{name}")])
        tensors = sorted(
            [name, self.value(tensor, _join(where, name))]
            for name, tensor in _own(module, has_parameters=part.is_added)
        )
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())  # noqa: SLF001
        _check_hooks(where, *hooks)
        # The bound is for what one module holds, not for large models.
        self._left = _VALUES
        absent = sorted(name for name, value in module._parameters.items() if value is None)  # noqa: SLF001
        described = [
            part.name,
            self._class(type(module), where),
            sorted(attributes, key=_text),
            tensors,
            absent,
        ]
        return [*described, len(part.adapters), self._packed(module, where)]

    def _attributes(self, part: ExecutedPart, where: str) -> Iterator[tuple[str, object]]:
        module = part.module
        skipped = {*_OF_TORCH, *_BOOKKEEPING, *(_OF_ADAPTERS if part.adapters else ())}
        # Only training leaves an entry: models that are used have none.
        if module.training:
            yield "training", True
        if "_hf_hook" in module.__dict__:
            skipped.update(_ACCELERATE)
            yield from self._before_accelerate(module, where)
        for name, value in module.__dict__.items():
            if name in skipped or isinstance(value, GenerationConfig):
                continue
            if isinstance(value, (torch.ScriptObject, torch.jit.ScriptModule)):
                if not self._packed(module, where):
                    raise WeightsNotVisible(
                        module=f"{where}.{name}", problem="is an object that torch.jit hides"
                    )
                continue
            if part.adapters and isinstance(value, dict) and part.known_adapters.issuperset(value):
                yield name, {index: value[key] for index, key in enumerate(part.adapters) if key in value}
            else:
                yield name, value

    def _before_accelerate(self, module: Any, where: str) -> Iterator[tuple[str, object]]:
        # Any: accelerate may not be there to name the type. Its hooks place tensors, and change none.
        hooks = deque([module._hf_hook])  # noqa: SLF001
        while hooks:
            hook = hooks.popleft()
            if not type(hook).__module__.startswith("accelerate."):
                raise WeightsNotVisible(module=where, problem=f"has a hook of {type(hook).__qualname__}")
            hooks.extend(getattr(hook, "hooks", ()))
        before = module.__dict__.get("_old_forward")
        # accelerate puts its own `forward` in front: the one behind it is what the module computes.
        if before is not None and getattr(before, "__func__", before) is not type(module).forward:
            yield "forward", before

    def _packed(self, module: nn.Module, where: str) -> list[object]:
        """Weights in a form of the module's own, saved besides parameters and buffers."""
        packed: dict[str, object] = {}
        # Packed modules (torch.ao, bitsandbytes) show their weights here, and nowhere else.
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:  # noqa: SLF001
            module._save_to_state_dict(packed, "", keep_vars=True)  # noqa: SLF001
        elif type(module).get_extra_state is not nn.Module.get_extra_state:
            packed["extra state"] = module.get_extra_state()
        own = {*module._parameters, *module._buffers}  # noqa: SLF001
        return [
            [key, self.value(value, f"{where}.{key}")]
            for key, value in sorted(packed.items())
            if key not in own
        ]

    # -- values ----------------------------------------------------------------------------------------

    def value(self, value: Any, where: str) -> object:  # noqa: C901, PLR0911, PLR0912  a case for each sort
        """Describe anything. Any: modules hold what they like. Raises WeightsNotVisible."""
        match value:
            # An int of any subclass is its number; True is not 1.
            case None | bool() | int() | str():
                return int(value) if type(value) is not bool and isinstance(value, int) else value
            # `repr` gives all digits; JSON has neither NaN nor infinity.
            case float() | complex() | np.generic():
                return repr(value)
            case torch.dtype() | slice() | PurePath():
                return str(value)
            case torch.device():
                # The same model on another device is the same model.
                return "device"
            case enum.Enum():
                return [type(value).__qualname__, value.name]
            case Tensor():
                return self.tensor(value, where)
            case bytes() | bytearray() | memoryview():
                return hashlib.sha256(value).hexdigest()
            case np.ndarray() if value.dtype.kind != "O":
                return [
                    str(value.dtype),
                    list(value.shape),
                    hashlib.sha256(value.tobytes()).hexdigest(),
                ]
            case PreTrainedConfig():
                return self._config(value)
            case torch.ScriptObject() | torch.jit.ScriptModule() | torch.jit.ScriptFunction():
                raise WeightsNotVisible(module=where, problem="is an object that torch.jit hides")
        if id(value) in self._under_way:
            # A value that leads back to itself is told by how far up: a -> b -> a becomes a, b, ["again", 0].
            return ["again", self._under_way.index(id(value))]
        self._left -= 1
        if not self._left:
            raise WeightsNotVisible(module=where, problem=f"leads to more than {_VALUES} values")
        self._under_way.append(id(value))
        try:
            return self._compound(value, where)
        except RecursionError as error:
            raise WeightsNotVisible(module=where, problem="leads to values too deep to look into") from error
        finally:
            self._under_way.pop()

    def _compound(self, value: Any, where: str) -> object:  # noqa: PLR0911  as above
        # Any: modules hold what they like.
        self.seen.append(value)
        match value:
            case Mapping():
                pairs = [
                    [self.value(key, where), self.value(item, f"{where}[{key!r}]")]
                    for key, item in value.items()
                ]
                # Order of insertion differs between processes that built the same model.
                return ["mapping", sorted(pairs, key=_text)]
            case list() | tuple() | deque():
                return [self.value(item, f"{where}[{index}]") for index, item in enumerate(value)]
            case set() | frozenset():
                return ["set", sorted((self.value(item, where) for item in value), key=_text)]
            case nn.Module():
                # A module that is described as a part already is told by its name, not once more.
                known = self._names.get(id(value))
                return ["module", known] if known is not None else self._hidden_module(value, where)
            case functools.partial():
                return [
                    "partial",
                    *(self.value(item, where) for item in (value.func, value.args, value.keywords)),
                ]
            case types.MethodType():
                return ["method", self.value(value.__func__, where), self.value(value.__self__, where)]
            case types.FunctionType():
                return [value.__module__, value.__qualname__, self.foreign(value, where)]
            case types.BuiltinFunctionType() if isinstance(
                value.__self__, (types.ModuleType, type, types.NoneType)
            ):
                return [value.__module__, value.__qualname__]
            case type():
                return self._class(value, where)
        return self._object(value, where)

    def _hidden_module(self, module: nn.Module, where: str) -> object:
        """A module that no other module has among its submodules, with its weights."""
        executed = Executed(module)
        self._names.update(
            {key: f"{where}.{name}" for key, name in executed.names.items() if key not in self._names}
        )
        return [
            self.part(ExecutedPart(f"{where}.{part.name}", part.module, is_added=True))
            for part in executed.parts
        ]

    def _object(self, value: object, where: str) -> object:
        slots = slots_of(type(value))
        if not hasattr(value, "__dict__") and not slots:
            raise WeightsNotVisible(
                module=where, problem=f"holds {type(value).__qualname__}, which hides its contents"
            )
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
            value, "__dict__", {}
        )
        items = [[name, self.value(item, f"{where}.{name}")] for name, item in sorted(held.items())]
        return [self._class(type(value), where), items]

    def _config(self, config: PreTrainedConfig) -> str:
        digest = self._configs.get(id(config))
        if digest is None:
            self.seen.append(config)
            kept = {
                name: value
                for name, value in config.to_dict().items()
                if name not in _TRANSIENT_SETTINGS and value is not None
            }
            text = json.dumps(kept, sort_keys=True, default=str)
            digest = self._configs[id(config)] = hashlib.sha256(text.encode()).hexdigest()
        return digest

    # -- code ------------------------------------------------------------------------------------------

    def _class(self, cls: type, where: str) -> list[object]:
        """A class: its name, and all of its code that is no library's, be it put in later."""
        if cls not in self._classes:
            name = f"{cls.__module__}.{cls.__qualname__}"
            self._classes[cls] = [name]
            # All bases but `object`: methods that were replaced on a library's class count as well.
            for base in cls.__mro__[:-1]:
                self.seen.append(base)
                for attribute, held in sorted(vars(base).items()):
                    for function in _functions(held):
                        if code := self.foreign(function, f"{where}: {name}.{attribute}"):
                            self._classes[cls].append([attribute, code])
                    is_fact = isinstance(held, (int, float, str, Tensor)) and not attribute.startswith("__")
                    if is_fact and not _is_named(base.__module__, _LIBRARIES):
                        self._classes[cls].append([attribute, self.value(held, where)])
        return self._classes[cls]

    def patches(self, modules: Iterable[str]) -> list[object]:
        """Functions that modules of libraries use by their names, and which no installed package brought."""
        patched: list[object] = []
        for name in sorted({*modules, *_USED} & sys.modules.keys()):
            self.seen.append(sys.modules[name])
            for attribute, held in sorted(vars(sys.modules[name]).items()):
                if isinstance(held, types.FunctionType) and _is_named(name, _LIBRARIES):
                    # A package that was installed is what its version
                    # says; code of a notebook or script is not.
                    is_installed = any(part in held.__code__.co_filename for part in _INSTALLED)
                    if not is_installed and (code := self.foreign(held, f"{name}.{attribute}")):
                        patched.append([name, attribute, code])
        return patched

    def foreign(self, function: Any, where: str) -> list[object]:
        """The code of a function, where it or a function that it wraps is no library's; else nothing.

        Any: whatever can be called.
        """
        code = getattr(function, "__code__", None)
        # Functions that call each other would be described without end.
        if code is None or function in self._called:
            return []
        self._called.append(function)
        try:
            cells = [cell.cell_contents for cell in filled_cells(function)]
            if self._is_library(function):
                wrapped = [item for item in cells if isinstance(item, types.FunctionType)]
                return [found for item in wrapped if (found := self.foreign(item, where))]
            self.seen.append(function)
            held = [
                self.value(item, where) for item in (*cells, function.__defaults__, function.__kwdefaults__)
            ]
            # Closures and defaults are values that the code computes with.
            return [self._code(code, where), held]
        finally:
            self._called.pop()

    def _is_library(self, function: types.FunctionType) -> bool:
        # The file decides: a decorator gives a function another's name. Generated code has no file.
        path = function.__code__.co_filename
        if path.startswith("<"):
            return path.startswith("<frozen") or _is_named(
                str(function.__globals__.get("__name__")), _LIBRARIES
            )
        is_installed = any(part in path for part in _INSTALLED)
        return path.startswith(self._directories) or (path.startswith(_STANDARD) and not is_installed)

    def _code(self, code: types.CodeType, where: str) -> list[object]:
        constants = [
            self._code(item, where) if isinstance(item, types.CodeType) else self.value(item, where)
            for item in code.co_consts
        ]
        # Bytecode differs by version of Python: with such code, engines share sessions within one version.
        return [code.co_code.hex(), list(code.co_names), constants]

    # -- tensors ---------------------------------------------------------------------------------------

    def tensor(self, tensor: Tensor, where: str) -> object:
        """A tensor of any sort: type, shape, bytes; what it consists of, where it is packed."""
        self.seen.append(tensor)
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            raise WeightsNotVisible(module=where, problem="is not in memory: offloaded, or never loaded")
        if hasattr(tensor, "device_mesh"):
            raise WeightsNotVisible(module=where, problem="is spread over several processes")
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        if type(tensor) not in (Tensor, nn.Parameter):
            # Subclasses such as torchao's say of which plain tensors they consist.
            if hasattr(tensor, "__tensor_flatten__"):
                inner, context = tensor.__tensor_flatten__()
                parts = [[name, self.value(getattr(tensor, name), f"{where}.{name}")] for name in inner]
                return [kind, list(tensor.shape), parts, self.value(context, where)]
            held = {name: item for name, item in tensor.__dict__.items() if name not in _BOOKKEEPING}
            return [kind, _plain(tensor.as_subclass(Tensor), where), self.value(held, where)]
        return _plain(tensor.detach(), where)


def _plain(tensor: Tensor, where: str) -> list[object]:
    described: list[object] = [str(tensor.dtype), list(tensor.shape)]
    if tensor.is_quantized:
        # The same integers under another scale are another weight.
        described.append(str(tensor.qscheme()))
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            described += [repr(tensor.q_scale()), tensor.q_zero_point()]
        else:
            described += [
                _plain(tensor.q_per_channel_scales(), where),
                _plain(tensor.q_per_channel_zero_points(), where),
            ]
        tensor = tensor.int_repr()
    if tensor.layout is not torch.strided:
        raise WeightsNotVisible(module=where, problem=f"has the layout {tensor.layout}")
    digest = hashlib.sha256()
    try:
        # Fake and wrapper tensors have a shape and no bytes: digesting them would read nothing, or crash.
        if tensor.numel() and not tensor.untyped_storage().data_ptr():
            raise WeightsNotVisible(module=where, problem="has no bytes of its own that could be read")
        # Lazy conjugates and negatives keep the former bytes and a flag: the values are what counts.
        for block in _blocks(tensor.detach().resolve_conj().resolve_neg()):
            digest.update(block.view(torch.uint8).numpy().data)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise WeightsNotVisible(module=where, problem=f"cannot be read: {error}") from error
    return [*described, digest.hexdigest()]


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """All elements in order, [n] on the host each, a bounded part at a time."""
    if tensor.ndim == 0:
        tensor = tensor[None]
    row_bytes = tensor.nbytes // max(len(tensor), 1)
    if tensor.is_contiguous():
        flat, step = tensor.view(-1), max(_BLOCK_BYTES // tensor.itemsize, 1)
        yield from (flat[begin : begin + step].cpu() for begin in range(0, len(flat), step))
    # A view with strides is made contiguous by parts: a whole copy could be as large as the model.
    elif row_bytes > _BLOCK_BYTES:
        for row in tensor:
            yield from _blocks(row)
    else:
        step = max(_BLOCK_BYTES // max(row_bytes, 1), 1)
        for begin in range(0, len(tensor), step):
            yield tensor[begin : begin + step].cpu().contiguous().view(-1)


def _own(module: nn.Module, *, has_parameters: bool) -> Iterator[tuple[str, Tensor]]:
    """A module's buffers, and its parameters, by each of their names."""
    if has_parameters:
        yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    module = torch.nn.modules.module
    # Any: hooks that keep their arguments have another type.
    return module._global_forward_pre_hooks, module._global_forward_hooks  # noqa: SLF001


def _is_tuner(module: nn.Module) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def filled_cells(function: types.FunctionType) -> Iterator[types.CellType]:
    """The cells of a function's closure that have a value."""
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018  raises where it is empty
        except ValueError:
            continue
        yield cell


def _library_directories() -> tuple[str, ...]:
    modules = (sys.modules.get(name) for name in _LIBRARIES)
    return tuple(
        f"{path}/" for module in modules if module is not None for path in getattr(module, "__path__", ())
    )


def _is_named(module: str, libraries: Collection[str]) -> bool:
    return module.partition(".")[0] in libraries


def _check_hooks(where: str, *hooks: object) -> None:
    """Refuse hooks that may change a pass: restores project without them."""
    for hook in hooks:
        if not str(getattr(hook, "__module__", "")).startswith(_WATCHING):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise WeightsNotVisible(
                module=where, problem=f"has the hook {name}, which may change what it computes"
            )


def _functions(held: object) -> Iterator[object]:
    """The functions behind an attribute of a class or a module."""
    match held:
        case types.FunctionType():
            yield held
        case staticmethod() | classmethod():
            yield held.__func__
        case property():
            yield from (each for each in (held.fget, held.fset) if each is not None)


def _keys(held: object) -> Iterable[str]:
    return held.keys() if isinstance(held, (dict, nn.ModuleDict, nn.ParameterDict)) else ()


def slots_of(cls: type) -> list[str]:
    """The names of attributes that objects of a class keep outside of a `__dict__`."""
    return [name for base in cls.__mro__ for name in _names_of(getattr(base, "__slots__", ()))]


def _names_of(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _text(described: object) -> str:
    return json.dumps(described, sort_keys=True)
