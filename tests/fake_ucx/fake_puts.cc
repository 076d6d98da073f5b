#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/fake_ucx/fake_world.h"

namespace mla::fake_ucx {
namespace {

// As the hardware of the receiver does.
ucs_status_t DoPut(const Put& put) {
  World& world = TheWorld();
  const auto found = world.memory.find(put.key);
  if (found == world.memory.end() || !found->second.writable || put.to < found->second.begin ||
      put.bytes > found->second.bytes ||
      put.to - found->second.begin > found->second.bytes - put.bytes) {
    ++world.counts.refused_puts;
    return UCS_ERR_REJECTED;
  }
  std::memcpy(reinterpret_cast<void*>(put.to), put.from, put.bytes);
  ++world.counts.puts;
  if (found->second.type != UCS_MEMORY_TYPE_HOST) {
    ++world.counts.device_puts;
    world.counts.device_put_bytes += put.bytes;
  }
  world.counts.put_bytes += put.bytes;
  return UCS_OK;
}

ucs_status_t MemMap(ucp_context_h, const ucp_mem_map_params_t* params, ucp_mem_h* handle) {
  if (Fails("memory")) return UCS_ERR_NO_MEMORY;
  World& world = TheWorld();
  const ucs_memory_type_t type = (params->field_mask & UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE) != 0
                                     ? params->memory_type
                                     : UCS_MEMORY_TYPE_HOST;
  if ((world.faults.memory_types & UCS_BIT(type)) == 0) return UCS_ERR_UNSUPPORTED;
  const std::lock_guard<std::mutex> lock(world.mutex);
  ++world.counts.registered;
  auto* const memory = new Memory();
  memory->begin = reinterpret_cast<uint64_t>(params->address);
  memory->bytes = params->length;
  memory->writable = (params->field_mask & UCP_MEM_MAP_PARAM_FIELD_PROT) != 0 &&
                     (params->prot & UCP_MEM_MAP_PROT_REMOTE_WRITE) != 0;
  memory->type = type;
  memory->name = world.next_name++;
  world.memory[memory->name] = *memory;
  *handle = reinterpret_cast<ucp_mem_h>(memory);
  return UCS_OK;
}
ucs_status_t MemUnmap(ucp_context_h, ucp_mem_h handle) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  auto* const memory = reinterpret_cast<Memory*>(handle);
  world.memory.erase(memory->name);
  delete memory;
  --world.counts.registered;
  return UCS_OK;
}

ucs_status_t KeyPack(ucp_context_h, ucp_mem_h handle, void** key, size_t* bytes) {
  if (Fails("key")) return UCS_ERR_UNSUPPORTED;
  *bytes = sizeof(uint64_t);
  *key = std::malloc(*bytes);
  std::memcpy(*key, &reinterpret_cast<Memory*>(handle)->name, *bytes);
  return UCS_OK;
}
void KeyRelease(void* key) { std::free(key); }

ucs_status_t KeyUnpack(ucp_ep_h, const void* key, ucp_rkey_h* unpacked) {
  if (Fails("take_key")) return UCS_ERR_UNREACHABLE;
  auto* const name = new uint64_t(0);
  std::memcpy(name, key, sizeof(*name));
  *unpacked = reinterpret_cast<ucp_rkey_h>(name);
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  ++world.counts.live_keys;
  return UCS_OK;
}
void KeyDestroy(ucp_rkey_h key) {
  delete reinterpret_cast<uint64_t*>(key);
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  --world.counts.live_keys;
}

ucs_status_ptr_t PutNbx(ucp_ep_h handle, const void* from, size_t bytes, uint64_t to,
                        ucp_rkey_h key, const ucp_request_param_t* param) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  Endpoint* const endpoint = AsEndpoint(handle);
  if (Fails("put")) return UCS_STATUS_PTR(UCS_ERR_NO_MEMORY);
  if (endpoint->lost) return UCS_STATUS_PTR(UCS_ERR_CONNECTION_RESET);
  CheckType(from, *param);
  if (param->memory_type != UCS_MEMORY_TYPE_HOST) ++world.counts.puts_from_device;
  Request* const request = NewRequest(endpoint->own, param);
  request->sent = param->cb.send;
  request->is_put = true;
  endpoint->puts.push_back({from, bytes, to, *reinterpret_cast<uint64_t*>(key), request});
  Notify(*endpoint->own);
  return request;
}

ucs_status_ptr_t FlushNbx(ucp_ep_h handle, const ucp_request_param_t* param) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  Endpoint* const endpoint = AsEndpoint(handle);
  if (Fails("flush")) return UCS_STATUS_PTR(UCS_ERR_NO_MEMORY);
  if (endpoint->lost) return UCS_STATUS_PTR(UCS_ERR_CONNECTION_RESET);
  ++world.counts.flushes;
  if (endpoint->puts.empty()) return nullptr;
  Request* const request = NewRequest(endpoint->own, param);
  request->sent = param->cb.send;
  endpoint->flushes.push_back(request);
  Notify(*endpoint->own);
  StopsAt(endpoint->own, "flush");
  return request;
}

}  // namespace

void CheckType(const void* payload, const ucp_request_param_t& param) {
  World& world = TheWorld();
  const auto at = reinterpret_cast<uint64_t>(payload);
  const ucs_memory_type_t named = (param.op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) != 0
                                      ? param.memory_type
                                      : UCS_MEMORY_TYPE_HOST;
  for (const auto& [name, memory] : world.memory) {
    const bool holds = at >= memory.begin && at - memory.begin < memory.bytes;
    if (holds && memory.type != named) ++world.counts.wrong_types;
  }
}

bool HasWrites(const Worker& worker) {
  return std::any_of(worker.endpoints.begin(), worker.endpoints.end(),
                     [](const Endpoint* endpoint) {
                       return !endpoint->puts.empty() || !endpoint->flushes.empty();
                     });
}

bool DoWrite(Worker* worker) {
  World& world = TheWorld();
  for (Endpoint* endpoint : worker->endpoints) {
    if (!endpoint->puts.empty()) {
      const size_t next = NextOf(endpoint->puts);
      Put half = endpoint->puts[next];
      half.bytes /= 2;
      if (world.stop_point == "put" && world.stop_address == worker->address) {
        (void)DoPut(half);
        StopsAt(worker, "put");
        return false;
      }
      const Put put = TakeAt(&endpoint->puts, next);
      Finish(put.request, endpoint->lost ? UCS_ERR_CONNECTION_RESET : DoPut(put));
      return true;
    }
    if (endpoint->flushes.empty()) continue;
    for (Request* flush : std::exchange(endpoint->flushes, {})) {
      Finish(flush, endpoint->lost ? UCS_ERR_CONNECTION_RESET : UCS_OK);
    }
    return true;
  }
  return false;
}

void AddPuts(wire::UcxApi* api) {
  api->mem_map = MemMap;
  api->mem_unmap = MemUnmap;
  api->rkey_pack = KeyPack;
  api->rkey_buffer_release = KeyRelease;
  api->ep_rkey_unpack = KeyUnpack;
  api->rkey_destroy = KeyDestroy;
  api->put_nbx = PutNbx;
  api->ep_flush_nbx = FlushNbx;
}

}  // namespace mla::fake_ucx
