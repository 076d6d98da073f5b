"""Device memory as a client maps it, on the fake GPU runtime: its memory is the host's."""

import ctypes
import os
import struct
import subprocess
import sys
import textwrap
import unittest

import numpy as np
import server_binary
from mla_client import DType, Geometry, Profile, errors, types, wire
from mla_client.shm import device

LIBRARY = server_binary.ROOT / ".bazel/bin/tests/fake_hip/libfake_hip.so"
MEMORY_BYTES = 2 << 20
EVENTS = 4


class Server:
    """Objects that a server makes: memory with a descriptor, and events."""

    def __init__(self):
        self.library = ctypes.CDLL(str(LIBRARY))
        self.handle, self.descriptor = ctypes.c_ulonglong(), ctypes.c_int(-1)
        self.call("hipMemCreate", ctypes.byref(self.handle), ctypes.c_size_t(MEMORY_BYTES), None,
                  ctypes.c_ulonglong(0))
        self.call("hipMemExportToShareableHandle", ctypes.byref(self.descriptor), self.handle, 1,
                  ctypes.c_ulonglong(0))
        uuid = ctypes.create_string_buffer(16)
        self.call("hipDeviceGetUuid", uuid, 0)
        self.events, handles = [], b""
        for _ in range(EVENTS):
            event, name = ctypes.c_void_p(), ctypes.create_string_buffer(64)
            self.call("hipEventCreateWithFlags", ctypes.byref(event), 6)
            self.call("hipIpcGetEventHandle", name, event)
            self.events.append(event)
            handles += name.raw
        self.uuid = uuid.raw
        self.handles = handles

    def part(self, nvidia=1, kind=device.DESCRIPTOR, uuid=None, memory=b""):
        return device.HEADER.pack(0x314D4853, nvidia, kind, 0, MEMORY_BYTES, uuid or self.uuid,
                                  b"", memory) + self.handles

    def set_version(self, number):
        """Sets the value of hipRuntimeGetVersion: the first number of the fake's control block."""
        self.library.fake_hip_control.restype = ctypes.POINTER(ctypes.c_int)
        self.library.fake_hip_control()[0] = number

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: {code}")

    def close(self):
        for event in self.events:
            self.call("hipEventDestroy", event)
        self.call("hipMemRelease", self.handle)
        os.close(self.descriptor.value)


class DeviceTest(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.close)

    def region(self, **part):
        region = device.DeviceRegion(self.server.part(**part), self.server.descriptor.value, EVENTS,
                                     0, str(LIBRARY))
        self.addCleanup(region.close)
        return region

    def test_both_map_the_same_bytes(self):
        for nvidia in (0, 1):
            region = self.region(nvidia=nvidia)
            self.assertEqual((region.size, region.warning), (MEMORY_BYTES, ""))
            ctypes.memset(region.address + 100, 0x5A + nvidia, 1)
            self.assertEqual(os.pread(self.server.descriptor.value, 1, 100),
                             bytes([0x5A + nvidia]))

    def test_a_descriptor_is_given_as_each_version_of_hip_takes_it(self):
        self.addCleanup(self.server.set_version, 70226015)
        for version in (60241134, 60443484, 70051831, 70125424, 70226015):
            self.server.set_version(version)
            region = self.region(nvidia=0)
            ctypes.memset(region.address + 7, version % 251, 1)
            self.assertEqual(os.pread(self.server.descriptor.value, 1, 7),
                             bytes([version % 251]))

    def test_memory_by_handle(self):
        at, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        self.server.call("hipMalloc", ctypes.byref(at), ctypes.c_size_t(MEMORY_BYTES))
        self.addCleanup(self.server.call, "hipFree", at)
        self.server.call("hipIpcGetMemHandle", handle, at)
        region = device.DeviceRegion(
            self.server.part(nvidia=0, kind=device.HANDLE, memory=handle.raw), None, EVENTS, 0,
            str(LIBRARY))
        self.addCleanup(region.close)
        ctypes.memset(region.address + 100, 0x5A, 1)
        self.assertEqual(ctypes.string_at(at.value + 100, 1), b"\x5a")

    def test_the_runtime_that_the_process_has_is_taken(self):
        with self.assertRaisesRegex(errors.Unavailable, "no GPU runtime: libno.so.*; libnone.so"):
            device._open(("libno.so", "libnone.so"))
        loaded = device._open(("libno.so", str(LIBRARY)))
        self.assertEqual(loaded._handle, self.server.library._handle)

    def test_where_rocm_lies(self):
        before = os.environ.get("ROCM_PATH")
        os.environ["ROCM_PATH"] = "/elsewhere"
        try:
            self.assertEqual(device._libraries(False)[2:4], ("/elsewhere/lib/libamdhip64.so.7",
                                                             "/elsewhere/lib/libamdhip64.so.6"))
        finally:
            os.environ.pop("ROCM_PATH")
            if before is not None:
                os.environ["ROCM_PATH"] = before
        self.assertEqual(device._libraries(False)[-1], "/opt/rocm/lib/libamdhip64.so.6")
        self.assertEqual(device._libraries(True), ("libcuda.so.1",))

    def test_events_reach_the_server(self):
        region = self.region()
        for slot in range(EVENTS):
            region.record(slot, 0)
            self.server.call("hipEventQuery", self.server.events[slot])

    def test_what_others_read_of_a_tensor(self):
        region = self.region()
        offset, = region.allocate(2 * 3 * 8 * 2)
        array = region.array(offset, (2, 3, 8), np.uint16)
        interface = array.__cuda_array_interface__
        self.assertEqual((interface["shape"], interface["typestr"], interface["data"]),
                         ((2, 3, 8), "<u2", (region.address + offset, False)))
        self.assertEqual(array.__dlpack_device__(), (2, 0))
        capsule = array.__dlpack__(stream=None)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        at = get(capsule, b"dltensor")
        managed = device._DlManaged.from_address(at)
        tensor = managed.tensor
        self.assertEqual((tensor.data, tensor.ndim, tensor.dtype.code, tensor.dtype.bits),
                         (region.address + offset, 3, 4, 16))
        self.assertEqual(tensor.shape[0:3] + tensor.strides[0:3], [2, 3, 8, 24, 8, 1])
        self.assertIn(at, device._lent)
        managed.deleter(ctypes.pointer(managed))  # as a consumer does at its end
        self.assertNotIn(at, device._lent)

    def test_an_axis_of_one_is_left_out(self):
        region = self.region()
        offset, = region.allocate(3 * 8 * 4)
        array = region.array(offset, (3, 1, 8), np.float32)
        whole = array.squeeze(1)
        self.assertEqual((whole.shape, whole.address, whole.dtype),
                         ((3, 8), array.address, array.dtype))
        self.assertEqual(whole.__cuda_array_interface__["data"], (region.address + offset, False))
        self.assertEqual(array.squeeze(-2).shape, (3, 8))
        with self.assertRaisesRegex(ValueError, r"axis 2 of \(3, 1, 8\) must have length 1"):
            array.squeeze(2)

    def test_projected_outputs_have_no_heads(self):
        region = self.region()
        offset, = region.allocate(3 * 8 * 2)
        out = types.Buffers(None, None, region.array(offset, (3, 1, 8), np.uint16), None,
                            DType.BF16)
        args = types.AttendArgs(0, Profile.PROJECTED, 0, 3, 0, 1, None, None, False, DType.BF16,
                                DType.BF16, 1.0, out)
        geometry = Geometry(4, 16, 4, 8, 8, q_lora_rank=6, hidden_size=8)
        result = wire.ResultAssembler(args, geometry).result()
        self.assertIsInstance(result.o, device.DeviceArray)
        self.assertEqual((result.o.shape, result.o.address), ((3, 8), region.address + offset))

    def test_a_tensor_may_outlive_the_module(self):
        program = textwrap.dedent("""
            import ctypes, sys, weakref
            import numpy as np
            from mla_client.shm import device

            class Region:
                nvidia, device = True, 0

            class Consumer:  # as a tensor in a global of the main program
                def __init__(self, array):
                    get = ctypes.pythonapi.PyCapsule_GetPointer
                    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
                    self.managed = get(array.__dlpack__(), b"dltensor")
                    at = device._DlManaged.deleter.offset + self.managed
                    self.end = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
                        ctypes.c_void_p.from_address(at).value)
                    self.array, self.say = weakref.ref(array), print

                def __del__(self):
                    self.end(self.managed)
                    self.say("still used" if self.array() else "given back")

            consumer = Consumer(device.DeviceArray(Region(), 4096, (2, 3), np.uint16))
            # A reference makes Python clear the main program after the modules that it imports.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["__main__"]))
            """)
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                               timeout=60, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
        self.assertEqual((ended.returncode, ended.stdout, ended.stderr),
                         (0, "given back\n", ""))

    def test_blocks(self):
        region = self.region()
        first = region.allocate(MEMORY_BYTES - 128, 100)
        self.assertEqual(first, [0, MEMORY_BYTES - 128])
        with self.assertRaisesRegex(errors.ResourceExhausted, "device_bytes"):
            region.allocate(64)
        region.free(first)
        self.assertEqual(region.allocate(MEMORY_BYTES), [0])

    def test_what_is_missing(self):
        with self.assertRaisesRegex(errors.Unavailable, "not visible"):
            self.region(uuid=b"another device!!")
        with self.assertRaisesRegex(errors.Unavailable, "no GPU runtime"):
            device.DeviceRegion(self.server.part(), self.server.descriptor.value, EVENTS, 0,
                                "libthere_is_none.so")
        with self.assertRaisesRegex(errors.Unavailable, "device 3 of"):
            device.DeviceRegion(self.server.part(), self.server.descriptor.value, EVENTS, 3,
                                str(LIBRARY))
        with self.assertRaises(errors.Unimplemented):
            device.DeviceRegion(self.server.part(), None, EVENTS, 0, str(LIBRARY))
        self.assertEqual(struct.calcsize(device.HEADER.format), 128)


if __name__ == "__main__":
    unittest.main()
