"""What worker.py needs of ggml and llama_cpp does not wrap. Imports the standard library only, as it does."""

import ctypes
import os
import socket


class Ggml:
    """The part of ggml's backend registry that llama_cpp does not wrap, taken from the same loaded library."""

    def __init__(self, lib):
        p, s = ctypes.c_void_p, ctypes.c_char_p
        for name, result, *args in (
            ("ggml_backend_load_all_from_path", None, s),
            ("ggml_backend_reg_by_name", p, s),
            ("ggml_backend_reg_get_proc_address", p, p, s),
            ("ggml_backend_register", None, p),
            ("ggml_backend_dev_count", ctypes.c_size_t),
            ("ggml_backend_dev_get", p, ctypes.c_size_t),
            ("ggml_backend_dev_by_name", p, s),
            ("ggml_backend_dev_name", s, p),
            ("ggml_backend_dev_description", s, p),
            ("ggml_backend_dev_type", ctypes.c_int, p),
            ("ggml_backend_dev_memory", None, p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
            ("ggml_backend_dev_buffer_type", p, p),
            ("ggml_backend_buft_name", s, p),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, args
            setattr(self, name.removeprefix("ggml_backend_"), function)

    def handles(self):
        """All registered devices; backends built as modules are looked for in the library's own folder."""
        if not self.dev_count():
            self.load_all_from_path(os.environ["LLAMA_CPP_LIB_PATH"].encode())
        return [self.dev_get(i) for i in range(self.dev_count())]

    def describe(self, device):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.dev_memory(device, free, total)
        return {
            "name": self.dev_name(device).decode(),
            "description": self.dev_description(device).decode(),
            "kind": ("cpu", "gpu", "igpu", "accel", "meta")[self.dev_type(device)],
            "buffer_type": self.buft_name(self.dev_buffer_type(device)).decode(),
            "free_bytes": free.value,
            "total_bytes": total.value,
        }

    def add_rpc_server(self, endpoint):
        """As upstream's common/arg.cpp add_rpc_devices; ggml aborts on a server that is not there, so look first."""
        rpc = self.reg_by_name(b"RPC")
        if not rpc:
            raise ValueError("this engine was built without the RPC backend")
        host, _, port = endpoint.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"no RPC server at {endpoint!r} ({error}); start one with ggml-rpc-server") from None
        add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(
            self.reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
        )
        server = add(endpoint.encode())
        if not server:
            raise ValueError(f"the RPC server at {endpoint} has no device")
        self.register(server)

    def device(self, name):
        found = self.dev_by_name(name.encode())
        if not found:
            have = ", ".join(self.dev_name(d).decode() for d in self.handles())
            raise ValueError(f"device {name!r} does not exist; this engine has {have}")
        return found

    def buffer_type(self, name):
        have = {self.buft_name(t).decode(): t for t in map(self.dev_buffer_type, self.handles())}
        if name not in have:
            raise ValueError(f"buffer type {name!r} does not exist; this engine has {', '.join(have)}")
        return have[name]


class TensorOverride(ctypes.Structure):
    """llama_model_tensor_buft_override, which llama-cpp-python leaves out."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))
