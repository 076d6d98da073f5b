"""A ring's device memory: tensors that a worker's kernels write and read on the server's GPU.

The vendor's runtime is opened when a region is mapped, by its own library; nothing here needs
PyTorch or CUDA's toolkit. The process's primary context of its device is used, as PyTorch does. A
server's GPU that is not this process's must be visible here, and both must be peers.

Threading: any thread.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from mla_client import errors
from mla_client.base import process
from mla_client.shm.blocks import Blocks
from mla_client.types import Buffers, ModelSpec

# The fields of DeviceHeader in proto/wire/ring_layout.h.
HEADER = struct.Struct("<IIIIQ16s24s64s")
HANDLE_BYTES = 64
DESCRIPTOR, HANDLE = 1, 2  # kinds of memory
# The same in both vendors' headers, unless named otherwise.
_POSIX_DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_EVENT_WITHOUT_TIMING, _STREAM_NON_BLOCKING, _LAZY_PEER_ACCESS = 2, 1, 1
_NVIDIA_MPS_ENABLED = 133
_NVIDIA = ("libcuda.so.1",)
_AMD = ("libamdhip64.so.7", "libamdhip64.so.6")
# As hipRuntimeGetVersion counts: from ROCm 7.1 on a descriptor is imported by value, as CUDA's are.
# Before, the call is given the address of one.
_AMD_IMPORTS_BY_VALUE = 70100000
# DLPack: https://dmlc.github.io/dlpack
_DL_CUDA, _DL_ROCM = 2, 10
_DL_FLOAT, _DL_BFLOAT = 2, 4
_CAPSULE = b"dltensor"

_P, _SIZE, _INT, _UINT, _U64 = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint,
                                ctypes.c_ulonglong)


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _Access(ctypes.Structure):
    _fields_ = [("type", _INT), ("id", _INT), ("flags", _INT)]


# name: (HIP's, CUDA's, argument types); None: the vendor has no such call.
_CALLS: Dict[str, Tuple[Optional[str], Optional[str], List[Any]]] = {
    "init": ("hipInit", "cuInit", [_UINT]),
    "device_count": ("hipGetDeviceCount", "cuDeviceGetCount", [_P]),
    "uuid": ("hipDeviceGetUuid", "cuDeviceGetUuid_v2", [_P, _INT]),
    "import_memory": ("hipMemImportFromShareableHandle", "cuMemImportFromShareableHandle",
                      [_P, _P, _INT]),
    "reserve": ("hipMemAddressReserve", "cuMemAddressReserve", [_P, _SIZE, _SIZE, _P, _U64]),
    "unreserve": ("hipMemAddressFree", "cuMemAddressFree", [_P, _SIZE]),
    "map": ("hipMemMap", "cuMemMap", [_P, _SIZE, _SIZE, _U64, _U64]),
    "unmap": ("hipMemUnmap", "cuMemUnmap", [_P, _SIZE]),
    "release": ("hipMemRelease", "cuMemRelease", [_U64]),
    "set_access": ("hipMemSetAccess", "cuMemSetAccess", [_P, _SIZE, _P, _SIZE]),
    "open_memory": ("hipIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", [_P, _Handle, _UINT]),
    "close_memory": ("hipIpcCloseMemHandle", "cuIpcCloseMemHandle", [_P]),
    "open_event": ("hipIpcOpenEventHandle", "cuIpcOpenEventHandle", [_P, _Handle]),
    "event_create": ("hipEventCreateWithFlags", "cuEventCreate", [_P, _UINT]),
    "event_destroy": ("hipEventDestroy", "cuEventDestroy_v2", [_P]),
    "event_record": ("hipEventRecord", "cuEventRecord", [_P, _P]),
    "stream_create": ("hipStreamCreateWithFlags", "cuStreamCreate", [_P, _UINT]),
    "stream_destroy": ("hipStreamDestroy", "cuStreamDestroy_v2", [_P]),
    "stream_wait": ("hipStreamWaitEvent", "cuStreamWaitEvent", [_P, _P, _UINT]),
    "version": ("hipRuntimeGetVersion", None, [_P]),
    "get_device": ("hipGetDevice", None, [_P]),
    "set_device": ("hipSetDevice", None, [_INT]),
    "retain": (None, "cuDevicePrimaryCtxRetain", [_P, _INT]),
    "push": (None, "cuCtxPushCurrent_v2", [_P]),
    "pop": (None, "cuCtxPopCurrent_v2", [_P]),
    "attribute": (None, "cuDeviceGetAttribute", [_P, _INT, _INT]),
}


def _libraries(nvidia: bool) -> Tuple[str, ...]:
    """Names for the loader to find; of AMD's also in the folders where ROCm lies, since its
    packages do not always tell the loader."""
    if nvidia:
        return _NVIDIA
    rocm = os.environ.get("ROCM_PATH", "")
    folders = ([f"{rocm}/lib"] if rocm else []) + ["/opt/rocm/lib"]
    return _AMD + tuple(f"{folder}/{name}" for folder in folders for name in _AMD)


def _open(names: Tuple[str, ...]) -> ctypes.CDLL:
    """The one that the process has loaded, since a second runtime would know nothing of what the
    first one has; else the first that can be."""
    reasons: List[str] = []
    for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
        reasons.clear()
        for name in names:
            try:
                return ctypes.CDLL(name, mode)
            except OSError as error:
                reasons.append(str(error))
    raise errors.Unavailable(f"device memory: no GPU runtime: {'; '.join(reasons)}")


class _Runtime:
    """The vendor's entry points; each raises Internal when it fails."""

    def __init__(self, nvidia: bool, library: str) -> None:
        self.nvidia = nvidia
        opened = _open((library,) if library else _libraries(nvidia))
        for field, (amd, cuda, arguments) in _CALLS.items():
            wanted = cuda if nvidia else amd
            if wanted is None:
                continue
            try:
                entry = getattr(opened, wanted)
            except AttributeError:
                raise errors.Unavailable(
                    f"device memory: the GPU runtime has no entry point {wanted}") from None
            entry.argtypes, entry.restype = arguments, _INT
            setattr(self, field, self._checked(entry, wanted))

    @staticmethod
    def _checked(entry: Any, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            code = entry(*arguments)
            if code != 0:
                raise errors.Internal(f"device memory: {name} failed with code {code}")
        return call


class _Current:
    """Makes a device current within a `with` block."""

    def __init__(self, runtime: Any, device: int, context: Optional[int]) -> None:
        self._runtime, self._device, self._context = runtime, device, context
        self._before = _INT()

    def __enter__(self) -> None:
        if self._runtime.nvidia:
            self._runtime.push(self._context)
            return
        self._runtime.get_device(ctypes.byref(self._before))
        self._runtime.set_device(self._device)

    def __exit__(self, *exc_info: Any) -> None:
        if self._runtime.nvidia:
            self._runtime.pop(ctypes.byref(_P()))
        else:
            self._runtime.set_device(self._before.value)


class DeviceMemory:
    """Memory of a device that is given out in blocks."""

    def __init__(self, device: int, nvidia: bool, size: int, blocks: Any) -> None:
        """`blocks`: Blocks, or those of the library. The address is set once it is known."""
        self.device = device
        self.nvidia = nvidia
        self.address = 0
        self.size = size
        self._blocks = blocks
        self._lock = threading.Lock()

    def allocate(self, *sizes: int) -> List[int]:
        """Offsets of that many bytes each, at multiples of 64. ResourceExhausted without room."""
        with self._lock:
            offsets: List[int] = []
            for size in sizes:
                offset = self._blocks.take(-(-max(size, 1) // 64) * 64)
                if offset is None:
                    for taken in offsets:
                        self._blocks.give(taken)
                    raise errors.ResourceExhausted(
                        f"device memory: no room for {sum(sizes)} of {self.size} bytes; ask for "
                        "more with device_bytes")
                offsets.append(offset)
            return offsets

    def free(self, offsets: List[int]) -> None:
        """Gives back what `allocate` returned."""
        with self._lock:
            for offset in offsets:
                self._blocks.give(offset)

    def array(self, offset: int, shape: Tuple[int, ...], dtype: Any) -> "DeviceArray":
        """The tensor at an offset."""
        return DeviceArray(self, self.address + offset, shape, dtype)


class DeviceRegion(DeviceMemory):
    """The device memory of one ring, mapped into this process."""

    def __init__(self, part: bytes, descriptor: Optional[int], entries: int, device: int,
                 library: str) -> None:
        """`part`: DeviceHeader and the event handles. The descriptor stays the caller's.
        Unavailable names what this process lacks."""
        _, nvidia, kind, _, size, uuid, _, memory = HEADER.unpack_from(part)
        if kind != HANDLE and (kind != DESCRIPTOR or descriptor is None):
            raise errors.Unimplemented(f"device memory: got kind {kind}, must be 1 with a "
                                       "descriptor, or 2")
        super().__init__(device, bool(nvidia), size, Blocks(0, size))
        self.warning = ""  # what will be slow, in words for people
        self._undo: List[Callable[[], None]] = []
        self._events: List[int] = []
        self._local: List[int] = []
        self._recorded_here = True  # the events, by streams of this process's device
        self._relay = 0
        runtime: Any = _Runtime(self.nvidia, library)
        self._runtime = runtime
        self._find_devices(uuid)
        try:
            with self._own():
                self.address = self._map(kind, descriptor, memory)
            self._open_events(part[HEADER.size:], entries)
        except BaseException:
            self.close()
            raise

    def _open_events(self, handles: bytes, entries: int) -> None:
        """In the context of this process's device, so that its streams record them; where the
        runtime opens them on their own device alone, a stream over there does."""
        runtime = self._runtime
        for here in (True, False):
            self._recorded_here = here
            try:
                with self._own() if here else self._servers():
                    for at in range(0, entries * HANDLE_BYTES, HANDLE_BYTES):
                        self._events.append(self._made(runtime.open_event,
                                                       _handle(handles[at:at + HANDLE_BYTES])))
                break
            except errors.Internal:
                if self._same or not here:
                    raise
                self._close_events()
        if self._recorded_here:
            return
        with self._servers():
            self._relay = self._made(runtime.stream_create, _STREAM_NON_BLOCKING)
        with self._own():
            while len(self._local) < entries:
                self._local.append(self._made(runtime.event_create, _EVENT_WITHOUT_TIMING))

    def _close_events(self) -> None:
        with self._own() if self._recorded_here else self._servers():
            for event in self._events:
                self._runtime.event_destroy(event)
        self._events = []

    def _own(self) -> _Current:
        return _Current(self._runtime, self.device, self._context)

    def _servers(self) -> _Current:
        return _Current(self._runtime, self._server_device, self._server_context)

    @staticmethod
    def _made(call: Callable[..., None], *arguments: Any) -> int:
        made = _P()
        call(ctypes.byref(made), *arguments)
        return made.value or 0

    def _find_devices(self, wanted: bytes) -> None:
        runtime = self._runtime
        runtime.init(0)
        count = _INT()
        runtime.device_count(ctypes.byref(count))
        if not 0 <= self.device < count.value:
            raise errors.Unavailable(f"device memory: device {self.device} of {count.value}")
        uuid = ctypes.create_string_buffer(16)
        for i in range(count.value):
            runtime.uuid(uuid, i)
            if uuid.raw == wanted:
                self._server_device = i
                break
        else:
            raise errors.Unavailable("device memory: the server's GPU is not visible here")
        self._same = self._server_device == self.device
        self._context = self._server_context = None
        if not runtime.nvidia:
            return
        self._context = self._made(runtime.retain, self.device)
        self._server_context = self._made(runtime.retain, self._server_device)
        shared = _INT()
        runtime.attribute(ctypes.byref(shared), _NVIDIA_MPS_ENABLED, self.device)
        if self._same and not shared.value:
            self.warning = ("worker and server share a GPU without MPS, so that the driver gives "
                            "it to one of them at a time: a layer takes hundreds of microseconds "
                            "more")

    def _map(self, kind: int, descriptor: Optional[int], memory: bytes) -> int:
        runtime = self._runtime
        if kind == HANDLE:
            address = self._made(runtime.open_memory, _handle(memory), _LAZY_PEER_ACCESS)
            self._undo.append(lambda: runtime.close_memory(address))
            return address
        allocation, number, version = _U64(), _INT(descriptor or 0), _INT()
        if not runtime.nvidia:
            runtime.version(ctypes.byref(version))
        by_value = runtime.nvidia or version.value >= _AMD_IMPORTS_BY_VALUE
        runtime.import_memory(ctypes.byref(allocation),
                              descriptor if by_value else ctypes.byref(number), _POSIX_DESCRIPTOR)
        self._undo.append(lambda: runtime.release(allocation))
        address = self._made(runtime.reserve, self.size, 0, None, 0)
        self._undo.append(lambda: runtime.unreserve(address, self.size))
        runtime.map(address, self.size, 0, allocation, 0)
        self._undo.append(lambda: runtime.unmap(address, self.size))
        runtime.set_access(address, self.size,
                           ctypes.byref(_Access(_ON_DEVICE, self.device, _READ_WRITE)), 1)
        return address

    def record(self, slot: int, stream: int) -> None:
        """Records in the event of a ring slot what the stream has been given so far (a handle as
        `torch.cuda.Stream.cuda_stream`; 0: the default stream). Does not wait for it."""
        runtime = self._runtime
        with self._own():
            runtime.event_record(self._events[slot] if self._recorded_here
                                 else self._local[slot], stream or None)
        if self._recorded_here:
            return
        with self._servers():
            runtime.stream_wait(self._relay, self._local[slot], 0)
            runtime.event_record(self._events[slot], self._relay)

    def close(self) -> None:
        """Unmaps it: tensors that lie there must not be used any more. Repeating is harmless."""
        runtime = self._runtime
        self._close_events()
        if self._relay:
            with self._servers():
                runtime.stream_destroy(self._relay)
        with self._own():
            for event in self._local:
                runtime.event_destroy(event)
            while self._undo:
                self._undo.pop()()
        self._local, self._relay = [], 0


def _handle(data: bytes) -> _Handle:
    return _Handle.from_buffer_copy(data)


class _DlDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DlType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DlTensor(ctypes.Structure):
    _fields_ = [("data", _P), ("device", _DlDevice), ("ndim", ctypes.c_int32), ("dtype", _DlType),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _DlManaged(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DlManaged))
_DlManaged._fields_ = [("tensor", _DlTensor), ("context", _P), ("deleter", _DELETER)]
_lent: Dict[int, Tuple[Any, ...]] = {}  # by the struct's address: what a consumer still uses
_lent_lock = threading.Lock()
process.free_at_fork(_lent_lock)


def _make_deleter() -> Any:
    """What a consumer calls when it no longer uses a tensor, on any thread. Consumers may end after
    this module: tensors that lie in a global of the main program are destroyed while the
    interpreter ends. So it reads no global of the module, and it is never freed."""
    tensors, lock, address_of = _lent, _lent_lock, ctypes.addressof

    def delete(managed: Any) -> None:
        with lock:
            tensors.pop(address_of(managed.contents), None)

    made = _DELETER(delete)
    process.keep(made)
    return made


_delete = _make_deleter()


class DeviceArray:
    """A tensor in device memory, for PyTorch, CuPy and others: `torch.from_dlpack(array)`, or
    anything that reads `__cuda_array_interface__`. bf16 is bfloat16 through DLPack and, since the
    interface has no name for it, uint16 through the other."""

    def __init__(self, region: DeviceMemory, address: int, shape: Tuple[int, ...],
                 dtype: Any) -> None:
        self._region = region
        self.address = address
        self.shape = shape
        self.dtype = np.dtype(dtype)  # uint16 (bf16 patterns) or float32

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def squeeze(self, axis: int) -> "DeviceArray":
        """The same memory without an axis of length one, as numpy's. ValueError: it is longer."""
        axis = range(len(self.shape))[axis]  # a negative one counts from the end
        if self.shape[axis] != 1:
            raise ValueError(f"squeeze: axis {axis} of {self.shape} must have length 1")
        return DeviceArray(self._region, self.address,
                           self.shape[:axis] + self.shape[axis + 1:], self.dtype)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} of {self.dtype} on device {self._region.device}>"

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False),
                "version": 3, "strides": None, "stream": None}

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (_DL_CUDA if self._region.nvidia else _DL_ROCM, self._region.device)

    def __dlpack__(self, **_options: Any) -> Any:
        """A capsule for one consumer. Nothing is under way on the memory when it is made, so no
        stream has to wait."""
        half = self.dtype == np.uint16
        shape = (ctypes.c_int64 * self.ndim)(*self.shape)
        strides = (ctypes.c_int64 * self.ndim)(
            *(int(np.prod(self.shape[i + 1:])) for i in range(self.ndim)))
        kind, number = self.__dlpack_device__()
        managed = _DlManaged(
            _DlTensor(self.address, _DlDevice(kind, number), self.ndim,
                      _DlType(_DL_BFLOAT if half else _DL_FLOAT, 16 if half else 32, 1),
                      shape, strides, 0), None, _delete)
        with _lent_lock:
            _lent[ctypes.addressof(managed)] = (managed, shape, strides, self)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [_P, ctypes.c_char_p, _P]
        return make(ctypes.addressof(managed), _CAPSULE, None)


def buffers_in(memory: Any, device: str, shape: Tuple[Any, ...]) -> Optional[Buffers]:
    """Buffers in a stream's SharedMemory, of the host ("cpu"; None if there is none or no room) or
    of the GPU."""
    buffers: Optional[Buffers] = None
    if device == "cpu":
        buffers = memory and memory.buffers(*shape)
        return buffers
    if device not in ("cuda", "hip"):
        raise errors.InvalidArgument(f"buffers.device: got {device!r}, must be cpu, cuda or hip")
    if memory is None:
        raise errors.Unavailable("device memory: the stream has no shared memory")
    buffers = memory.device_buffers(*shape)
    return buffers


def check_call(q: Any, kv: Any, out: Optional[Buffers], lists: Any,
               spec: ModelSpec) -> None:
    """Tensors of a GPU are used where they lie or not at all: nothing here can copy them."""
    if out is None or out.place is None or not out.place.on_device:
        if isinstance(q, DeviceArray) or isinstance(kv, DeviceArray):
            raise errors.InvalidArgument("attend: tensors of a GPU need the buffers they are of "
                                         "as out")
    elif q is not out.q or kv is not out.kv or lists is not None:
        raise errors.InvalidArgument("attend.out: buffers of a GPU need their own kv and q, as "
                                     "they are, and no lists")
    elif spec.window > 0:
        raise errors.InvalidArgument("attend.out: got buffers of a GPU, must lie in host memory: "
                                     "the model's entries follow its rows")
