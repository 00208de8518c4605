"""Folders of peft: the weights of one adapter, without the model that it adapts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from holdfast.format.names import component, join
from holdfast.format.values import Open
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged
from holdfast.interop.hugging_face import state_of_headers
from holdfast.interop.peft_names import CONFIG_NAME, WEIGHTS_NAME, decoded_config, is_copy, live_name
from holdfast.interop.safetensors_header import read_header

_MODEL: Final = "model"
_MODEL_FILES: Final = ("model.safetensors", "model-")
_MAX_CONFIG_NBYTES: Final = 16 << 20


class PeftFormat:
    """Folders with the adapter ``default``, as `PeftModel.save_pretrained` writes them."""

    kind: Final = "a folder of PEFT adapters"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`. A folder that has a model, too, is one of that model."""
        return {CONFIG_NAME, WEIGHTS_NAME} <= set(names) and not any(name.startswith(_MODEL_FILES) for name in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`."""
        try:
            config = decoded_config(folder.storage.read(CONFIG_NAME, limit=_MAX_CONFIG_NBYTES))
        except ValueError as error:
            raise damaged(folder.path(CONFIG_NAME), f"is malformed ({error})") from error
        header = read_header(folder.storage, WEIGHTS_NAME)
        keys = {tensor.name for tensor in header.tensors}
        once = tuple(tensor for tensor in header.tensors if not is_copy(tensor.name, keys, config))
        headers = {WEIGHTS_NAME: header._replace(tensors=once)}
        return state_of_headers(
            folder,
            headers,
            kind=self.kind,
            name_of=lambda key: join(_MODEL, component(live_name(key, config))),
            nodes={"": Open("dict"), _MODEL: Open("dict")},
        )
