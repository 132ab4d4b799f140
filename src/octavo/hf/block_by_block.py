"""A model of transformers run one block at a time, so that one larger than memory fits.

    ids -> [frame: embeddings, positions] -> block 0 -> block 1 -> ... -> [frame: last norm, pooler] -> (head)

The whole model is on the meta device. The frame, which is all that is not in the stack of blocks, gets its numbers for
good, a block only while it runs; the head never does. To run block i, the model's own forward is called on the ids: it
computes what it would (masks, rotary tables, by kind of layer), blocks before i hand through what they get, block i is
given the stored hidden states in its place, and what it returns ends the call. So no block's arguments are guessed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.artifact.files import ArtifactError, read_json
from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE
from octavo.hf.gpt2_as_opt import open_tensors
from octavo.hf.meta_model import MetaModel, compute_buffers, transformers_meta_model

SUPPORTED = "Llama, Mistral, Qwen2, Qwen3, GPT-2, OPT and BERT-like encoders are"
_OLDER_NAMES = {"weight": "gamma", "bias": "beta"}  # of a LayerNorm in BERT's first checkpoints

Looking = Callable[[], AbstractContextManager[None]]


def _meta_model(config: Mapping[str, Any], folder: Path) -> MetaModel:
    """The model of transformers that the parsed config.json of `folder` describes.

    Raises an ArtifactError if it is packed already, or of an architecture that cannot run block by block.
    """
    where = folder / "config.json"
    if config.get("quantization_config"):
        raise ArtifactError(f"{where} is of a packed model: calibrate the BF16 model that it was packed from")
    meta_model = transformers_meta_model(config, folder)
    model: Any = meta_model.model
    model.config.use_cache = False
    if reason := _unsupported(model):
        raise ArtifactError(f"{where}: {type(model).__name__} cannot be calibrated, {reason}; {SUPPORTED} supported")
    return meta_model


def _unsupported(model: Any) -> str:
    from transformers.pytorch_utils import Conv1D

    if model.config.is_encoder_decoder:
        return "it has an encoder and a decoder"
    if any(isinstance(module, Conv1D) for module in model.modules()):
        return "its layers are Conv1D, which are not packed (but for GPT-2's, which is read as OPT)"
    if fused := [name for name, p in model.named_parameters() if p.ndim == 3]:
        return f"its experts are one tensor ({fused[0]}) and no linear layers"
    if len(_stacks(model)) != 1:
        return f"it must have one list of its num_hidden_layers blocks, and has {len(_stacks(model))}"
    return ""


def _stacks(model: Any) -> list[str]:
    """The outermost module lists as long as the model is deep."""
    count = model.config.get_text_config().num_hidden_layers
    found: list[str] = []
    for name, module in model.named_modules():
        inner = name.startswith(tuple(f"{outer}." for outer in found))
        if isinstance(module, nn.ModuleList) and len(module) == count and not inner:
            found.append(name)
    return found


class _Stop(Exception):  # noqa: N818, for it is none
    """Ends the model's forward with what there is."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class BlockModel:
    """The model in `folder`, run in parts on `device`; a `loaded_frame` block must be open around all of them.

    Attributes:
        model: on the meta device but for what is loaded.
        blocks: their names.
        context: the positions that the model has.

    Raises:
        FileNotFoundError: there is no config.json, or a file of tensors is missing.
        ArtifactError: the model is packed already, its architecture cannot run block by block, or a tensor is in no
            file or has another shape there; the message says which.
        ImportError: transformers is not installed.
    """

    def __init__(self, folder: Path, device: str | torch.device) -> None:
        config = read_json(folder / "config.json")
        meta_model = _meta_model(config, folder)
        self.model = cast(Any, meta_model.model)
        self.context = meta_model.context
        self.device = torch.device(device)
        self._files = open_tensors(folder, config)
        [stack] = _stacks(self.model)
        modules: Any = self.model.get_submodule(stack)
        self._modules: list[Any] = list(modules)
        self.blocks = [f"{stack}.{i}" for i in range(len(self._modules))]
        self._head: Any = self.model.get_output_embeddings()
        tied: dict[Tensor, list[str]] = {}  # a tensor is equal to itself alone as a key
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(parameter, []).append(name)
        heads = {id(module) for module in self._head.modules()} if self._head is not None else set()
        self._on_disk: dict[str, str] = {}  # of what gets numbers
        for parameter, names in tied.items():
            needed = [name for name in names if id(self._owner(name)[0]) not in heads]
            if needed:
                self._on_disk |= dict.fromkeys(needed, self._find(parameter, names))

    def outside(self, names: Iterable[str]) -> list[str]:
        """Those of `names` (of modules or parameters) that are in no block."""
        return [name for name in names if not name.startswith(tuple(f"{block}." for block in self.blocks))]

    # --- Numbers -----------------------------------------------------------------------------------------------------

    @contextmanager
    def loaded_frame(self) -> Iterator[None]:
        """Numbers for all that is neither in a block nor in the head alone, and for buffers that no file holds."""
        compute_buffers(self.model, self.device)
        with self._loaded(self.outside(self._on_disk)):
            yield

    @contextmanager
    def loaded_block(self, index: int) -> Iterator[None]:
        """Numbers for one block."""
        with self._loaded([name for name in self._on_disk if name.startswith(f"{self.blocks[index]}.")]):
            yield

    @contextmanager
    def _loaded(self, names: list[str]) -> Iterator[None]:
        empty = {name: self._owner(name)[0]._parameters[self._owner(name)[1]] for name in names}
        filled: dict[str, nn.Parameter] = {}
        try:
            for name in names:
                owner, leaf = self._owner(name)
                disk = self._on_disk[name]
                if disk not in filled:
                    tensor = self._files.get(disk).to(self.device, UNQUANTIZED_DTYPE)
                    filled[disk] = nn.Parameter(tensor, requires_grad=False)
                owner._parameters[leaf] = filled[disk]
            yield
        finally:
            for name, parameter in empty.items():
                owner, leaf = self._owner(name)
                owner._parameters[leaf] = parameter

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        module, _, leaf = name.rpartition(".")
        return self.model.get_submodule(module), leaf

    def _find(self, parameter: Tensor, names: list[str]) -> str:
        """The name on disk of a parameter that has one or, tied, several names in the model."""
        older = [f"{name.rpartition('.')[0]}.{_OLDER_NAMES.get(name.rpartition('.')[2], '')}" for name in names]
        found = next((name for name in (*names, *older) if name in self._files.specs), None)
        if found is None:
            raise ArtifactError(f"{self._files.folder}: tensor {names[0]} is missing, and the model needs it")
        shape = self._files.specs[found].shape
        if shape != tuple(parameter.shape):
            raise ArtifactError(
                f"{self._files.folder}: {found} must have shape {list(parameter.shape)}, the file has {list(shape)}"
            )
        return found

    # --- Parts -------------------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor, looking: Looking = nullcontext) -> Tensor:
        """What the first block gets, [B, T, width], of ids int64 [B, T]."""

        def block(index: int, real: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise _Stop(hidden)

        with looking():
            return self._run(ids, block)

    def run_block(self, index: int, ids: Tensor, hidden: Tensor, looking: Looking = nullcontext) -> Tensor:
        """What block `index` makes of `hidden` [B, T, width], the same shape; it must be loaded."""

        def block(at: int, real: Callable[..., Any], passed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if at < index:
                return passed
            with looking():
                raise _Stop(real(hidden.to(self.device), *args, **kwargs))

        return self._run(ids, block)

    def finish(self, ids: Tensor, hidden: Tensor, looking: Looking = nullcontext) -> None:
        """Run what follows the last block, up to the head, on the `hidden` that this gave."""
        with ExitStack() as later:

            def block(at: int, real: Callable[..., Any], passed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if at < len(self.blocks) - 1:
                    return passed
                later.enter_context(looking())
                return hidden.to(self.device)

            self._run(ids, block)

    @torch.no_grad()
    def _run(self, ids: Tensor, block: Callable[..., Tensor]) -> Tensor:
        """The model's forward, with `block` in the place of every block, as far as it gets."""
        replaced = [m for m in (*self._modules, self._head) if m is not None]
        try:
            for index, module in enumerate(self._modules):
                module.forward = functools.partial(_call, block, index, module.forward)
            if self._head is not None:
                self._head.forward = lambda hidden: hidden
            self.model(input_ids=ids.to(self.device))
        except _Stop as stop:
            if not isinstance(stop.hidden, Tensor):
                raise ArtifactError(
                    f"a block of {type(self.model).__name__} returned {type(stop.hidden).__name__}, it must return "
                    f"one tensor; {SUPPORTED} supported"
                ) from None
            return stop.hidden
        finally:
            for module in replaced:
                vars(module).pop("forward", None)
        return ids


def _call(block: Callable[..., Tensor], index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    if "hidden_states" in kwargs:
        return block(index, real, kwargs.pop("hidden_states"), *args, **kwargs)
    return block(index, real, *args, **kwargs)
