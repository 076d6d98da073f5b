// The state of the fake: workers, endpoints, and what is under way between them. For the files of
// this folder alone.
//
// Threading: `World::mutex` guards everything but `faults`; callers of the functions hold it.
#ifndef MLA_TESTS_FAKE_UCX_FAKE_WORLD_H_
#define MLA_TESTS_FAKE_UCX_FAKE_WORLD_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/fake_ucx/fake_ucx.h"

namespace mla::fake_ucx {

struct Worker;
struct Request;

// Registered memory. Its name is its key.
struct Memory {
  uint64_t begin = 0, bytes = 0;
  bool writable = false;  // by peers
  ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
  uint64_t name = 0;
};

struct Put {
  const void* from = nullptr;
  size_t bytes = 0;
  uint64_t to = 0, key = 0;
  Request* request = nullptr;
};

struct Endpoint {
  Worker* own = nullptr;
  std::string peer;
  ucp_err_handler_t on_error{};
  bool lost = false, told = false;
  std::deque<Put> puts;
  std::vector<Request*> flushes;
};

// An operation under way.
struct Request {
  Worker* owner = nullptr;
  ucs_status_t status = UCS_INPROGRESS;
  ucp_send_nbx_callback_t sent = nullptr;
  ucp_am_recv_data_nbx_callback_t received = nullptr;
  void* user_data = nullptr;
  size_t bytes = 0;
  void* to = nullptr;  // where a receive puts the payload
  bool is_put = false;
};

struct Message {
  unsigned id = 0;
  std::string header;
  std::string eager;
  const void* payload = nullptr;  // of a rendezvous
  size_t bytes = 0;
  Request* sending = nullptr;  // of a rendezvous
};

// A receive that was asked for.
struct Pull {
  std::unique_ptr<Message> message;
  Request* receiving;
};

struct Worker {
  std::string address;
  int event = -1;
  std::map<unsigned, ucp_am_handler_param_t> handlers;  // by the number of the message
  std::deque<std::unique_ptr<Message>> inbox;
  std::vector<std::unique_ptr<Message>> offered;  // to a callback that runs now
  std::deque<Pull> pulls;
  std::deque<Request*> done;  // whose callbacks are due
  std::vector<Endpoint*> endpoints;
  bool stopped = false, cut = false;
};

struct World {
  std::mutex mutex;
  Faults faults;
  std::mt19937_64 random{1};
  uint64_t next_address = 1;
  std::map<std::string, Worker*> workers;
  std::map<uint64_t, Memory> memory;  // by name
  uint64_t next_name = 0x6b657900;
  std::string stop_point, stop_address;  // of StopAt; empty: none
  Counts counts;
  std::string transports;
};

World& TheWorld();

inline bool Fails(const char* call) { return TheWorld().faults.fails == call; }

inline void Notify(const Worker& worker) {
  const uint64_t one = 1;
  if (worker.event >= 0 && write(worker.event, &one, sizeof(one)) < 0) return;
}

// True if the worker stops at this point, or has stopped.
inline bool StopsAt(Worker* worker, const char* point) {
  World& world = TheWorld();
  if (world.stop_point == point && world.stop_address == worker->address) {
    worker->stopped = true;
    world.stop_point.clear();
  }
  return worker->stopped;
}

// Place of the element that goes next.
template <typename Queue>
size_t NextOf(const Queue& queue) {
  World& world = TheWorld();
  return world.faults.reorder == 0 ? 0 : world.random() % queue.size();
}

template <typename Queue>
typename Queue::value_type TakeAt(Queue* queue, size_t at) {
  typename Queue::value_type one = std::move((*queue)[at]);
  queue->erase(queue->begin() + static_cast<std::ptrdiff_t>(at));
  return one;
}

inline Worker* AsWorker(ucp_worker_h handle) { return reinterpret_cast<Worker*>(handle); }
inline Endpoint* AsEndpoint(ucp_ep_h handle) { return reinterpret_cast<Endpoint*>(handle); }

inline void Finish(Request* request, ucs_status_t status) {
  request->status = status;
  request->owner->done.push_back(request);
  Notify(*request->owner);
}

inline void Drop(Request* request) {
  --TheWorld().counts.live_requests;
  delete request;
}

// The point at which the end of a request is seen.
inline const char* PointOf(const Request& request) {
  if (request.received != nullptr) return "received";
  return request.is_put ? "put_done" : "sent";
}

inline Request* NewRequest(Worker* owner, const ucp_request_param_t* param) {
  auto* const request = new Request();
  request->owner = owner;
  request->user_data = param->user_data;
  ++TheWorld().counts.live_requests;
  return request;
}

// Puts and flushes (fake_puts.cc). DoWrite does one of the worker; false if there is none.
bool HasWrites(const Worker& worker);
bool DoWrite(Worker* worker);
// Counts a payload whose memory is registered as another type than the one that was named.
void CheckType(const void* payload, const ucp_request_param_t& param);
// Registered memory, keys, puts and flushes.
void AddPuts(wire::UcxApi* api);

}  // namespace mla::fake_ucx

#endif  // MLA_TESTS_FAKE_UCX_FAKE_WORLD_H_
