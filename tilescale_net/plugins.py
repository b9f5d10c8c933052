"""Entry points that servers call in each of their processes: with a variable set, `deep_ep` is tilescale_net.deep_ep
there, and their tensor parallelism uses this package's all-reduce.

Without it they do nothing, and import nothing: an installation alone changes no server. docs/integrations.md lists the
replaced parts, how to see them and how to turn them off.
"""

import importlib
import logging
import sys
from typing import Any

from tilescale_net.runtime import settings

# Modules of SGLang that its processes import before plug-ins, and their names from deep_ep.
_DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher."
_SGLANG = {
    _DISPATCHERS + "deepep": (("Buffer", "Config"), "use_deepep", "_deepep_import_error"),
    _DISPATCHERS + "deepep_v2": (("ElasticBuffer",), "use_deepep_v2", "_deepep_v2_import_error"),
}
# The group communicator that vLLM's CUDA platform names, and its replacement.
_COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
_OURS = "tilescale_net.vllm_communicator.Communicator"
# The module of vLLM whose import looks for deep_ep, once.
_VLLM = "vllm.model_executor.layers.fused_moe.all2all_utils"


def vllm() -> None:
    """Of `vllm.general_plugins`: obeys TSN_VLLM. Raises TileScaleError if vLLM has looked for deep_ep already."""
    parts = settings.VLLM.get()
    if "deep_ep" in parts:
        _vllm_all_to_all()
    if "all_reduce" in parts or "norm" in parts:
        platform = importlib.import_module("vllm.platforms").current_platform
        named = platform.get_device_communicator_cls()
        if named == _COMMUNICATOR:
            type(platform).get_device_communicator_cls = classmethod(lambda cls: _OURS)
        elif named != _OURS:
            logging.getLogger("vllm.tilescale_net").warning(
                "%s: tensor parallelism stays vLLM's, whose platform has %s instead of %s",
                settings.VLLM.name,
                named,
                _COMMUNICATOR,
            )


def _vllm_all_to_all() -> None:
    from tilescale_net.errors import TileScaleError

    if _VLLM in sys.modules and sys.modules.get("deep_ep") is not _ours():
        raise TileScaleError(
            f"TSN_VLLM: {_VLLM} was imported before vLLM's plug-ins were loaded, and has looked for deep_ep; put a "
            "deep_ep.py in a folder of PYTHONPATH, see docs/integrations.md"
        )
    _take_over("vllm", settings.VLLM.name)
    found = sys.modules.get("vllm.utils.import_utils")
    if found is not None:  # it remembers modules that it has not found
        vars(found)["_has_module"].cache_clear()


def sglang() -> None:
    """Of `sglang.srt.plugins`: obeys TSN_SGLANG."""
    parts = settings.SGLANG.get()
    if "deep_ep" in parts:
        _sglang_all_to_all()
    if "all_reduce" in parts or "norm" in parts:
        importlib.import_module("tilescale_net.sglang_hooks").register()


def _sglang_all_to_all() -> None:
    _take_over("sglang", settings.SGLANG.name)
    for name, (taken, flag, error) in _SGLANG.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        for each in taken:
            setattr(module, each, getattr(_ours(), each))
        if not getattr(module, flag):
            name = "sglang_per_token_group_quant_fp8"  # which the module imports behind deep_ep
            quantise = getattr(importlib.import_module("sglang.kernels.ops.quantization.fp8_kernel"), name)
            vars(module).update({name: quantise, flag: True, error: None})


def _ours() -> Any:
    import tilescale_net.deep_ep

    return tilescale_net.deep_ep


def _take_over(server: str, variable: str) -> None:
    """Replace DeepEP by this package, even after its import, and say so in the server's log."""
    if sys.modules.get("deep_ep", _ours()) is not _ours():
        for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
            del sys.modules[name]
    _ours().install()
    from tilescale_net import __version__

    logging.getLogger(f"{server}.tilescale_net").info(
        "deep_ep is tilescale_net.deep_ep %s in this process, by %s", __version__, variable
    )
