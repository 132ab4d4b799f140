"""Running a model of transformers one block at a time, so that a model larger than memory fits.

    ids -> [frame: embeddings, positions] -> block 0 -> block 1 -> ... -> [frame: last norm, pooler] -> (head)

The whole model is on the meta device. The frame is every module outside the stack of blocks; its weights are loaded
once. The weights of a block are loaded while it runs, those of the head never. To run block i, the model's own forward
is called on the ids. So the model itself computes the arguments of its blocks (masks, rotary tables). Blocks before i
return their input, block i gets the stored hidden states, and its output ends the call.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from octavo.architectures import ARCHITECTURES
from octavo.checkpoint.files import ArtifactError, model_tensors
from octavo.hf.meta_model import compute_buffers, expert_matrices, tied_names, transformers_meta_model
from octavo.hf.source import Source
from octavo.nn.conversion import find_experts
from octavo.nn.module_tools import is_conv1d

_NAMES = ", ".join(each.name for each in ARCHITECTURES.values() if each.block.rms)
SUPPORTED = f"{_NAMES}, GPT-2, OPT and BERT-like encoders are supported, and pack --freeze runs others as a whole"

Looking = Callable[[], AbstractContextManager[None]]


def _unsupported(model: Any) -> str:
    if model.config.is_encoder_decoder:
        return "it has an encoder and a decoder"
    if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        return "its last blocks read keys and values of blocks before them"
    if any(map(is_conv1d, model.modules())):
        return "its layers are Conv1D, which are not packed (except GPT-2's, which is read as OPT)"
    known = [*find_experts(model), *(name for name, m in model.named_modules() if isinstance(m, nn.Conv1d))]
    if fused := [name for name, p in model.named_parameters() if p.ndim == 3 and name.rpartition(".")[0] not in known]:
        return f"it has a tensor of three dimensions ({fused[0]}) in a class that Octavo does not know"
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


class _Stop(Exception):  # noqa: N818, it is no error
    """Ends the model's forward, and carries the hidden states out of it."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class BlockModel:
    """The model of `source`, run in parts on `device`.

    `model` stays on the meta device; `loaded` has the weights of its next call by their names, those of the frame and
    of one block. `blocks` are the names of its blocks; `experts` has the matrices of each module of experts, by their
    names in the files. An ArtifactError if the architecture cannot run block by block.
    """

    def __init__(self, source: Source, device: str | torch.device) -> None:
        self.meta_model = meta_model = transformers_meta_model(source.config, source.description)
        meta_model.require_text()
        self.model = model = cast(Any, meta_model.model)
        model.config.use_cache = False
        if reason := _unsupported(model):
            raise ArtifactError(
                f"{source.description / 'config.json'}: {type(model).__name__} cannot be calibrated, {reason}; "
                f"{SUPPORTED}"
            )
        self.experts = expert_matrices(meta_model)
        self.device, self._source = torch.device(device), source
        [stack] = _stacks(self.model)
        self._modules: list[Any] = list(self.model.get_submodule(stack))
        self.loaded: dict[str, Tensor] = {}
        self.blocks = [f"{stack}.{i}" for i in range(len(self._modules))]
        self._head: Any = self.model.get_output_embeddings()
        heads = {id(module) for module in self._head.modules()} if self._head is not None else set()
        buffers = model_tensors(self.model).keys() - dict(self.model.named_parameters()).keys()
        specs = source.reader.specs
        # The name in the files of each tensor that is loaded.
        self._on_disk = {name: name for name in buffers if name in specs}
        for name, names in tied_names(self.model).items():
            if id(self.model.get_submodule(name.rpartition(".")[0])) not in heads:
                self._on_disk[name] = next((each for each in names if each in specs), names[0])

    def outside(self, names: Iterable[str]) -> list[str]:
        """The `names` of modules or parameters that are in no block."""
        return [name for name in names if not name.startswith(tuple(f"{block}." for block in self.blocks))]

    @cached_property
    def _frame(self) -> dict[str, Tensor]:
        """The weights outside of the blocks and the head. Buffers that no file holds are computed in the model."""
        compute_buffers(self.model, self.device)
        return self._read(self.outside(self._on_disk))

    def load_block(self, index: int | None) -> None:
        """Load the weights of a block, in place of those of another; None loads the frame alone."""
        self.loaded = self._frame
        if index is not None:
            names = [name for name in self._on_disk if name.startswith(f"{self.blocks[index]}.")]
            self.loaded = self._frame | self._read(names)

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        stated, tied = self.model.state_dict(), {self._on_disk[name]: name for name in names}
        read = {disk: self._source.read(disk).to(self.device, stated[name].dtype) for disk, name in tied.items()}
        return {name: read[self._on_disk[name]] for name in names}

    def run_part(self, part: int, ids: Tensor, hidden: Tensor | None, looking: Looking = nullcontext) -> Tensor:
        """The hidden states [B, T, width] after a part, from the `hidden` ones before it and ids int64 [B, T].

        Part 0 is the embeddings, parts 1 to L are the blocks, each of which must be loaded. Part L + 1 is what lies
        between the last block and the head, and returns no hidden states. The part runs within a `looking` block.
        """
        last = len(self.blocks)
        with ExitStack() as seen:

            def block(real: Callable[..., Any], passed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if hidden is None:
                    raise _Stop(passed)
                seen.enter_context(looking())
                if part > last:
                    return hidden.to(self.device)
                raise _Stop(real(hidden.to(self.device), *args, **kwargs))

            if hidden is None:
                seen.enter_context(looking())
            return self._run(ids, min(max(part, 1), last) - 1, block)

    @torch.no_grad()
    def _run(self, ids: Tensor, index: int, block: Callable[..., Tensor]) -> Tensor:
        """Run the model with `block` in place of one block until it raises `_Stop`; the others return their input."""
        replaced = [m for m in (*self._modules, self._head) if m is not None]
        real = self._modules[index].forward
        try:
            for module in replaced:
                module.forward = partial(_call, lambda hidden, *args, **kwargs: hidden)
            if self._head is not None:  # one logit a token, to which ESM adds a bias as wide as the vocabulary
                self._head.forward = lambda hidden: hidden[..., :1]
            self._modules[index].forward = partial(_call, partial(block, real))
            functional_call(self.model, self.loaded, (), {"input_ids": ids.to(self.device)}, tie_weights=False)
        except _Stop as stop:
            if not isinstance(stop.hidden, Tensor):
                raise ArtifactError(
                    f"a block of {type(self.model).__name__} returned {type(stop.hidden).__name__}, it must return "
                    f"one tensor; {SUPPORTED}"
                ) from None
            return stop.hidden
        finally:
            for module in replaced:
                vars(module).pop("forward", None)
        return ids


def _call(block: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if "hidden_states" in kwargs:
        return block(kwargs.pop("hidden_states"), *args, **kwargs)
    return block(*args, **kwargs)
