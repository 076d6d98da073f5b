// Requests that wait for a launch, in one queue for each tenant and batch key, and the service that
// each tenant and queue has had.
//
// Service is counted by start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant, and
// each queue within it, has a virtual time. It advances by the KV bytes of the work launched for
// it; a tenant's advances by these bytes divided by its weight. The tenant with the least virtual
// time goes first, and within it the queue with the least. A tenant that was idle, or whose
// requests could not go, starts at the time of the tenant now served. So it neither saves up
// service nor pays for the service of others.
//
// A request whose rows are launched in parts keeps its place in its queue. Requests are linked
// through their engine fields: queueing allocates nothing once the pools are warm. A tenant without
// requests is forgotten when its virtual time has passed.
//
// Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_BATCHING_WAITING_REQUESTS_H_
#define MLA_SCHEDULER_BATCHING_WAITING_REQUESTS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "scheduler/batching/batch_key.h"
#include "scheduler/request.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

struct TenantShare;

// Requests of one tenant and batch key, in the order of their arrival.
struct RequestQueue {
  TenantShare* share = nullptr;
  BatchKey key;
  StreamRequest* head = nullptr;
  StreamRequest* tail = nullptr;
  int64_t virtual_time = 0;  // among the tenant's queues; KV bytes
};

struct TenantShare {
  TenantKey tenant = kNoTenant;
  int32_t weight = 1;
  int32_t waiting = 0;       // requests in its queues
  int64_t virtual_time = 0;  // KV bytes / weight
  // Virtual time of the queue of this tenant that was served last.
  int64_t queue_time = 0;
  std::vector<RequestQueue*> queues;  // with requests
};

class WaitingRequests {
 public:
  // Returns the first of all requests, or null. Their order has no meaning.
  StreamRequest* front() const { return head_; }
  static StreamRequest* Next(const StreamRequest* request) { return request->engine.next; }
  // Walks over all requests; any request may be removed during the walk, even the one just
  // returned. One pass at a time. Returns null at the end.
  void StartPass() { next_in_pass_ = head_; }
  StreamRequest* NextInPass() {
    StreamRequest* const request = next_in_pass_;
    if (request != nullptr) next_in_pass_ = Next(request);
    return request;
  }
  bool empty() const { return head_ == nullptr; }
  int32_t size() const { return size_; }

  // Queues a request after the others of its tenant and key. `weight` is its tenant's, at least 1.
  void Add(StreamRequest* request, int32_t weight);
  // Queues the rest of a request that a launch has taken in part, before later requests of its
  // tenant and key.
  void Return(StreamRequest* request, int32_t weight) { Insert(request, weight); }
  void Remove(StreamRequest* request);

  // Returns the tenants with requests, and their queues. Both stay until Prune, even when they have
  // no requests left.
  const std::vector<TenantShare*>& shares() const { return active_; }
  static StreamRequest* NextInQueue(const StreamRequest* request) {
    return request->engine.queue_next;
  }
  // Counts work that a launch takes from the queue, for the tenant and for the queue. `units`: KV
  // bytes (LaunchUnits::sum).
  void AddService(RequestQueue* queue, int64_t units);
  // Counts `units` more served to a tenant whose request a launch has taken already.
  void Charge(TenantKey tenant, int32_t weight, int64_t units);
  // Called if none of the requests of the tenant, or of one of its queues, could go now: it saves
  // up no service.
  void SkipTenant(TenantShare* share) const {
    share->virtual_time = std::max(share->virtual_time, virtual_now_);
  }
  static void SkipQueue(RequestQueue* queue) {
    queue->virtual_time = std::max(queue->virtual_time, queue->share->queue_time);
  }
  // Call it when the launch now chosen begins with requests of this queue, the least served one.
  void Serve(const RequestQueue& queue);
  // Drops queues and tenants without requests.
  void Prune();

 private:
  TenantShare* FindOrAddShare(TenantKey tenant, int32_t weight);
  RequestQueue* FindOrAddQueue(TenantShare* share, const BatchKey& key);
  void Insert(StreamRequest* request, int32_t weight);

  StreamRequest* head_ = nullptr;
  StreamRequest* tail_ = nullptr;
  StreamRequest* next_in_pass_ = nullptr;
  int32_t size_ = 0;
  uint64_t added_ = 0;
  int64_t virtual_now_ = 0;
  std::vector<std::unique_ptr<TenantShare>> shares_;  // all, with requests or not
  std::vector<TenantShare*> active_, idle_, free_shares_;
  std::vector<std::unique_ptr<RequestQueue>> queues_;
  std::vector<RequestQueue*> free_queues_;
};

// Returns the key of a request's queue. REQUIRES: engine.step is set.
BatchKey KeyOf(const StreamRequest& request);
inline bool Computes(const StreamRequest& request) {
  return request.attend.profile != Profile::kAppendOnly;
}

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_WAITING_REQUESTS_H_
